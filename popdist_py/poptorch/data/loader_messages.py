"""The messages between an accessor and its loader process, and the pipe that carries them.

The messages are tuples, because tuples are pickled faster than other classes. The speed of pickling
matters, because the processes send two messages for every item.
"""

from __future__ import annotations

import pickle
import select
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from popdist_py.poptorch.data.sampler_order_check import DrawnOrder
from popdist_py.poptorch.data.set_epoch_calls import ToldEpochs

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

# --- Messages from the accessor to its loader process ---


class Start(NamedTuple):
    """A command to begin an epoch, even if the loader process has not finished the previous epoch.

    Attributes:
        epoch: The number of the epoch to begin.
        resume: The random state at the start of a saved epoch, and the number of the epoch's items
            to skip; None to begin a new epoch.
        told: The epochs of samplers and data sets; None if the program has not called
            ``set_epoch()`` since the last message.
    """

    epoch: int
    resume: tuple[dict[str, Any], int] | None = None
    told: ToldEpochs | None = None


class GiveBack(NamedTuple):
    """A message that the program no longer needs the item in a slot of shared memory."""

    slot: int


class Stop(NamedTuple):
    """A command to end the loader process."""


# --- Messages from the loader process to its accessor ---


class Ready(NamedTuple):
    """A message that the loader process has loaded the first item.

    Attributes:
        start: The state of the random generators at the start of the first epoch, which determines
            the order of the items.
        order: The length and a hash of the sequence of indices that the program's sampler drew;
            None if no sampler of the program determines the order of the items.
    """

    start: dict[str, Any]
    order: DrawnOrder | None = None


class Empty(NamedTuple):
    """A message that the data set is empty. The loader process ends after it has sent ``Empty``."""


class Begun(NamedTuple):
    """A message that an epoch begins.

    Attributes:
        epoch: The number of the epoch that begins.
        start: The state of the random generators at the start of the epoch, which determines the
            order of the items.
    """

    epoch: int
    start: dict[str, Any]


class Filled(NamedTuple):
    """A message that the loader process has written an item to a slot of shared memory.

    Attributes:
        epoch: The number of the item's epoch.
        slot: The index of the slot, which is an area of shared memory for one item.
        description: The structure of the item and the positions of its tensors in the slot; None if
            the description is equal to the description of the previous item.
    """

    epoch: int
    slot: int
    description: Any = None


class EndOfEpoch(NamedTuple):
    """A message that the loader process has sent all items of an epoch.

    Attributes:
        epoch: The number of the epoch that ends.
        start: The state of the random generators at the start of the next epoch, which determines
            the order of the items in the next epoch.
    """

    epoch: int
    start: dict[str, Any]


class Failure(NamedTuple):
    """A message that the data set raised an error.

    The loader process ends after it has sent ``Failure``.
    """

    traceback: str


class Channel:
    """One end of the pipe between an accessor and its loader process.

    Args:
        connection: The end of the pipe that belongs to this process.
        sentinel: A file descriptor that becomes readable when the other process has ended.
    """

    def __init__(self, connection: Connection, sentinel: int | None = None) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        if sentinel is not None:
            self._poll.register(sentinel, select.POLLIN)

    def send(self, message: object) -> None:
        """Send a message to the other process without waiting for an answer.

        Raises:
            OSError: The other process has ended.
        """
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def ready(self) -> bool:
        """Tell whether :meth:`receive` would return or raise an error without waiting."""
        return bool(self._poll.poll(0))

    def receive(self) -> Any:
        """Wait for the next message from the other process, and return the message.

        Raises:
            EOFError: The other process has ended or has closed its end of the pipe.
            OSError: The connection to the other process has failed.
        """
        ready = [file for file, _ in self._poll.poll()]
        if self._connection.fileno() not in ready:
            raise EOFError("the process at the other end of the channel has ended")
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this process's end of the pipe."""
        self._connection.close()
