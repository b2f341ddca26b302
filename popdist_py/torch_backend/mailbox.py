"""The mailbox: which message a receive gets.

Messages of one source and tag are received in the order in which they were sent. Among the sources
that a receive admits, it gets what arrived first; among the receives that admit a message, the one
that was posted first gets it.

Nothing here knows tensors, connections or threads.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Message = TypeVar("Message")
Receive = TypeVar("Receive")

# By source (None in a receive: any) and tag, each with the number at which it came.
_Queues = dict[tuple[int | None, int], deque[tuple[int, Message]]]


class Mailbox(Generic[Message, Receive]):
    """The messages that wait for a receive, and the receives that wait for a message."""

    def __init__(self) -> None:
        self._numbers = count()
        self._messages: _Queues[Message] = {}
        self._receives: _Queues[Receive] = {}

    def deliver(self, message: Message, source: int, tag: int) -> Receive | None:
        """Return the receive that gets the message; without one the message is kept."""
        receive = _first(self._receives, [(source, tag), (None, tag)])
        if receive is None:
            self._messages.setdefault((source, tag), deque()).append((next(self._numbers), message))
        return receive

    def post(self, receive: Receive, source: int | None, tag: int) -> Message | None:
        """Return the message that a receive gets; without one the receive is kept."""
        keys: list[tuple[int | None, int]] = [(source, tag)]
        if source is None:
            keys = [key for key in self._messages if key[1] == tag]
        message = _first(self._messages, keys)
        if message is None:
            self._receives.setdefault((source, tag), deque()).append((next(self._numbers), receive))
        return message

    def withdraw(self, receive: Receive, source: int | None, tag: int) -> None:
        """Forget a receive that was posted, if it waits."""
        queue = self._receives.get((source, tag), deque())
        kept = [entry for entry in queue if entry[1] is not receive]
        if kept:
            self._receives[source, tag] = deque(kept)
        else:
            self._receives.pop((source, tag), None)


def _first(queues: _Queues[Message], keys: list[tuple[int | None, int]]) -> Message | None:
    """Remove and return what came first under one of the keys."""
    found = [(queues[key][0][0], key) for key in keys if key in queues]
    if not found:
        return None
    key = min(found, key=lambda entry: entry[0])[1]
    value = queues[key].popleft()[1]
    if not queues[key]:
        del queues[key]
    return value
