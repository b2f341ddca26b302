"""Collecting the Python stacks of all instances: who is asked, and which collections are complete.

Pure: sends nothing, and the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StackRequest", "StackRequests"]

# Instances answer within milliseconds; one that does not is overwhelmed, or its host is.
_ANSWER_SECONDS = 3.0

Processes = list[dict[str, Any]]


@dataclass(slots=True)
class StackRequest:
    """One collection: who has yet to answer, and the answers; None for an instance without one.

    ``reply`` takes the stacks for who inspects the job; without it the job is about to stop.
    """

    waiting: set[int]
    deadline: float
    reply: Callable[[str], None] | None = None
    answers: dict[int, Processes | None] = field(default_factory=dict)


class StackRequests:
    """The collections of one run that are under way."""

    def __init__(self) -> None:
        self._open: list[StackRequest] = []

    def begin(
        self, members: Iterable[int], now: float, reply: Callable[[str], None] | None = None
    ) -> None:
        """Begin a collection from the instances that are being asked."""
        self._open.append(StackRequest(set(members), now + _ANSWER_SECONDS, reply))

    def take(self, index: int, processes: Processes | None) -> None:
        """Take an instance's answer; None if it will give none."""
        for request in self._open:
            if index in request.waiting:
                request.waiting.discard(index)
                request.answers[index] = processes

    def next_deadline(self) -> float:
        """Return when a collection is over; inf for never."""
        return min(
            (request.deadline if request.waiting else float("-inf") for request in self._open),
            default=float("inf"),
        )

    def on_time(self, now: float) -> list[StackRequest]:
        """Return the collections that are complete, or whose time is over; each once."""
        over: list[StackRequest] = []
        left: list[StackRequest] = []
        for request in self._open:
            (left if request.waiting and now < request.deadline else over).append(request)
        self._open = left
        for request in over:
            request.answers.update(dict.fromkeys(request.waiting))
        return over
