"""The code of an accessor's loader process, which writes the items of a data set to shared memory.

A slot is an area of shared memory for one item. One loop in the loader process loads items and
executes the accessor's commands. Batches of a map-style DataLoader are collated directly in a slot
of shared memory. If the DataLoader has worker processes, the worker processes collate the batches.
Items of any other iterable are copied into a slot of shared memory. The module ``accessor.py``
contains the code that runs in the training process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch

from popdist_py.poptorch.calls import custom_type_parsers
from popdist_py.poptorch.calls.nested_values import map_tensors, tensors_of
from popdist_py.poptorch.data.epoch_random_state import Draws
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
from popdist_py.poptorch.data.sample_source import LoaderArguments
from popdist_py.poptorch.data.samplers import drawn_order
from popdist_py.poptorch.data.set_epoch_calls import ToldEpochs
from popdist_py.poptorch.data.shared_slots import Slot, SlotWriter
from popdist_py.timeline import spans

__all__ = ["Job", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The data set and the settings that an accessor sends to its loader process.

    Attributes:
        source: An iterable of items, a map-style data set, or :class:`LoaderArguments` (the
            arguments for a torch DataLoader).
        slots: The areas of shared memory for items. The number of slots is large enough that one
            slot is always free when the loader process loads an item.
        buffer_size: The maximum number of loaded items that the accessor is using or has not yet
            received.
        rebatched_size: The number of elements in the batches that are assembled from the items;
            None to send the items unchanged.
        drop_last: Whether the last batch is dropped if it is incomplete, when batches are
            assembled.
        in_place: Whether the items are the batches of a map-style DataLoader, which can be collated
            directly in slots.
        load_indefinitely: Whether the loader process begins every later epoch without a command
            from the accessor.
        early_preload: Whether the loader process begins the first epoch without a command from the
            accessor.
        seed: The seed for the random generators of the loader process.
        start_method: The multiprocessing start method for a DataLoader's worker processes. A start
            method in the arguments of the DataLoader overrides ``start_method``.
        parsers: The parsers of the custom types that the program has registered.
    """

    source: Any
    slots: list[Slot]
    buffer_size: int
    rebatched_size: int | None
    drop_last: bool
    in_place: bool
    load_indefinitely: bool
    early_preload: bool
    seed: int
    start_method: str
    parsers: dict[type, Any]


class _Stopped(Exception):
    """An exception raised when the accessor has sent the command to end the loader process."""


@dataclass
class _Slots:
    """The indices of the free slots, and of the slots that the accessor still uses."""

    total: int
    free: list[int] = field(default_factory=list)
    lent: set[int] = field(default_factory=set)

    def reclaim(self) -> None:
        """Mark every slot of shared memory as free, except the slots that the accessor still uses.

        Call ``reclaim`` only while no item is being loaded.
        """
        self.free = [slot for slot in range(self.total) if slot not in self.lent]

    def give_back(self, slot: int) -> None:
        self.lent.discard(slot)
        self.free.append(slot)


# --- Sources of items. Each iteration over a source yields every item, as the index of the item's
# slot and the item's description. ---

_Token = tuple[int, Any]


class _InPlaceDataset(torch.utils.data.Dataset[Any]):
    """A data set that returns the samples at the given indices, together with a slot's index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, request: tuple[int, Any]) -> tuple[int, Any]:
        slot, indices = request
        several = getattr(self._dataset, "__getitems__", None)
        with spans.row_span(spans.DATA_LOADER, "samples"):
            if several:
                return slot, several(indices)
            return slot, [self._dataset[index] for index in indices]


class _InPlaceCollate(custom_type_parsers.CarriesParsers):
    """A collate function that writes a batch to a slot of shared memory and describes the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], slots: list[Slot]) -> None:
        # ``SlotWriter.collate`` replaces torch's default collate function, because it writes the
        # batch directly to the slot.
        self._collate_fn = None if collate_fn is torch.utils.data.default_collate else collate_fn
        self._slots = slots

    def __call__(self, request: tuple[int, Any]) -> _Token:
        slot, samples = request
        writer = SlotWriter(self._slots[slot])
        collate = self._collate_fn or writer.collate
        with spans.row_span(spans.DATA_LOADER, "collate"):
            return slot, writer.put(collate(samples))


class _InPlaceBatches:
    """A batch sampler that yields the indices of every batch with the index of a free slot."""

    def __init__(self, batches: Iterable[Any], slots: _Slots, minimum: int) -> None:
        self.batches = batches
        self._slots = slots
        self._minimum = minimum

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        # Torch requests the first batch of an epoch only after all batches of the earlier epoch
        # have been loaded or discarded.
        self._slots.reclaim()
        for indices in self.batches:
            if not self._minimum or len(indices) >= self._minimum:
                yield self._slots.free.pop(), indices


class _InPlace:
    """The batches of a map-style DataLoader, collated directly in slots of shared memory."""

    def __init__(self, job: Job, ledger: _Slots) -> None:
        arguments = dict(job.source.arguments)
        minimum = job.rebatched_size if job.rebatched_size and job.drop_last else 0
        self._batches = _InPlaceBatches(arguments["batch_sampler"], ledger, minimum)
        self.dataset = arguments["dataset"]
        self._dataset = _InPlaceDataset(self.dataset)
        self._collate = _InPlaceCollate(arguments["collate_fn"], job.slots)
        self._generator = arguments["generator"]
        self._workers: torch.utils.data.DataLoader[Any] | None = None
        if arguments["num_workers"] > 0:
            arguments["dataset"] = self._dataset
            arguments["batch_sampler"] = self._batches
            arguments["collate_fn"] = self._collate
            self._workers = torch.utils.data.DataLoader(**arguments)
        self.draws = Draws(self._batches.batches, self._generator, self._workers)

    def __iter__(self) -> Iterator[_Token]:
        if self._workers is not None:
            return iter(self._workers)
        # Torch's DataLoader draws a seed at the start of an epoch. One random number is drawn here
        # in place of torch's seed, so that later random numbers are equal to those with torch's
        # DataLoader.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return (self._collate(self._dataset.__getitems__(request)) for request in self._batches)


class _Copied:
    """The items of any iterable, rebatched if required, and copied to slots of shared memory."""

    def __init__(self, job: Job, ledger: _Slots) -> None:
        self._job = job
        self._ledger = ledger
        self._items: Any = job.source
        self.dataset: Any = job.source
        if isinstance(job.source, LoaderArguments):
            self._items = torch.utils.data.DataLoader(**job.source.arguments)
            self.dataset = self._items.dataset
        is_loader = isinstance(self._items, torch.utils.data.DataLoader)
        self.draws = Draws.of(self._items) if is_loader else Draws()

    def __iter__(self) -> Iterator[_Token]:
        self._ledger.reclaim()
        size = self._job.rebatched_size
        items = _iterate(self._items)
        groups = ([item] for item in items) if size is None else _rebatched(items, size)
        for parts in groups:
            if size and self._job.drop_last and sum(map(_num_rows, parts)) < size:
                return
            slot = self._ledger.free.pop()
            writer = SlotWriter(self._job.slots[slot])
            yield slot, writer.put(parts[0] if len(parts) == 1 else writer.concatenate(parts))


def _iterate(items: Any) -> Iterator[Any]:
    if hasattr(items, "__iter__") or not hasattr(items, "__len__"):
        return iter(items)
    # A map-style data set need not have the method ``__iter__``.
    return (items[index] for index in range(len(items)))


def _num_rows(item: Any) -> int:
    shapes = [list(tensor.shape) for tensor in tensors_of(item)]
    assert shapes, (
        f"the data set returned a {type(item).__name__} without tensors: expected an item with at "
        "least one tensor"
    )
    assert all(shape and shape[0] == shapes[0][0] for shape in shapes), (
        f"the data set returned an item with tensors of shapes {', '.join(map(str, shapes))}: to "
        "assemble batches of another size, all tensors of an item need the same first dimension"
    )
    return shapes[0][0]


def _rebatched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of slices of items; the slices in a list together form a batch of ``size`` rows.

    A row is one element of an item along dimension 0. The slices of the last list may have fewer
    than ``size`` rows in total.
    """
    parts: list[Any] = []
    missing = size
    for item in items:
        start, stop = 0, _num_rows(item)
        while stop - start >= missing:
            yield [*parts, _rows(item, start, start + missing)]
            start, parts, missing = start + missing, [], size
        if start < stop:
            parts.append(_rows(item, start, stop))
            missing -= stop - start
    if parts:
        yield parts


def _rows(item: Any, start: int, stop: int) -> Any:
    return map_tensors(lambda tensor: tensor[start:stop], item)


# --- The loop of the loader process -------------------------------------------------------------


class _Loader:
    """The main loop of the loader process, which loads items into slots and executes commands.

    The loop waits while ``buffer_size`` loaded items are in use by the accessor or not yet
    received.
    """

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._ledger = _Slots(len(job.slots))
        self._source = (_InPlace if job.in_place else _Copied)(job, self._ledger)
        # The number of the last epoch that the loader process may load without another command.
        self._newest = 0 if job.early_preload else -1
        # The structure and tensor positions of the item that was sent to the accessor last.
        self._sent: Any = None
        # The state of the random generators at the start of the current epoch, which determines the
        # order of the items.
        self._start: dict[str, Any] = {}
        # The saved random state at the start of the next epoch and the number of items to skip,
        # from the command ``Start``.
        self._resume: tuple[dict[str, Any], int] | None = None
        # The epochs to set on samplers and data sets, with ``set_epoch()``, before the next epoch.
        self._told: ToldEpochs | None = None

    def run(self) -> None:
        """Load all epochs that the accessor requests, unless the data set is empty.

        Raises: _Stopped: The accessor sent the command to end the loader process.
        """
        epoch = 0
        tokens, token = self._begin()
        if token is None:
            self._channel.send(Empty())
            return
        self._channel.send(Ready(self._start, drawn_order(self._source.draws.sampler)))
        while True:
            self._wait_for(epoch)
            epoch = self._newest
            if self._resume is not None or self._told is not None:
                # The loader process loaded the first item ahead of time in an order that is no
                # longer valid. The loader process must therefore begin the epoch again in the new
                # order.
                del tokens
                tokens, token = self._begin()
            had_items = token is not None
            if self._finish(epoch, tokens, token):
                self._channel.send(EndOfEpoch(epoch, self._source.draws.state(with_random=True)))
                epoch += 1
                if self._job.load_indefinitely and had_items:
                    self._newest = max(self._newest, epoch)
            # The worker processes of an unfinished epoch must end before the next epoch begins.
            del tokens
            self._wait_for(epoch)
            tokens, token = self._begin()

    def _begin(self) -> tuple[Iterator[_Token], _Token | None]:
        """Begin an epoch of the data set, and load its first item.

        Returns:
            An iterator over the remaining items of the epoch, and the epoch's first item. If the
            epoch is empty, the second value of the returned pair is None.
        """
        skipped = 0
        if self._resume is not None:
            (start, skipped), self._resume = self._resume, None
            self._source.draws.load(start)
        if self._told is not None:
            draws = self._source.draws
            if self._told.tell(draws.sampler, self._source.dataset):
                draws.end_workers()
            self._told = None
        self._start = self._source.draws.state(with_random=True)
        tokens = iter(self._source)
        for _ in range(skipped):
            # The skipped items are loaded too, because the data set may draw random numbers for
            # every item. The random numbers for later items depend on the earlier items.
            if (token := next(tokens, None)) is None:
                return tokens, None
            self._ledger.free.append(token[0])
        return tokens, next(tokens, None)

    def _wait_for(self, epoch: int) -> None:
        """Execute the accessor's commands until it permits the given epoch or a later epoch."""
        while self._newest < epoch:
            self._answer()

    def _finish(self, epoch: int, tokens: Iterator[_Token], token: _Token | None) -> bool:
        """Send the accessor the epoch's remaining items, and execute its commands meanwhile.

        Args:
            epoch: The number of the epoch.
            tokens: The iterator over the items after ``token``, as pairs of a slot's index and a
                description.
            token: The first item to send; None if the epoch has no items left.

        Returns:
            True if all items of the epoch were sent; False if the accessor requested a later epoch.
        """
        self._channel.send(Begun(epoch, self._start))
        while token is not None:
            slot, description = token
            self._ledger.lent.add(slot)
            news = None if description == self._sent else description
            self._channel.send(Filled(epoch, slot, news))
            self._sent = description
            while self._channel.ready() or len(self._ledger.lent) >= self._job.buffer_size:
                self._answer()
            if self._newest > epoch:
                return False
            with spans.row_span(spans.DATA_LOADER, "batch"):
                token = next(tokens, None)
        return True

    def _answer(self) -> None:
        """Wait for a command from the accessor, and execute the command."""
        match self._channel.receive():
            case GiveBack(slot):
                self._ledger.give_back(slot)
            case Start(epoch, resume, told):
                self._newest = max(self._newest, epoch)
                self._resume = resume or self._resume
                self._told = told or self._told
            case Stop():
                raise _Stopped


def run(job: Job, connection: Connection) -> None:
    """Run the main loop of an accessor's loader process until a command ends the process.

    Args:
        job: The data set to load, and the accessor's settings.
        connection: The loader process's end of the pipe to the training process.
    """
    # The loader process ignores Ctrl-C, because the training process handles Ctrl-C and ends the
    # loader process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Without ``set_start_method``, a DataLoader's worker processes would be started by the same
    # method as the loader process.
    multiprocessing.set_start_method(job.start_method, force=True)
    # Like a worker process of torch's DataLoader, the loader process uses one thread. The other CPU
    # cores are free for the computations of the program.
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    random.seed(job.seed)
    custom_type_parsers.restore(job.parsers)
    channel = Channel(connection)
    try:
        _Loader(job, channel).run()
    except (_Stopped, EOFError, BrokenPipeError):
        pass
    except Exception:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the main process may be gone
        with contextlib.suppress(OSError):
            channel.send(Failure(text))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
