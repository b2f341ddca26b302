"""What a loader process iterates for a data set, decided once and handed on as a value.

Decisions on data sets and torch's loaders only; no processes, no shared memory. A loader with
rules of its own answers ``_loader_source(size)``, so that nothing here has to know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

__all__ = ["LoaderArguments", "Source", "length_of", "loader_source", "source_of"]

_MAX_SLOTS: Final = 200  # Python passes at most 256 file descriptors to a fork server


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """Items that a torch DataLoader loads, which is made in the loader process."""

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the loader process iterates, and what its accessor has to know about it.

    Attributes:
        items: an iterable of items, a map-style data set, or :class:`LoaderArguments`.
        in_place: whether the items are batches that can be collated into shared memory.
        ahead: how many batches the workers load at once.
        drop_last: whether a last batch with fewer elements is left out when rebatching.
        length: answers the number of items in an epoch; TypeError where the data set has none.
        sampler: gives the order of the items, in this process: the program may tell it of epochs.
        dataset: the data set of the items, in this process; the program may call its ``set_epoch``.
        why_empty: what to say if there is no item at all.
    """

    items: Any
    in_place: bool = False
    ahead: int = 0
    drop_last: bool = True
    length: Callable[[], int]
    sampler: Any = None
    dataset: Any = None
    why_empty: str = (
        "the data set is empty, or its items do not fill one batch: it must yield a first item"
    )


def source_of(dataset: Any, size: int | None) -> Source:
    """Decide what the loader process iterates.

    Args:
        dataset: a data set, a loader, or any iterable.
        size: elements of the batches to assemble from the items; None to pass them on.
    """
    # Asked of the type, like Python's own protocols: a wrapper that hands on the attributes of a
    # loader is iterated itself.
    own = getattr(type(dataset), "_loader_source", None)
    if own is not None:
        source: Source = own(dataset, size)
        return source
    length = partial(length_of, dataset, size)
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return Source(items=dataset, length=length, dataset=dataset)
    if type(dataset).__iter__ is not torch.utils.data.DataLoader.__iter__:
        return Source(items=dataset, drop_last=dataset.drop_last, length=length, dataset=dataset)
    return loader_source(dataset, size, drop_last=dataset.drop_last, length=length)


def loader_source(
    loader: torch.utils.data.DataLoader[Any],
    size: int | None,
    *,
    drop_last: bool,
    length: Callable[[], int],
) -> Source:
    """Return the source of a loader that iterates as torch's does: an equal one is made again."""
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    in_place = (
        not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        and loader.batch_sampler is not None
        and loader.worker_init_fn is None  # it may ask for the data set, and expects its own
        and size in (None, loader.batch_size)
        and ahead < _MAX_SLOTS
    )
    return Source(
        items=LoaderArguments(_arguments(loader)),
        in_place=in_place,
        ahead=ahead if in_place else 0,
        drop_last=drop_last,
        length=length,
        sampler=loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
        dataset=loader.dataset,
    )


def length_of(dataset: Any, size: int | None) -> int:
    """Return the number of items in an epoch, after rebatching to ``size`` elements.

    Raises:
        TypeError: the data set does not know its length.
    """
    length = len(dataset)
    if size is None:
        return length
    return length * (getattr(dataset, "batch_size", 1) or 1) // size


def _arguments(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that make a plain torch DataLoader equal to ``loader``."""
    names = [
        "dataset",
        "num_workers",
        "collate_fn",
        "timeout",
        "worker_init_fn",
        "generator",
        "persistent_workers",
    ]
    if hasattr(loader, "in_order"):  # from torch 2.6 on
        names += ["in_order"]
    if loader.num_workers > 0:
        names += ["prefetch_factor", "multiprocessing_context"]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        names += ["batch_size", "drop_last"]
    elif loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "sampler"]
    return {name: getattr(loader, name) for name in names}
