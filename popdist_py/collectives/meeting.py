"""The meeting: how the instances that will communicate exchange a few small values first.

Over it they agree on shared memory and addresses; what they send afterwards goes another way.
Nothing here is called in a training step.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Meeting"]


class Meeting(Protocol):
    """Some instances of the job that can exchange small values; every call is collective.

    A value is what JSON knows: texts, numbers, booleans, None, lists of them. A tuple may come back
    as a list.
    """

    @property
    def rank(self) -> int:
        """Index of this instance among those that meet."""

    @property
    def size(self) -> int:
        """Number of instances that meet."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every instance, in order of rank."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""

    def split(self, color: int, key: int) -> Meeting:
        """Return the meeting of those that pass the same ``color``, in order of ``key``."""
