"""The losses in a forward pass, and the final loss, which a training model minimises.

A loss is the result of identity_loss or of one of torch's loss functions. The final loss is the
loss that depends on all other losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from popdist_py.poptorch.enums import ReductionType
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.current_forward import current_watch

__all__ = ["Losses", "current_losses", "identity_loss"]


def _is_name_of_loss(name: str) -> bool:
    """Tell whether ``name`` looks like the name of one of torch's loss functions."""
    is_named = name.endswith(("_loss", "_loss2d")) or "cross_entropy" in name or name == "kl_div"
    return is_named and not name.startswith("_")


def _loss_functions() -> frozenset[Callable[..., Any]]:
    """Return the loss functions of the installed torch, under all of their public names."""
    names = {name for place in (F, torch._C._nn) for name in dir(place) if _is_name_of_loss(name)}
    found = []
    for place in (F, torch, torch._C._nn):
        found += [getattr(place, name) for name in names if hasattr(place, name)]
    return frozenset(found)


_LOSSES: Final = _loss_functions()


def identity_loss(x: torch.Tensor, reduction: str | ReductionType) -> torch.Tensor:
    """Reduce ``x``, and mark the result as a loss of the model.

    If the returned loss is the final loss, the backward pass begins with a gradient of one for
    every element of the loss. Loss scaling multiplies the initial gradient of one by the loss
    scale.

    Args:
        x: The tensor to reduce, of any shape.
        reduction: A ``ReductionType`` (sum, mean or none), or its name in PyTorch. For the
            reductions "sum" and "mean", the returned loss is a 0-d tensor. For the reduction
            "none", the returned loss has the shape of ``x``.

    Raises:
        AssertionError: ``reduction`` is not a known reduction (sum, mean or none) of a loss.
    """
    name: Any = getattr(reduction, "name", reduction)
    name = {"Sum": "sum", "Mean": "mean", "NoReduction": "none"}.get(name, name)
    assert name in ("sum", "mean", "none"), (
        f"identity_loss: the reduction {reduction!r} is not supported: expected 'sum', 'mean' or "
        "'none'"
    )
    result = x.clone() if name == "none" else x.sum() if name == "sum" else x.mean()
    losses = current_losses()
    if losses is not None:
        losses.record(result, (x,))
    return result


def current_losses() -> Losses | None:
    """Return the losses of the current forward pass; None if losses are not recorded."""
    watch = current_watch()
    return None if watch is None else watch.losses


class Losses:
    """The record of the losses in a forward pass, and of the losses that each tensor depends on."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._leads_to: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Do nothing before a torch function, because the method ``after`` records the losses."""

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the result of a torch function if the result is a loss or depends on a loss."""
        if func in _LOSSES:
            self.record(result, args, kwargs)
        elif origins := self._origins(args, kwargs):
            self._mark(result, origins)

    def record(
        self, loss: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Record a loss that was computed from ``args`` and ``kwargs``."""
        origins = self._origins(args, kwargs)
        self._mark(loss, origins | {len(self._losses)})
        self._losses.append(loss)

    def _origins(self, args: Any, kwargs: Mapping[str, Any] | None = None) -> set[int]:
        """Return the indices of the losses that the argument tensors of a call depend on."""
        if not self._losses:
            return set()
        origins: set[int] = set()
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Tensor):
                origins |= self._leads_to.get(value, set())
            elif isinstance(value, list | tuple):
                origins |= self._origins(value)
        return origins

    def _mark(self, result: Any, origins: set[int]) -> None:
        if isinstance(result, torch.Tensor):
            self._leads_to[result] = self._leads_to.get(result, set()) | origins
        elif isinstance(result, list | tuple):
            for item in result:
                self._mark(item, origins)

    @property
    def last(self) -> torch.Tensor | None:
        """The loss that was recorded last; None if no loss was recorded.

        If the forward pass has a final loss, the final loss is the last recorded loss at the end of
        the pass.
        """
        return self._losses[-1] if self._losses else None

    def final(self) -> torch.Tensor:
        """Return the loss that depends on all other losses.

        Raises:
            Error: The forward pass did not compute a loss, or no loss depends on all other losses.
        """
        if not self._losses:
            raise Error(
                "Couldn't find a loss in graph: the model must return the result of one of "
                "torch's loss functions, or mark its own loss with poptorch.identity_loss()"
            )
        everything = set(range(len(self._losses)))
        final = self._losses[-1]
        if self._leads_to[final] != everything:
            names = ", ".join(str(loss.grad_fn) for loss in self._losses)
            raise Error(
                f"Multiple independent losses found in graph ({names}): combine the losses into "
                "one, and mark the result with poptorch.identity_loss()"
            )
        return final
