"""The mailbox, which matches each message with a receive.

Messages with the same source and tag are received in the order in which they were sent. If several
waiting messages match a receive, the receive gets the message that arrived first. If several
waiting receives match a message, the receive that was posted first gets the message.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Message = TypeVar("Message")
Receive = TypeVar("Receive")

# Each key is a pair of a source rank and a tag. The source rank is None for a receive from any
# rank. Each entry of a queue contains a number that gives the order of arrival, and a message or
# receive.
_Queues = dict[tuple[int | None, int], deque[tuple[int, Message]]]


class Mailbox(Generic[Message, Receive]):
    """Stores messages that wait for a receive, and receives that wait for a message."""

    def __init__(self) -> None:
        self._numbers = count()
        self._messages: _Queues[Message] = {}
        self._receives: _Queues[Receive] = {}

    def deliver(self, message: Message, source: int, tag: int) -> Receive | None:
        """Return the receive that matches a message; store the message if no receive does."""
        receive = _first(self._receives, [(source, tag), (None, tag)])
        if receive is None:
            self._messages.setdefault((source, tag), deque()).append((next(self._numbers), message))
        return receive

    def post(self, receive: Receive, source: int | None, tag: int) -> Message | None:
        """Return the message that matches a receive; store the receive if no message does."""
        keys: list[tuple[int | None, int]] = [(source, tag)]
        if source is None:
            keys = [key for key in self._messages if key[1] == tag]
        message = _first(self._messages, keys)
        if message is None:
            self._receives.setdefault((source, tag), deque()).append((next(self._numbers), receive))
        return message

    def withdraw(self, receive: Receive, source: int | None, tag: int) -> None:
        """Remove a receive if it is still waiting for a message."""
        queue = self._receives.get((source, tag), deque())
        kept = [entry for entry in queue if entry[1] is not receive]
        if kept:
            self._receives[source, tag] = deque(kept)
        else:
            self._receives.pop((source, tag), None)


def _first(queues: _Queues[Message], keys: list[tuple[int | None, int]]) -> Message | None:
    """Remove and return the oldest value in the queues of ``keys``; None if there is no value."""
    found = [(queues[key][0][0], key) for key in keys if key in queues]
    if not found:
        return None
    key = min(found, key=lambda entry: entry[0])[1]
    value = queues[key].popleft()[1]
    if not queues[key]:
        del queues[key]
    return value
