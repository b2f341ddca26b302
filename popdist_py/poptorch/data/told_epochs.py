"""Epochs that the program tells its samplers and data sets, by ``set_epoch()``.

They go on to copies of these: in worker processes that outlive an epoch, and in a loader process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from popdist_py.poptorch.data.samplers import sampler_epochs, set_sampler_epochs

__all__ = ["ToldEpochs", "dataset_epochs"]


@dataclass(frozen=True, slots=True)
class ToldEpochs:
    """The epochs that samplers and data sets were told last.

    Attributes:
        samplers: of the samplers of a chain that have an ``epoch``.
        datasets: of the data sets with a ``set_epoch()``; None for one that was told nothing.
    """

    samplers: tuple[int, ...]
    datasets: tuple[Any, ...]

    @classmethod
    def of(cls, sampler: Any, dataset: Any) -> ToldEpochs:
        """Return the epochs that a sampler and a data set know of."""
        return cls(sampler_epochs(sampler), dataset_epochs(dataset))

    def tell(self, sampler: Any, dataset: Any) -> bool:
        """Tell these epochs to copies; return whether the data set was told another one."""
        set_sampler_epochs(sampler, self.samplers)
        if dataset_epochs(dataset) == self.datasets:
            return False
        for each, epoch in zip(_with_set_epoch(dataset), self.datasets, strict=True):
            if epoch is not None:
                each.set_epoch(epoch)
        return True


class _RecordedCalls:
    """Stands in the place of a data set's ``set_epoch``: data sets keep an epoch as they like."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.epoch: Any = None

    def __call__(self, epoch: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._method(epoch, *args, **kwargs)
        self.epoch = epoch
        return result


def dataset_epochs(dataset: Any) -> tuple[Any, ...]:
    """Return the last epoch of each data set with a ``set_epoch()``, whose calls are recorded."""
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
                except (AttributeError, TypeError):  # a class without such attributes
                    continue
            yield each
        waiting.append(getattr(each, "dataset", None))
        inner = getattr(each, "datasets", None)
        waiting += inner if isinstance(inner, list | tuple) else []
