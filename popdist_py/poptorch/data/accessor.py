"""PopTorch's AsynchronousDataAccessor: a data set iterated ahead of time by a process of its own.

The side of the training process: starts and ends the loader process, receives which slot of shared
memory holds the next item, and hands out its tensors without a copy. The other side is in
``loader_process.py``, the messages between the two are in ``loader_messages.py``.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from popdist_py import activities, context
from popdist_py.poptorch.calls import custom_types
from popdist_py.poptorch.data import drawn_orders, loader_process
from popdist_py.poptorch.data.loader_messages import (
    Begun,
    Channel,
    Empty,
    EndOfEpoch,
    Failure,
    Filled,
    GiveBack,
    Ready,
    Start,
    Stop,
)
from popdist_py.poptorch.data.loader_process import Job
from popdist_py.poptorch.data.memory_pickle import Parcel
from popdist_py.poptorch.data.sample_source import source_of
from popdist_py.poptorch.data.shared_slots import Slot, read
from popdist_py.poptorch.data.told_epochs import ToldEpochs
from popdist_py.poptorch.enums import SharingStrategy
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = ["AsynchronousDataAccessor"]

_SECONDS_TO_STOP: Final = 10.0  # as long as PopTorch waits before it sends a signal
_SECONDS_TO_TERMINATE: Final = 5.0
_MISS_SLEEP_TIME: Final = 0.1  # milliseconds, PopTorch's default

_NAME: Final = "poptorch-data-loader"  # of the loader process
_UNGUARDED: Final = 86  # how it ends where importing the program makes an accessor
_START_METHODS: Final = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class AsynchronousDataAccessor:
    """Iterates a data set in a process of its own and keeps the next items ready.

    Args:
        dataset: an iterable of tensors, of lists, tuples or dicts of tensors, or of registered
            custom types: a DataLoader, a data set, any iterable. Must be picklable unless the
            strategy is Fork.
        buffer_size: how many items are kept in memory, the one in use included.
        miss_sleep_time_in_ms: the time after which PopTorch checks again for an item that was not
            ready. Here the operating system wakes this process as soon as the item is ready, so
            every value acts as 0. A warning says so for values other than 0 and the default.
        load_indefinitely: whether to load the next epoch before it is asked for.
        early_preload: whether to start loading now rather than at the first ``iter()``.
        sharing_strategy: how the process is started and gets the data set: ForkServer, Fork,
            SharedMemory (spawn), FileSystem (spawn, data set in a temporary file). A strategy
            or its name.
        rebatched_size: assemble batches of this many elements from the items' first dimension.

    The program may call ``set_epoch()`` of a DataLoader's sampler, such as DistributedSampler, and
    of the data set, in this process. Items that were loaded ahead for another epoch are then
    discarded.

    The tensors of an item are overwritten after the next one is asked for: clone them to keep
    them. Tuples come back as lists.

    Raises:
        Error: the data set is empty or its first item fails; the DataLoader has an accessor.
        AssertionError: arguments that do not go together; while iterating: an item failed (the
            message holds the traceback).
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = _MISS_SLEEP_TIME,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy | str = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        _check(buffer_size, miss_sleep_time_in_ms, rebatched_size)
        strategy = _strategy_of(sharing_strategy)
        source = source_of(dataset, rebatched_size)
        self._length = source.length
        self._sampler, self._dataset = source.sampler, source.dataset
        # The epochs that the loader process has been told.
        self._told = ToldEpochs.of(source.sampler, source.dataset)
        job = Job(
            source=source.items,
            slots=[Slot() for _ in range(buffer_size + source.ahead)],
            buffer_size=buffer_size,
            rebatched_size=rebatched_size,
            drop_last=source.drop_last,
            in_place=source.in_place,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            seed=int(torch.empty((), dtype=torch.int64).random_().item()),
            start_method=(
                multiprocessing.get_start_method(allow_none=True)
                or multiprocessing.get_all_start_methods()[0]
            ),
            parsers=custom_types.registered(),
        )
        self._slots = job.slots
        self._buffer_size = len(job.slots)
        self._description: Any = None  # of the item received last
        self._held: int | None = None  # the slot whose tensors have been handed out
        self._epoch = 0
        self._begun = False  # whether an item of this epoch has been handed out
        self._iterating = False
        self._position = 0  # items of this epoch that have been handed out
        self._start: dict[str, Any] | None = None  # what the order of this epoch is drawn from
        self._epochs_before = 0  # complete before the accessor was made
        self._resume: Mapping[str, Any] | None = None  # where the next ``iter()`` goes on

        ours, theirs = multiprocessing.Pipe()
        self._process = _start(job, theirs, strategy)
        theirs.close()
        self._channel = Channel(ours, self._process.sentinel)
        # On deletion, and at exit before Python waits for its child processes.
        self._finalizer = util.Finalize(
            self, _shut_down, (self._process, self._channel), exitpriority=100
        )
        first = self._receive()
        if isinstance(first, Empty):
            self.terminate()
            raise Error(
                f"AsynchronousDataAccessor worker thread failed to start: {source.why_empty}"
            )
        if isinstance(first, Failure):
            self.terminate()
            raise Error(
                "AsynchronousDataAccessor worker thread failed to start: "
                + self._explain_start(first.traceback)
            )
        assert isinstance(first, Ready)
        self._start = first.start
        if first.order is not None:
            drawn_orders.note(first.order)

    def _explain_start(self, details: str) -> str:
        if self._process.exitcode == _UNGUARDED:
            return (
                "its process imports the program, which makes a loader again while it is "
                "imported. Put the code of the program below if __name__ == '__main__':, or choose "
                "sharing_strategy=poptorch.SharingStrategy.Fork (async_options of a DataLoader)"
            )
        return (
            "the data set must yield a first item and be importable in a new process. "
            f"Details:\n{details}"
        )

    def terminate(self) -> None:
        """End the loader process; the accessor cannot be iterated afterwards."""
        self._iterating = False
        self._finalizer()

    def __len__(self) -> int:
        """Return the number of items in an epoch, if the data set knows its length."""
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or resume one: an epoch that was begun and not finished is left."""
        if not self._finalizer.still_active():
            raise Error(
                "the AsynchronousDataAccessor has been terminated: make a new one to iterate again"
            )
        self._give_back()
        if self._begun:
            self._epoch += 1
            self._begun = False
            self._position, self._start = 0, None
        told = self._newly_told()
        if told is not None and self._resume is None and self._start is not None:
            self._resume = self.state_dict()  # the same epoch again, in another order
        resume = None
        if self._resume is not None or told is not None:
            # A number that the loader process has not begun, so that it leaves what it has loaded:
            # it may be ahead by as many short epochs as it keeps items.
            self._epoch += self._buffer_size + 1
            self._epochs_before -= self._buffer_size + 1
        if self._resume is not None:
            self._epochs_before = self._resume["epoch"] - self._epoch
            self._position, self._start = self._resume["position"], self._resume["start"]
            resume, self._resume = (self._resume["start"], self._position), None
        self._send(Start(self._epoch, resume, told))
        self._iterating = True
        return self

    def __next__(self) -> Any:
        """Return the next item; its tensors are valid until the one after is asked for."""
        self._give_back()
        if not self._iterating:
            raise StopIteration
        while True:
            match self._receive_of_epoch():
                case Filled(slot=slot):
                    self._held = slot
                    self._begun = True
                    self._position += 1
                    return read(self._slots[slot], self._description)
                case EndOfEpoch(_, start):
                    self._epoch += 1
                    self._begun = self._iterating = False
                    self._position, self._start = 0, start
                    raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: complete epochs, items of this one, and its order.

        It can be saved and loaded without running code. What persistent workers draw at random
        for themselves is not part of it.
        """
        if self._resume is not None:
            return dict(self._resume)
        while self._start is None:  # the loader process has left an epoch, and begins another
            self._receive_of_epoch()
        return {
            "epoch": self._epochs_before + self._epoch,
            "position": self._position,
            "start": self._start,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what state_dict() returned; the next ``iter()`` goes on with the very next item.

        The items before it are loaded once more and thrown away.
        """
        self._resume = dict(state_dict)

    def _newly_told(self) -> ToldEpochs | None:
        """Return the epochs that the program has set; None if they are as at the last call."""
        told = ToldEpochs.of(self._sampler, self._dataset)
        if told == self._told:
            return None
        self._told = told
        return told

    def _receive_of_epoch(self) -> Any:
        """Wait for a message; return it if it is an item or the end of this epoch, else None."""
        message = self._receive()
        match message:
            case Failure(text):
                self.terminate()
                raise AssertionError(f"An error occurred in the data fetcher:\n{text}")
            case Begun(epoch, start) if epoch == self._epoch:
                self._start = start
            case Filled(epoch, slot, description):
                if description is not None:
                    self._description = description
                if epoch == self._epoch:
                    return message
                self._send(GiveBack(slot))  # of an epoch that was left
            case EndOfEpoch(epoch) if epoch == self._epoch:
                return message
        return None

    def _give_back(self) -> None:
        if self._held is not None:
            slot, self._held = self._held, None
            self._send(GiveBack(slot))

    def _send(self, message: object) -> None:
        # A process that is gone has left its last words: receiving them reports the error.
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def _receive(self) -> Any:
        """Wait for a message; the end of the process is one too."""
        try:
            with activities.doing(activities.LOADING):
                return self._channel.receive()
        except (EOFError, OSError):
            self._process.join(_SECONDS_TO_TERMINATE)
            return Failure(f"the loader process ended with exit code {self._process.exitcode}")


def _check(buffer_size: int, miss_sleep_time_in_ms: float, rebatched_size: int | None) -> None:
    assert isinstance(buffer_size, int), f"buffer_size is {buffer_size!r}: expected a whole number"
    assert buffer_size >= 1, f"buffer_size is {buffer_size}: it must be at least 1"
    assert miss_sleep_time_in_ms >= 0, (
        f"miss_sleep_time_in_ms is {miss_sleep_time_in_ms}: it must not be negative"
    )
    if miss_sleep_time_in_ms not in (0, _MISS_SLEEP_TIME):
        _say_no_miss_sleep()
    assert rebatched_size is None or rebatched_size > 1, (
        f"rebatched_size is {rebatched_size}: it must be None or greater than 1"
    )


@functools.cache
def _say_no_miss_sleep() -> None:
    """Warn once in a program, on instance 0, that the time has no effect."""
    if context.environment().instance_index == 0:
        logger.warning(
            "miss_sleep_time_in_ms does nothing here: the operating system wakes the program as "
            "soon as the next item is ready; leave it out"
        )


def _strategy_of(given: Any) -> SharingStrategy:
    """Return the strategy for an enum member, a name or a number.

    Raises:
        AssertionError: there is no such strategy.
    """
    strategy = SharingStrategy.__members__.get(given, given) if isinstance(given, str) else given
    assert strategy in tuple(SharingStrategy), (
        f"sharing_strategy={given!r}: expected one of "
        f"{', '.join(f'poptorch.SharingStrategy.{each.name}' for each in SharingStrategy)}, or "
        "its name as text"
    )
    return SharingStrategy(strategy)


def _start(job: Job, connection: Connection, strategy: SharingStrategy) -> Any:
    """Start the loader process.

    Raises:
        Error: the data set cannot be pickled, and the strategy is not Fork.
    """
    here: Any = multiprocessing.current_process()
    if here.name == _NAME and getattr(here, "_inheriting", False):
        # The program says it: a traceback from here would only stand before what it says. A server
        # of processes turns sys.exit() into exit code 1.
        sys.stdout.flush()
        os._exit(_UNGUARDED)
    method = _START_METHODS[strategy]
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # Imported once: a second accessor's process starts at once.
        context.set_forkserver_preload(["__main__", loader_process.__name__])
    content = Parcel(job, on_disk=strategy == SharingStrategy.FileSystem)
    process = context.Process(
        target=loader_process.run,
        args=(job if method == "fork" else content, connection),
        name=_NAME,
    )
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if method == "fork":
            raise
        raise Error(
            "AsynchronousDataAccessor worker thread failed to start: the data set, or a function "
            f"that it is loaded with, cannot be sent to another process ({error}). Define it at "
            "the top of a module, not inside a function, or choose "
            "sharing_strategy=poptorch.SharingStrategy.Fork (async_options of a DataLoader)"
        ) from error
    return process


def _shut_down(process: Any, channel: Channel) -> None:
    """Ask the loader process to end, and make it end if it does not."""
    try:
        with contextlib.suppress(OSError):
            channel.send(Stop())
        process.join(_SECONDS_TO_STOP)
        if process.is_alive():
            process.terminate()
            process.join(_SECONDS_TO_TERMINATE)
    finally:  # an interrupt while waiting must not leave it behind
        if process.is_alive():
            process.kill()
            process.join()
        channel.close()
