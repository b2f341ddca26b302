"""Farthest point sampling and nearest neighbours for point clouds.

The functions ``fps`` and ``nearest`` follow the torch_cluster functions of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import torch

from popdist_py.poptorch.errors import Error

__all__ = ["fps", "nearest"]


def fps(
    src: torch.Tensor,
    ptr: Sequence[int] | torch.Tensor,
    ratio: float = 0.5,
    random_start: bool = False,
) -> torch.Tensor:
    """Choose points of each cloud that are far from each other, by farthest point sampling.

    Args:
        src: The points of all clouds, with shape [points, dimensions].
        ptr: The index in ``src`` of each cloud's first point, followed by the total number of
            points.
        ratio: The fraction of each cloud's points to choose.
        random_start: Whether the search begins at a random point of each cloud, instead of the
            cloud's first point.

    Returns:
        The indices of the chosen points in ``src`` (int32). The indices of each cloud's points are
        in the order in which the points were chosen.

    Raises:
        Error: An argument has a wrong type.
    """
    _check_tensors(fps=src)
    bounds: Any = ptr.tolist() if isinstance(ptr, torch.Tensor) else ptr
    if not isinstance(bounds, (list, tuple)) or not all(isinstance(b, int) for b in bounds):
        raise Error(f"fps: ptr must be a list of ints, got {ptr!r}")
    clouds = [
        start + _farthest_points(src[start:stop], ceil(ratio * (stop - start)), random_start)
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(clouds).to(torch.int32) if clouds else torch.empty(0, dtype=torch.int32)


def _farthest_points(points: torch.Tensor, count: int, random_start: bool) -> torch.Tensor:
    points = points.reshape(len(points), -1)
    last = torch.zeros((), dtype=torch.long)
    if random_start:
        last = torch.randint(len(points), ())
    distances = torch.full((len(points),), torch.inf, dtype=points.dtype)
    chosen = [last]
    for _ in range(count - 1):
        newest = points.index_select(0, last.reshape(1))
        distances = torch.minimum(distances, (points - newest).square().sum(-1))
        last = distances.argmax()
        chosen.append(last)
    return torch.stack(chosen)


def nearest(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: torch.Tensor | Sequence[int] | None = None,
    batch_y: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the index of the nearest point in ``y`` for each point in ``x``.

    Args:
        x: The points whose nearest neighbours are searched, with shape [N, dimensions].
        y: The points among which the neighbours are searched, with shape [M, dimensions].
        batch_x: The index of the cloud that each point in ``x`` belongs to. A point in ``x`` is
            compared only with the points of the same cloud in ``y``.
        batch_y: The index of the cloud that each point in ``y`` belongs to.

    Returns:
        The indices with shape [N] (int32).

    Raises:
        Error: An argument has a wrong type.
    """
    _check_tensors(nearest=x)
    _check_tensors(nearest=y)
    distances = torch.cdist(x.reshape(len(x), -1).float(), y.reshape(len(y), -1).float())
    if batch_x is not None or batch_y is not None:
        of_x = _batch(batch_x, len(x))
        of_y = _batch(batch_y, len(y))
        distances = distances.masked_fill(of_x[:, None] != of_y[None, :], torch.inf)
    return distances.argmin(1).to(torch.int32)


def _batch(batch: Any, size: int) -> torch.Tensor:
    if batch is None:
        return torch.zeros(size, dtype=torch.long)
    if not isinstance(batch, (torch.Tensor, list, tuple)):
        raise Error(
            "nearest: batch_x and batch_y must be tensors or lists of ints, got "
            f"{type(batch).__name__}"
        )
    return torch.as_tensor(batch)


def _check_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise Error(f"{name}: the points must be a torch.Tensor, got {type(value).__name__}")
