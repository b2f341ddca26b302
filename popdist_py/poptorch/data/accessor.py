"""PopTorch's class AsynchronousDataAccessor, which loads batches ahead of time in another process.

An item is an element that an iteration over the data set yields, usually a batch. The module
``accessor`` contains the code that runs in the training process. The code of the training process
starts and ends the loader process, receives messages about the shared memory of the next item, and
returns the item's tensors without a copy. The module ``loader_process.py`` contains the code that
runs in the loader process. The module ``loader_messages.py`` defines the messages between the
training process and the loader process.
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
from popdist_py.poptorch.calls import custom_type_parsers
from popdist_py.poptorch.data import loader_process, sampler_order_check
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
from popdist_py.poptorch.data.sample_source import source_of
from popdist_py.poptorch.data.set_epoch_calls import ToldEpochs
from popdist_py.poptorch.data.shared_file_pickle import Parcel
from popdist_py.poptorch.data.shared_slots import Slot, read
from popdist_py.poptorch.enums import SharingStrategy
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = ["AsynchronousDataAccessor"]

# The time in seconds that the accessor waits for the loader process to end before it sends a
# signal. PopTorch's accessor also waits 10 seconds for its loader process to end.
_SECONDS_TO_STOP: Final = 10.0
_SECONDS_TO_TERMINATE: Final = 5.0
# PopTorch's default of ``miss_sleep_time_in_ms``, in milliseconds.
_MISS_SLEEP_TIME: Final = 0.1

_NAME: Final = "poptorch-data-loader"
# The exit code of a loader process whose import of the program makes a second accessor, because the
# program lacks an ``if __name__ == "__main__"`` guard.
_UNGUARDED: Final = 86
_START_METHODS: Final = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class AsynchronousDataAccessor:
    """An iterable that loads the items (batches) of a data set ahead of time in another process.

    Args:
        dataset: A DataLoader, a data set or any other iterable. The items of the iterable are
            tensors, registered custom types, or lists, tuples or dicts of tensors. ``dataset`` must
            be picklable unless ``sharing_strategy`` is Fork.
        buffer_size: The number of items that are kept in memory, including the item that the
            program uses.
        miss_sleep_time_in_ms: In PopTorch, the time between two checks whether a missing item is
            ready. The accessor ignores ``miss_sleep_time_in_ms``, because the operating system
            wakes the program as soon as an item is ready. The accessor logs a warning if
            ``miss_sleep_time_in_ms`` is neither 0 nor the default.
        load_indefinitely: Whether to load items of the next epoch before the program begins to
            iterate over the next epoch.
        early_preload: Whether to load several items ahead of time before the program first calls
            ``iter()``. With any value of ``early_preload``, the first item is loaded as soon as the
            accessor is made.
        sharing_strategy: The strategy to start the loader process and to send the data set to it,
            or the strategy's name. The sharing strategies are ForkServer, Fork, SharedMemory
            (spawn), and FileSystem (spawn, with the data set in a temporary file).
        rebatched_size: The size of the batches that the accessor assembles from the items, as the
            number of elements along the first dimension. If ``rebatched_size`` is not given, the
            accessor returns the items unchanged.

    The program may call ``set_epoch()`` of the data set, and of a DataLoader's sampler such as
    DistributedSampler, in the process that made the accessor. After a call of ``set_epoch()``, the
    accessor discards items that it loaded ahead of time for another epoch.

    When the program requests the next item, the accessor may overwrite the tensors of the previous
    item. To keep the values of an item, clone the item's tensors. The accessor returns lists in
    place of tuples.

    Raises:
        Error: The data set is empty or cannot be pickled, the first item cannot be loaded, or the
            DataLoader already has an accessor.
        AssertionError: The accessor does not accept the given combination of arguments. During
            iteration, the accessor raises an AssertionError with the traceback if an item cannot be
            loaded.
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
        # The arguments of the program's calls of ``set_epoch()`` for its samplers and data sets, as
        # far as the loader process has received the arguments.
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
            parsers=custom_type_parsers.registered(),
        )
        self._slots = job.slots
        self._buffer_size = len(job.slots)
        # The structure of the item that was received last, and the positions of its tensors in
        # shared memory.
        self._description: Any = None
        # The index of the shared-memory slot that contains the tensors of the last returned item.
        self._held: int | None = None
        self._epoch = 0
        # Whether ``__next__`` has returned an item of the current epoch.
        self._begun = False
        self._iterating = False
        # The number of items of the current epoch that ``__next__`` has returned.
        self._position = 0
        # The state of the random generators before the current epoch. The state of the random
        # generators before an epoch determines the order of the items in the epoch.
        self._start: dict[str, Any] | None = None
        # The difference between the number of complete epochs and ``self._epoch``.
        self._epochs_before = 0
        # The position in the data where the next ``iter()`` continues.
        self._resume: Mapping[str, Any] | None = None

        ours, theirs = multiprocessing.Pipe()
        self._process = _start(job, theirs, strategy)
        theirs.close()
        self._channel = Channel(ours, self._process.sentinel)
        # The finalizer ends the loader process when the accessor is deleted. If the accessor is not
        # deleted earlier, the finalizer runs at the end of the program, before Python waits for its
        # child processes.
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
            sampler_order_check.note(first.order)

    def _explain_start(self, details: str) -> str:
        if self._process.exitcode == _UNGUARDED:
            return (
                "the loader process imports the program, and the program makes a loader again "
                "during this import. Put the code of the program below if __name__ == '__main__':, "
                "or choose sharing_strategy=poptorch.SharingStrategy.Fork (for a DataLoader: in "
                "async_options)"
            )
        return (
            "the loader process could not load a first item. The data set must yield at least one "
            f"item and must be importable in a new process. Details:\n{details}"
        )

    def terminate(self) -> None:
        """End the loader process.

        After a call of ``terminate()``, a program cannot iterate over the accessor.
        """
        self._iterating = False
        self._finalizer()

    def __len__(self) -> int:
        """Return the number of items in an epoch, if the data set has a length."""
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or resume the epoch that a loaded state describes.

        If the current epoch is not finished, its remaining items are skipped.
        """
        if not self._finalizer.still_active():
            raise Error(
                "the AsynchronousDataAccessor has been terminated: make a new "
                "AsynchronousDataAccessor to iterate again"
            )
        self._give_back()
        if self._begun:
            self._epoch += 1
            self._begun = False
            self._position, self._start = 0, None
        told = self._newly_told()
        if told is not None and self._resume is None and self._start is not None:
            # The program called ``set_epoch()`` with another epoch, so the current epoch begins
            # again in another order.
            self._resume = self.state_dict()
        resume = None
        if self._resume is not None or told is not None:
            # The new epoch number is higher than the number of any epoch that the loader process
            # has begun. The loader process therefore discards the items that it has loaded for
            # epochs with lower numbers. If epochs are short, the loader process may be ahead by one
            # epoch for each item in the buffer.
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
        """Return the next item, whose tensors are valid until the next call of ``__next__``."""
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
        """Return the current position in the data, as a state for ``load_state_dict()``.

        The state of the accessor contains the number of complete epochs and the number of returned
        items of the current epoch. The state of the accessor also contains the random state at the
        start of the current epoch, which determines the order of the items. The returned state
        consists of plain values and tensors, so loading the state from a file executes no code. The
        state of the accessor does not include the random generators of persistent worker processes.
        """
        if self._resume is not None:
            return dict(self._resume)
        # The loader process sends the random state of a new epoch only after the end of the old
        # epoch.
        while self._start is None:
            self._receive_of_epoch()
        return {
            "epoch": self._epochs_before + self._epoch,
            "position": self._position,
            "start": self._start,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a position in the data that ``state_dict()`` returned.

        The next call of ``iter()`` continues with the item after the saved position. The items of
        the epoch before the saved position are loaded again and discarded.
        """
        self._resume = dict(state_dict)

    def _newly_told(self) -> ToldEpochs | None:
        """Return the epochs that the program set with ``set_epoch()``, or None without a change."""
        told = ToldEpochs.of(self._sampler, self._dataset)
        if told == self._told:
            return None
        self._told = told
        return told

    def _receive_of_epoch(self) -> Any:
        """Wait for one message from the loader process, and handle it.

        Returns:
            The message, if it contains an item of the current epoch or announces the end of the
            current epoch. ``_receive_of_epoch`` returns None for all other messages.
        """
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
                # The received item belongs to an epoch that the program did not finish.
                self._send(GiveBack(slot))
            case EndOfEpoch(epoch) if epoch == self._epoch:
                return message
        return None

    def _give_back(self) -> None:
        if self._held is not None:
            slot, self._held = self._held, None
            self._send(GiveBack(slot))

    def _send(self, message: object) -> None:
        # Sending a message fails if the loader process has ended. After a failure to send, the next
        # call of ``_receive`` reports the error.
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def _receive(self) -> Any:
        """Wait for a message from the loader process; return a Failure if the process has ended."""
        try:
            with activities.doing(activities.LOADING):
                return self._channel.receive()
        except (EOFError, OSError):
            self._process.join(_SECONDS_TO_TERMINATE)
            return Failure(
                f"the process that loads the data ended with exit code {self._process.exitcode}"
            )


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
    """Warn once, on instance 0, that ``miss_sleep_time_in_ms`` has no effect."""
    if context.environment().instance_index == 0:
        logger.warning(
            "miss_sleep_time_in_ms has no effect, because the operating system wakes the program "
            "as soon as the next item is ready. Omit miss_sleep_time_in_ms"
        )


def _strategy_of(given: Any) -> SharingStrategy:
    """Return the sharing strategy for a member of SharingStrategy, a name or a number.

    Raises:
        AssertionError: ``given`` is not a sharing strategy.
    """
    strategy = SharingStrategy.__members__.get(given, given) if isinstance(given, str) else given
    assert strategy in tuple(SharingStrategy), (
        f"sharing_strategy={given!r}: expected one of "
        f"{', '.join(f'poptorch.SharingStrategy.{each.name}' for each in SharingStrategy)}, or the "
        "name of one of these as a text"
    )
    return SharingStrategy(strategy)


def _start(job: Job, connection: Connection, strategy: SharingStrategy) -> Any:
    """Start the loader process of an accessor.

    Raises:
        Error: The data set cannot be pickled although the sharing strategy requires it.
    """
    here: Any = multiprocessing.current_process()
    if here.name == _NAME and getattr(here, "_inheriting", False):
        # The training process explains the missing guard to the user, so the loader process ends
        # without a traceback. The loader process cannot end with ``sys.exit()``, because a fork
        # server would change its exit code to 1.
        sys.stdout.flush()
        os._exit(_UNGUARDED)
    method = _START_METHODS[strategy]
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # The fork server imports the preloaded modules only once, so later loader processes start
        # faster.
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
            f"of the loader such as collate_fn, cannot be sent to another process ({error}). "
            "Define the data set and the functions at the top of a module, or choose "
            "sharing_strategy=poptorch.SharingStrategy.Fork (for a DataLoader: in async_options)"
        ) from error
    return process


def _shut_down(process: Any, channel: Channel) -> None:
    """End the loader process with a message, or with a signal if it does not end in time."""
    try:
        with contextlib.suppress(OSError):
            channel.send(Stop())
        process.join(_SECONDS_TO_STOP)
        if process.is_alive():
            process.terminate()
            process.join(_SECONDS_TO_TERMINATE)
    finally:
        # Ctrl-C may interrupt the call that waits for the end of the loader process. Even if Ctrl-C
        # interrupts the waiting, the loader process must be killed.
        if process.is_alive():
            process.kill()
            process.join()
        channel.close()
