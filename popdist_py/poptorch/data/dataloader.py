"""PopTorch's DataLoader: batches of the size that one call of a wrapped model takes.

Combines micro-batch, device iterations, replicas and gradient accumulation into one batch size,
and gives each instance its own share of the data set. How tensors travel from a loader process
(mode Async) is the accessor's matter.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, default_collate

from popdist_py import activities
from popdist_py.errors import counted
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor
from popdist_py.poptorch.data.batch_needs import (
    empty_share,
    too_few_batches,
    too_few_elements,
)
from popdist_py.poptorch.data.epoch_start import Draws, own_random
from popdist_py.poptorch.data.loader_arguments import (
    LoadSizes,
    check_batch_sampler,
    check_iterable,
    check_mode,
    is_partition,
    load_sizes,
)
from popdist_py.poptorch.data.sample_source import Source, length_of, loader_source
from popdist_py.poptorch.data.samplers import (
    BatchDataset,
    Concatenate,
    GroupedBatchSampler,
    ShardSampler,
    num_elements_of,
    sampler_length,
)
from popdist_py.poptorch.data.shared_seed import share_sampler, shared_seed
from popdist_py.poptorch.data.told_epochs import dataset_epochs
from popdist_py.poptorch.enums import DataLoaderMode
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.sharding import shard

__all__ = ["DataLoader"]

# How the system says that semaphores and memory cannot be shared.
_NO_SHARED_MEMORY: Final = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)


@dataclass(slots=True)
class _Place:
    """How far an epoch has come: ``position`` batches have been handed out."""

    epoch: int
    start: dict[str, Any]
    position: int = 0
    is_complete: bool = False


class _Epoch(Iterator[Any]):
    """The batches of an epoch, counted as they are handed out."""

    def __init__(self, batches: Any, place: _Place) -> None:
        self._batches = batches
        self._place = place

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            with activities.doing(activities.LOADING):
                batch = next(self._batches)
        except StopIteration:
            self._place.is_complete = True
            raise
        self._place.position += 1
        return batch


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Loads what one call of a wrapped model takes: batch_size x DI x (R / G) x GA elements.

    Args:
        options: the options of the model that will be fed; they get frozen.
        dataset: map-style or iterable data set.
        batch_size: elements of one micro-batch; None if the data set yields whole batches.
        shuffle: whether to read in a random order, new each epoch; not for iterable data sets.
            Several instances share one order: it comes from ``options.randomSeed``, equal on all of
            them, or else from a seed that instance 0 draws; then all make the loader. A sampler of
            torch without a generator draws from that seed, too. A sampler of the program's own
            has to yield the same order on every instance.
        num_workers: worker processes that load batches.
        drop_last: whether to leave out the elements that do not fill a batch.
        persistent_workers: whether workers outlive an epoch; None means yes if there are any. New
            workers are started after the data set's ``set_epoch()`` got another epoch.
        auto_distributed_partitioning: whether each process reads only its own share. A
            DistributedSampler of torch for several processes gives that share itself.
        mode: Sync loads in this process; Async in a process of its own, ahead of time;
            AsyncRebatched lets the workers load batches of another size.
        async_options: keyword arguments of :class:`AsynchronousDataAccessor`.
        rebatched_worker_size: batch size of the workers in mode AsyncRebatched.
        batch_sampler: yields the indices of one micro-batch at a time; DI x (R / G) x GA of its
            batches are concatenated along dimension 0.
        **kwargs: passed to :class:`torch.utils.data.DataLoader`.

    Raises:
        AssertionError: options of a wrong type; a combination that cannot be partitioned or
            rebatched.
        Error: batch_sampler beside batch_size, shuffle or automatic partitioning.

    In the modes Async and AsyncRebatched, tensors are valid until the next one is asked for, and
    tuples come as lists. Source: PopTorch user guide, "Efficient data batching".
    """

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        assert isinstance(options, Options), (
            f"'options' is of type {type(options).__name__}: expected poptorch.Options"
        )
        check_mode(mode)
        options._freeze()
        self._options = options
        self._mode = mode
        self._accessor: AsynchronousDataAccessor | None = None
        self._place: _Place | None = None  # in the epoch that was begun last
        self._resume: Mapping[str, Any] | None = None  # where the next ``iter()`` goes on
        self._dataset_epochs: tuple[Any, ...]  # the epochs of the data sets in existing workers
        partitioned = (
            auto_distributed_partitioning
            and options.Distributed.numProcesses > 1
            and not is_partition(kwargs.get("sampler"))
        )
        shuffle = bool(shuffle)
        # The program's own, where its batches have a size; torch's ``batch_sampler`` groups them.
        self._given_batches: Any = batch_sampler if hasattr(batch_sampler, "batch_size") else None

        if batch_sampler is not None:
            check_batch_sampler(batch_size, shuffle, partitioned)
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        elif batch_size is not None:
            is_size = isinstance(batch_size, int) and batch_size >= 1
            assert is_size, (
                f"batch_size={batch_size!r}: expected a whole number of 1 or more, or None"
            )
        micro_batches = options.batching(training=False).num_slices
        sizes = load_sizes(
            micro_batches, batch_size, drop_last, mode, rebatched_worker_size, async_options
        )
        sizes_are_known = mode == DataLoaderMode.AsyncRebatched and hasattr(
            batch_sampler, "batch_size"
        )
        if batch_sampler is not None and not sizes_are_known:
            sizes = replace(sizes, rebatched=False)  # its batches may differ in size
        self._sizes = sizes

        torch_arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": (
                num_workers > 0 if persistent_workers is None else persistent_workers
            ),
            **kwargs,
        }
        if batch_sampler is not None:
            dataset, grouped = _group_batches(
                dataset, batch_sampler, micro_batches, drop_last, kwargs.get("collate_fn")
            )
            torch_arguments |= grouped
        else:
            torch_arguments["batch_size"] = sizes.loaded
            # The accessor drops a last incomplete batch itself when it rebatches.
            torch_arguments["drop_last"] = (
                drop_last and not sizes.rebatched and sizes.loaded is not None
            )
            if isinstance(dataset, IterableDataset):
                check_iterable(num_workers, partitioned, kwargs)
                torch_arguments["shuffle"] = shuffle
            elif partitioned and not (shuffle and "sampler" in kwargs):
                torch_arguments["sampler"] = _shard_sampler(
                    options, dataset, sizes, shuffle, kwargs.get("sampler")
                )
            else:
                torch_arguments["shuffle"] = shuffle
        super().__init__(dataset, **torch_arguments)
        self._dataset_epochs = dataset_epochs(dataset)

        self._why_empty = self._say_no_batch(batch_size, partitioned=partitioned)
        if sizes.combined is not None and batch_sampler is None and not drop_last:
            self._warn_of_short_batch(sizes.combined)
        if mode == DataLoaderMode.Sync:
            # With drop_last, all instances have equally many batches, so one warning is enough.
            says_it = options.Distributed.processId == 0 or not drop_last
            if self._why_empty is not None and says_it:
                logger.warning(self._why_empty)
        else:
            rebatched_size = sizes.combined if sizes.rebatched else None
            self._accessor = AsynchronousDataAccessor(
                self, **(async_options or {}), rebatched_size=rebatched_size
            )

    @property
    def combinedBatchSize(self) -> int | None:
        """Number of elements per call of the model; None if batch_size is None."""
        return self._sizes.combined

    @property
    def _combined_batch_size(self) -> int | None:
        """The same as combinedBatchSize: PopTorch's private name, which some programs read."""
        return self._sizes.combined

    @property
    def options(self) -> Options:
        """The (frozen) options that this loader was made with."""
        return self._options

    def terminate(self) -> None:
        """End the loader process of the modes Async and AsyncRebatched; nothing in mode Sync."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        combined = self._sizes.combined
        if not self._sizes.rebatched or combined is None:
            return super().__len__()
        elements = self._num_elements()
        return elements // combined if self._sizes.drop_last else ceil(elements / combined)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._accessor is not None:
            return iter(self._accessor)
        try:
            return self._begin()
        except OSError as error:
            if self.num_workers == 0 or error.errno not in _NO_SHARED_MEMORY:
                raise
            raise Error(
                f"num_workers={self.num_workers}: worker processes need shared memory, and "
                f"/dev/shm gives none ({error.strerror}). Make it larger or writable (docker run "
                "--shm-size=1g, mount -o remount,size=1g /dev/shm), or load with num_workers=0"
            ) from error

    def _begin(self) -> Iterator[Any]:
        """Begin an epoch, or go on with the one that was loaded."""
        resume, self._resume = self._resume, None
        epochs = dataset_epochs(self.dataset)
        if epochs != self._dataset_epochs:
            self._dataset_epochs = epochs
            Draws.of(self).end_workers()
        if resume is not None:
            return self._go_on(resume)
        self._place = _Place(self._next_epoch, Draws.of(self).state(with_random=True))
        return _Epoch(super().__iter__(), self._place)

    @property
    def _next_epoch(self) -> int:
        return 0 if self._place is None else self._place.epoch + 1

    def _go_on(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the epoch as it began before, and skip the batches that were handed out."""
        start, draws = state["start"], Draws.of(self)
        if start["random"] is None:  # taken between two epochs: this one draws from the program's
            draws.load(start)
            start = draws.state(with_random=True)
            batches = super().__iter__()
        else:
            # The program's own random numbers go on from where they are.
            with own_random():
                draws.load(start)
                batches = super().__iter__()
                # Loaded all the same: what workers draw for later batches depends on it.
                for _ in range(state["position"]):
                    next(batches, None)
        self._place = _Place(state["epoch"], start, state["position"])
        return _Epoch(batches, self._place)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: complete epochs, batches of this one, and its order.

        It can be saved and loaded without running code. The state of the program's own random
        numbers is the program's to save, and what persistent workers draw at random for
        themselves is not part of it. A sampler of the program's own may have a ``state_dict()``;
        of others, torch's attribute ``generator`` is saved.
        """
        return {**self._state(), "batch_elements": self._elements_of_batch}

    @property
    def _elements_of_batch(self) -> int | None:
        """The number of elements of one batch of all instances; None if the data set decides."""
        combined = self._sizes.combined
        return None if combined is None else combined * self._options.Distributed.numProcesses

    def _state(self) -> dict[str, Any]:
        if self._accessor is not None:
            return self._accessor.state_dict()
        if self._resume is not None:
            return dict(self._resume)
        if self._place is None or self._place.is_complete:
            start = Draws.of(self).state(with_random=False)
            return {"epoch": self._next_epoch, "position": 0, "start": start}
        return {
            "epoch": self._place.epoch,
            "position": self._place.position,
            "start": self._place.start,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what state_dict() returned; the next ``iter()`` goes on with the very next batch.

        The batches before it are loaded once more and thrown away. If the size of a batch has
        changed, such as with other device iterations, the loader skips the same number of elements.
        """
        state = {**state_dict, "position": self._position_of(state_dict)}
        if self._accessor is not None:
            self._accessor.load_state_dict(state)
        else:
            self._resume = state

    def _position_of(self, state: Mapping[str, Any]) -> int:
        """Return the number of this loader's batches that hold the elements handed out before."""
        position: int = state["position"]
        before: int | None = state.get("batch_elements")  # earlier versions did not save it
        now = self._elements_of_batch
        if before is None or now is None or before == now:
            return position
        batches, rest = divmod(position * before, now)
        if rest:
            logger.warning(
                "The loaded state is %s into an epoch, which is not a multiple of the batch size "
                "%d: %s read again",
                counted(position * before, "element"),
                now,
                f"{counted(rest, 'element')} {'is' if rest == 1 else 'are'}",
            )
        return batches

    def _loader_source(self, size: int | None) -> Source:
        """Answer an accessor that asks what its loader process shall iterate.

        Raises:
            Error: an accessor iterates this loader already.
            AssertionError: the last batch may be short, and nothing assembles whole ones.
        """
        if self._accessor is not None:
            raise Error(
                "The DataLoader already uses an AsynchronousDataAccessor: iterate it directly, or "
                "make it with mode=DataLoaderMode.Sync"
            )
        if self._mode == DataLoaderMode.Sync and size is None:
            assert self.combinedBatchSize in (None, 1) or self._sizes.drop_last, (
                "The last batch of the DataLoader may be incomplete (drop_last=False): give "
                "rebatched_size, or use drop_last=True"
            )
        # A loader in an asynchronous mode holds its accessor: no cycle, so that both end promptly.
        reference = self if self._mode == DataLoaderMode.Sync else weakref.proxy(self)
        # Of a loader that rebatches, the length counts the rebatched ones already.
        length = partial(length_of, reference, None if self._sizes.rebatched else size)
        # An asynchronous one that iterates in a way of its own does so here, not there.
        if self._mode == DataLoaderMode.Sync and type(self).__iter__ is not DataLoader.__iter__:
            source = Source(items=self, drop_last=self._sizes.drop_last, length=length)
        else:
            source = loader_source(self, size, drop_last=self._sizes.drop_last, length=length)
        return source if self._why_empty is None else replace(source, why_empty=self._why_empty)

    def _num_elements(self) -> int:
        """Return how many elements an epoch of this process has."""
        if self._given_batches is not None:
            return num_elements_of(self._given_batches)
        source = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return len(source)  # type: ignore[arg-type]

    def _say_no_batch(self, batch_size: int | None, *, partitioned: bool) -> str | None:
        """Return why this loader has no batches; None if it has, or if the data set is empty."""
        dataset: Any = self.dataset
        batching = self._options.batching(training=False)
        if not self._sizes.drop_last and not partitioned:
            return None
        try:
            if len(self) > 0:
                return None
            if isinstance(self.batch_sampler, GroupedBatchSampler):
                batches = self.batch_sampler.num_batches
                return too_few_batches(batches, batching) if batches else None
            elements = len(dataset) if partitioned else self._num_elements()
        except (TypeError, NotImplementedError, AttributeError):
            return None  # nobody knows before the end of an epoch
        if not elements or batch_size is None:
            return None
        instances = self._options.Distributed.numProcesses if partitioned else 1
        if not self._sizes.drop_last:
            own = self._options.Distributed.processId
            return empty_share(elements, instance=own, num_instances=instances)
        return too_few_elements(elements, batch_size, batching, num_instances=instances)

    def _warn_of_short_batch(self, combined: int) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.sampler, "__len__"):
            return
        short = self._num_elements() % combined
        if short:
            logger.warning(
                "The data set's %s cannot be divided into batches of %d: the last tensor "
                "will have a batch size of %d. Use drop_last=True to leave it out",
                counted(self._num_elements(), "element"),
                combined,
                short,
            )


def _group_batches(
    dataset: Any,
    batch_sampler: Iterable[Any],
    size: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the torch arguments that concatenate ``size`` sampler batches."""
    if sampler_length(batch_sampler) is None:
        logger.warning(
            "The batch sampler %s has no usable __len__: the length of the DataLoader is unknown. "
            "Define __len__ if you need it",
            type(batch_sampler).__name__,
        )
    if size == 1:
        return dataset, {"batch_sampler": batch_sampler}
    return BatchDataset(dataset, collate_fn or default_collate), {
        "batch_sampler": GroupedBatchSampler(batch_sampler, size, drop_last),
        "collate_fn": Concatenate(),
    }


def _shard_sampler(
    options: Options, dataset: Any, sizes: LoadSizes, shuffle: bool, sampler: Any
) -> ShardSampler:
    """Return the sampler of this process's share of the data set."""
    assert sizes.combined is not None, (
        "batch_size=None is not allowed with auto_distributed_partitioning: give a batch_size, or "
        "auto_distributed_partitioning=False"
    )
    share_sampler(sampler, options)
    order: Any = range(len(dataset)) if sampler is None else sampler
    share = shard(
        len(order),
        num_processes=options.Distributed.numProcesses,
        process=options.Distributed.processId,
        step=sizes.combined,
        drop_last=sizes.drop_last,
    )
    return ShardSampler(order, share, shared_seed(options) if shuffle else None)
