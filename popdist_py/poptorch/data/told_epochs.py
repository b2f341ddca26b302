"""Epochs that the program sets on its samplers and data sets with ``set_epoch()``.

They are passed on to the copies in a loader process and in workers that outlive an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from popdist_py.poptorch.data.samplers import sampler_epochs, set_sampler_epochs

__all__ = ["ToldEpochs", "dataset_epochs"]


@dataclass(frozen=True, slots=True)
class ToldEpochs:
    """The epochs that were last set on samplers and data sets.

    Attributes:
        samplers: epochs of the samplers in a chain that have an ``epoch``.
        datasets: epochs of the data sets with a ``set_epoch()``; None where it was not called.
    """

    samplers: tuple[int, ...]
    datasets: tuple[Any, ...]

    @classmethod
    def of(cls, sampler: Any, dataset: Any) -> ToldEpochs:
        """Return the epochs last set on a sampler and a data set."""
        return cls(sampler_epochs(sampler), dataset_epochs(dataset))

    def tell(self, sampler: Any, dataset: Any) -> bool:
        """Set these epochs on copies; return whether an epoch of the data set has changed."""
        set_sampler_epochs(sampler, self.samplers)
        if dataset_epochs(dataset) == self.datasets:
            return False
        for each, epoch in zip(_with_set_epoch(dataset), self.datasets, strict=True):
            if epoch is not None:
                each.set_epoch(epoch)
        return True


class _RecordedCalls:
    """Replaces a data set's ``set_epoch`` and records the epoch.

    The epoch cannot be read from the data set, which may store it in any way.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.epoch: Any = None

    def __call__(self, epoch: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._method(epoch, *args, **kwargs)
        self.epoch = epoch
        return result


def dataset_epochs(dataset: Any) -> tuple[Any, ...]:
    """Return the epoch last set on each data set that has a ``set_epoch()``."""
    return tuple(
        calls.epoch if isinstance(calls := each.set_epoch, _RecordedCalls) else None
        for each in _with_set_epoch(dataset)
    )


def _with_set_epoch(dataset: Any) -> Iterator[Any]:
    """Yield the data sets with a ``set_epoch()``, outer ones first, and record its calls."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        method = getattr(each, "set_epoch", None)
        if callable(method):
            if not isinstance(method, _RecordedCalls):
                try:
                    each.set_epoch = _RecordedCalls(method)
                except (AttributeError, TypeError):  # the attribute cannot be set
                    continue
            yield each
        waiting.append(getattr(each, "dataset", None))
        inner = getattr(each, "datasets", None)
        waiting += inner if isinstance(inner, list | tuple) else []
