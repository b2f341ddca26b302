"""What an accessor and its loader process tell one another, and the pipe that carries it.

Messages are tuples because those are pickled fastest: two of them go with every item.
"""

from __future__ import annotations

import pickle
import select
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from popdist_py.poptorch.data.drawn_orders import DrawnOrder
from popdist_py.poptorch.data.told_epochs import ToldEpochs

__all__ = [
    "Begun",
    "Channel",
    "Empty",
    "EndOfEpoch",
    "Failure",
    "Filled",
    "GiveBack",
    "Ready",
    "Start",
    "Stop",
]

# From the accessor to its loader process:


class Start(NamedTuple):
    """Begin this epoch, leaving an unfinished one.

    ``resume`` holds the start of an epoch that goes on, and the number of its items to skip.
    ``told`` holds the epochs that the program has set since the last message, if any.
    """

    epoch: int
    resume: tuple[dict[str, Any], int] | None = None
    told: ToldEpochs | None = None


class GiveBack(NamedTuple):
    """The item in this slot is no longer needed."""

    slot: int


class Stop(NamedTuple):
    """End the process."""


# From the loader process to its accessor:


class Ready(NamedTuple):
    """The first item has been loaded.

    ``start`` holds the random state that the order was drawn from. ``order`` describes the order of
    a sampler of the program's own.
    """

    start: dict[str, Any]
    order: DrawnOrder | None = None


class Empty(NamedTuple):
    """There is no first item; the process ends."""


class Begun(NamedTuple):
    """Items of this epoch follow; ``start`` is what their order is drawn from."""

    epoch: int
    start: dict[str, Any]


class Filled(NamedTuple):
    """An item is in this slot; no description means that of the item before."""

    epoch: int
    slot: int
    description: Any = None


class EndOfEpoch(NamedTuple):
    """All items of this epoch have been sent; ``start`` is what the next order is drawn from."""

    epoch: int
    start: dict[str, Any]


class Failure(NamedTuple):
    """The data set raised; the process ends."""

    traceback: str


class Channel:
    """One end of a pipe.

    Args:
        connection: the end.
        sentinel: a file descriptor that becomes readable when the other process has ended.
    """

    def __init__(self, connection: Connection, sentinel: int | None = None) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        if sentinel is not None:
            self._poll.register(sentinel, select.POLLIN)

    def send(self, message: object) -> None:
        """Send without waiting for the other side; OSError if it is gone."""
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def ready(self) -> bool:
        """Tell whether :meth:`receive` would not have to wait."""
        return bool(self._poll.poll(0))

    def receive(self) -> Any:
        """Wait for the next message; EOFError or OSError if there will be none."""
        ready = [file for file, _ in self._poll.poll()]
        if self._connection.fileno() not in ready:
            raise EOFError("the other process has ended")
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
