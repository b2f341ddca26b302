"""Epochs that the program sets on its samplers and data sets with ``set_epoch()``.

The loader process has copies of the program's samplers and data sets, and calls ``set_epoch()`` of
the copies with the same epochs. If the program has changed the epoch of a data set, new worker
processes replace a DataLoader's persistent worker processes. The new worker processes get copies of
the data set with the new epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from popdist_py.poptorch.data.samplers import sampler_epochs, set_sampler_epochs

__all__ = ["ToldEpochs", "dataset_epochs"]


@dataclass(frozen=True, slots=True)
class ToldEpochs:
    """The epochs that the program last set on samplers and data sets with ``set_epoch()``.

    Attributes:
        samplers: The epochs of a sampler and its inner samplers. The tuple ``samplers`` does not
            contain samplers without an attribute ``epoch``.
        datasets: The epochs of the data sets that have a method ``set_epoch()``. In ``datasets``,
            None stands for a data set whose ``set_epoch()`` the program has not called.
    """

    samplers: tuple[int, ...]
    datasets: tuple[Any, ...]

    @classmethod
    def of(cls, sampler: Any, dataset: Any) -> ToldEpochs:
        """Return the epochs that the program last set on a sampler and a data set."""
        return cls(sampler_epochs(sampler), dataset_epochs(dataset))

    def tell(self, sampler: Any, dataset: Any) -> bool:
        """Set the recorded epochs on copies of the sampler and the data set in another process.

        Returns:
            Whether the epoch of the data set has changed.
        """
        set_sampler_epochs(sampler, self.samplers)
        if dataset_epochs(dataset) == self.datasets:
            return False
        for each, epoch in zip(_with_set_epoch(dataset), self.datasets, strict=True):
            if epoch is not None:
                each.set_epoch(epoch)
        return True


class _RecordedCalls:
    """A replacement for a data set's ``set_epoch`` method, which records the epoch.

    A data set may store its epoch in any form, so the epoch cannot be read from the data set.
    Instead of reading the epoch, the ``_RecordedCalls`` object records the calls of ``set_epoch``.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.epoch: Any = None

    def __call__(self, epoch: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._method(epoch, *args, **kwargs)
        self.epoch = epoch
        return result


def dataset_epochs(dataset: Any) -> tuple[Any, ...]:
    """Return the last epoch of the data set and its inner data sets that have a ``set_epoch()``."""
    return tuple(
        calls.epoch if isinstance(calls := each.set_epoch, _RecordedCalls) else None
        for each in _with_set_epoch(dataset)
    )


def _with_set_epoch(dataset: Any) -> Iterator[Any]:
    """Yield a data set and its inner data sets, if they have a method ``set_epoch()``.

    The function ``_with_set_epoch`` also starts to record the calls of ``set_epoch()``.
    """
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
                except (AttributeError, TypeError):
                    # The data set does not permit a new attribute ``set_epoch``, so calls of
                    # ``set_epoch()`` cannot be recorded.
                    continue
            yield each
        waiting.append(getattr(each, "dataset", None))
        inner = getattr(each, "datasets", None)
        waiting += inner if isinstance(inner, list | tuple) else []
