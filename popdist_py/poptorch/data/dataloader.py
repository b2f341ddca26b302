"""PopTorch's class DataLoader, whose batches have the size that one call of a model needs.

The size of a batch is the micro-batch size times the numbers of device iterations, replicas and
accumulated micro-batches. On each instance (process) of a job, the DataLoader reads only this
instance's share of the data set. In the mode Async, another process loads the batches, and the
class AsynchronousDataAccessor receives them.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from popdist_py.errors import counted
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor
from popdist_py.poptorch.data.epoch_batches import EpochBatches
from popdist_py.poptorch.data.epoch_random_state import Draws, own_random
from popdist_py.poptorch.data.loader_arguments import (
    check_batch_sampler,
    check_iterable,
    check_mode,
    check_order,
    is_partition,
    load_sizes,
)
from popdist_py.poptorch.data.loader_position import CountedBatches, Place, position_in
from popdist_py.poptorch.data.loader_samplers import group_batches, order_arguments
from popdist_py.poptorch.data.sample_source import Source, length_of, loader_source
from popdist_py.poptorch.data.samplers import GroupedBatchSampler, num_elements_of
from popdist_py.poptorch.data.set_epoch_calls import dataset_epochs
from popdist_py.poptorch.data.too_small_messages import (
    empty_share,
    too_few_batches,
    too_few_elements,
)
from popdist_py.poptorch.enums import DataLoaderMode
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["DataLoader"]

# The operating system's error codes for a failure to make shared semaphores or shared memory.
_NO_SHARED_MEMORY: Final = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A DataLoader whose batches contain the elements for one call of a wrapped model.

    A batch of the DataLoader has batch_size x DI x (R / G) x GA elements. DI is the number of
    device iterations, and GA is the number of accumulated micro-batches. R is the number of
    replicas (copies of the model), and G is the number of replicas in a group that shares its
    inputs.

    Args:
        options: The options of the model that will get the batches. The DataLoader freezes the
            options, so that later changes raise an error.
        dataset: A map-style or iterable data set.
        batch_size: The number of elements in one micro-batch; None if the data set yields whole
            batches.
        shuffle: Whether to read the data set in a new random order in each epoch. The order of an
            iterable data set cannot be random. All instances shuffle the data set in the same
            order, which is computed from a seed and the number of the epoch. The seed
            ``options.randomSeed`` must be equal on all instances. If the options do not contain a
            seed, the DataLoader draws one number from torch's random generator when it is made, and
            the number from instance 0 becomes the seed on all instances. Without a seed in the
            options, all instances must make the DataLoader, because they exchange the seed.
            DataLoaders of equal length have the same order only if the options contain a seed. A
            torch sampler without its own generator also uses the seed that all instances share.
            Samplers that the program defines must yield the same order on every instance. Without a
            seed in the options, a single instance shuffles with the argument ``generator`` of
            torch's DataLoader if the program gives one. Several instances never shuffle with
            ``generator``.
        num_workers: The number of worker processes that load batches. In the mode Sync, worker
            processes seed the random generators of torch, Python and NumPy before each batch, with
            a number that depends on the instance, the epoch and the batch. With a
            ``worker_init_fn``, worker processes seed their generators only once, as in torch.
        drop_last: Whether to drop the last elements of the data set if they do not fill a batch.
        persistent_workers: Whether worker processes stay alive between epochs, which is the
            default. If the program has set another epoch with the data set's ``set_epoch()``, the
            DataLoader always starts new worker processes.
        auto_distributed_partitioning: Whether each process reads only its own share of the data
            set. A torch DistributedSampler for several processes already selects the share of one
            process. The DataLoader does not divide the order of a DistributedSampler for several
            processes again. With a DistributedSampler, the elements of a global batch therefore
            depend on the number of instances.
        mode: The mode Sync loads batches in the program's process. The mode Async loads batches
            ahead of time in another process. The mode AsyncRebatched loads batches ahead of time
            like Async, but its worker processes may load batches of another size.
        async_options: Keyword arguments for :class:`AsynchronousDataAccessor`.
        rebatched_worker_size: The batch size of the worker processes in the mode AsyncRebatched.
        batch_sampler: An iterable that yields the indices of one micro-batch at a time. The
            DataLoader concatenates DI x (R / G) x GA micro-batches of ``batch_sampler`` along
            dimension 0.
        distributed_order: The order in which the instances together read the data set, "global" or
            "contiguous". With "global", each global batch contains the next elements of the order
            that a single instance with all replicas reads, and each instance reads the rows of its
            replicas. The elements of a global batch then do not depend on the number of instances.
            With "contiguous", each instance reads a contiguous part of the data set, as in
            PopTorch.
        **kwargs: Keyword arguments for :class:`torch.utils.data.DataLoader`.

    Raises:
        AssertionError: The options have a wrong type, or the data set cannot be partitioned or
            rebatched with the given arguments.
        Error: The program combines ``batch_sampler`` with batch_size, shuffle or automatic
            partitioning.

    A global batch contains the batches of all instances for one call of the model. With drop_last,
    the last elements that do not fill a global batch are dropped. Without drop_last, each instance
    reads a contiguous part of the last r elements, and the parts differ in length by at most 1. If
    r is less than the number of instances, some instances read none of the last r elements.

    All modes, numbers of workers and sizes of worker batches read the elements in the same order.
    A data set that yields whole batches, an iterable data set and a batch sampler cannot be
    partitioned, so several instances do not read global batches from them. With groups of replicas
    that share their inputs, the elements of a global batch do not depend on the number of instances
    either. Which group gets an element depends on the number of instances if the groups are
    Orthogonal.

    In the modes Async and AsyncRebatched, the tensors of a batch are valid until the next batch is
    requested. In the modes Async and AsyncRebatched, the DataLoader returns lists in place of
    tuples. The chapter "Efficient data batching" of the PopTorch user guide describes the batch
    sizes.
    """

    # Torch's DataLoader may read ``_index_sampler`` before the constructor has set ``_batches``.
    _batches: EpochBatches | None = None

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
        distributed_order: str = "global",
        **kwargs: Any,
    ) -> None:
        assert isinstance(options, Options), (
            f"'options' is of type {type(options).__name__}: expected poptorch.Options"
        )
        check_mode(mode)
        check_order(distributed_order)
        options._freeze()
        self._options = options
        self._mode = mode
        self._accessor: AsynchronousDataAccessor | None = None
        # The DataLoader's position in the epoch that began last.
        self._place: Place | None = None
        # The loaded state of the position in the data, where the next ``iter()`` continues.
        self._resume: Mapping[str, Any] | None = None
        # The epochs from ``set_epoch()`` that the data set and its inner data sets have in the
        # existing worker processes.
        self._dataset_epochs: tuple[Any, ...]
        is_divisible = auto_distributed_partitioning and not is_partition(kwargs.get("sampler"))
        partitioned = is_divisible and options.Distributed.numProcesses > 1
        shuffle = bool(shuffle)
        # The program's batch sampler, if the batch sampler has an attribute ``batch_size``. The
        # inherited attribute ``batch_sampler`` may be a GroupedBatchSampler, which groups the
        # batches of the program's batch sampler.
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
            # Rebatching needs batches of equal sizes, but the batches of a batch sampler may have
            # different sizes.
            sizes = replace(sizes, rebatched=False)
        self._sizes = sizes

        torch_arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": (
                num_workers > 0 if persistent_workers is None else persistent_workers
            ),
            **kwargs,
        }
        if batch_sampler is not None:
            dataset, grouped = group_batches(
                dataset, batch_sampler, micro_batches, drop_last, kwargs.get("collate_fn")
            )
            torch_arguments |= grouped
        else:
            torch_arguments["batch_size"] = sizes.loaded
            # If the accessor assembles batches of another size, the accessor drops the last
            # incomplete batch, so torch's DataLoader must not drop it.
            torch_arguments["drop_last"] = (
                drop_last and not sizes.rebatched and sizes.loaded is not None
            )
            if isinstance(dataset, IterableDataset):
                check_iterable(num_workers, partitioned, kwargs)
                torch_arguments["shuffle"] = shuffle
            else:
                order = distributed_order if is_divisible else None
                torch_arguments |= order_arguments(
                    options, dataset, sizes, shuffle=shuffle, order=order, given=kwargs
                )
        super().__init__(dataset, **torch_arguments)
        if mode == DataLoaderMode.Sync and not isinstance(dataset, IterableDataset):
            has_own = batch_sampler is None and kwargs.get("sampler") is None
            self._batches = EpochBatches(self, super()._index_sampler, has_own_order=has_own)
        self._dataset_epochs = dataset_epochs(dataset)

        self._why_empty = self._say_no_batch(batch_size, partitioned=partitioned)
        if sizes.combined is not None and batch_sampler is None and not drop_last:
            self._warn_of_short_batch(sizes.combined)
        if mode == DataLoaderMode.Sync:
            # With drop_last, all instances have the same number of batches, so a warning on one
            # instance is enough.
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
        """The number of elements in a batch; None if the data set itself yields whole batches."""
        return self._sizes.combined

    @property
    def _combined_batch_size(self) -> int | None:
        """The value of combinedBatchSize, for programs that read PopTorch's private attribute."""
        return self._sizes.combined

    @property
    def options(self) -> Options:
        """The frozen options that the program passed to this DataLoader."""
        return self._options

    def terminate(self) -> None:
        """End the loader process that the modes Async and AsyncRebatched have started."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        """Return the number of batches that this DataLoader yields in an epoch."""
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
                f"num_workers={self.num_workers}: worker processes need shared memory, but "
                f"/dev/shm cannot provide it ({error.strerror}). Make /dev/shm larger or writable "
                "(docker run --shm-size=1g, mount -o remount,size=1g /dev/shm), or load the data "
                "with num_workers=0"
            ) from error

    def _begin(self) -> Iterator[Any]:
        """Begin an epoch, or continue the epoch that a loaded state describes."""
        resume, self._resume = self._resume, None
        epochs = dataset_epochs(self.dataset)
        if epochs != self._dataset_epochs:
            self._dataset_epochs = epochs
            Draws.of(self).end_workers()
        if resume is not None:
            return self._go_on(resume)
        return self._batches_from(Place(self._next_epoch, Draws.of(self).state(with_random=True)))

    @property
    def _next_epoch(self) -> int:
        return 0 if self._place is None else self._place.epoch + 1

    def _go_on(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Begin a saved epoch again, and skip the batches before the saved position."""
        start, draws = state["start"], Draws.of(self)
        if start["random"] is None:
            # The state was saved between two epochs, so the new epoch uses the present state of the
            # program's random generators.
            draws.load(start)
            return self._batches_from(Place(state["epoch"], draws.state(with_random=True)))
        # Loading the skipped batches draws random numbers, but must not change the state of the
        # program's random generators.
        with own_random():
            draws.load(start)
            return self._batches_from(Place(state["epoch"], start, state["position"]))

    def _batches_from(self, place: Place) -> Iterator[Any]:
        """Return the remaining batches of an epoch, which the random generators are ready for."""
        can_skip = False
        if self._batches is not None:
            can_skip = self._batches.can_skip
            torch_state: torch.Tensor = place.start["random"][0]
            key = b"%d %d" % (place.epoch, self._options.Distributed.processId)
            first = place.position if can_skip else 0
            self._batches.begin(bytes(torch_state.numpy()) + key, first)
        batches = super().__iter__()
        for _ in range(0 if can_skip else place.position):
            next(batches, None)
        self._place = place
        return CountedBatches(batches, place)

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's DataLoader iterates over in each epoch."""
        return super()._index_sampler if self._batches is None else self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the current position in the data, as a state for ``load_state_dict()``.

        The state of the DataLoader contains the number of complete epochs and the number of
        returned batches of the current epoch. The state of the DataLoader also contains the random
        state at the start of the current epoch, which determines the order of the batches. The
        returned state consists of plain values and tensors, so loading the state from a file
        executes no code.

        The state of the DataLoader also includes the result of the sampler's method
        ``state_dict()``, or the sampler's attributes ``generator`` and ``epoch``. In the mode Sync,
        the returned state determines the random numbers that worker processes draw from the
        generators of torch, Python and NumPy, unless the program gives a ``worker_init_fn``. In
        the other modes, the state does not include the generators of persistent worker processes.
        The program itself must save the state of its own random generators.
        """
        return {**self._state(), "batch_elements": self._elements_of_batch}

    @property
    def _elements_of_batch(self) -> int | None:
        """The number of elements that all instances together need for one call of the model.

        The number of elements is None if the data set yields whole batches.
        """
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
        """Load a position in the data that ``state_dict()`` returned.

        The next call of ``iter()`` continues with the batch after the saved position. If the batch
        size has changed, for example because of other device iterations, the DataLoader skips the
        same number of elements as before. The number of instances may have changed too.

        In the mode Sync, the elements before the saved position are not loaded again. There are
        exceptions, because loading draws random numbers: an iterable data set, a sampler or
        generator of the program without worker processes, and a ``worker_init_fn`` or a batch
        sampler of a class of the program with worker processes. In the exceptions and in the other
        modes, the elements before the saved position are loaded again and discarded.
        """
        state = {**state_dict, "position": position_in(state_dict, self._elements_of_batch)}
        if self._accessor is not None:
            self._accessor.load_state_dict(state)
        else:
            self._resume = state

    def _loader_source(self, size: int | None) -> Source:
        """Return a ``Source``, which describes how an accessor's loader process loads the batches.

        Args:
            size: The number of elements in the batches that the accessor assembles; None if the
                accessor returns this DataLoader's batches unchanged.

        Raises:
            Error: This DataLoader already has an accessor.
            AssertionError: The last batch may be incomplete, but the accessor does not assemble
                batches of another size.
        """
        if self._accessor is not None:
            raise Error(
                "The DataLoader already uses an AsynchronousDataAccessor: iterate over the "
                "DataLoader itself, or make the DataLoader with mode=DataLoaderMode.Sync"
            )
        if self._mode == DataLoaderMode.Sync and size is None:
            assert self.combinedBatchSize in (None, 1) or self._sizes.drop_last, (
                "The last batch of the DataLoader may be incomplete (drop_last=False): pass "
                "rebatched_size to the AsynchronousDataAccessor, or make the DataLoader with "
                "drop_last=True"
            )
        # In the modes Async and AsyncRebatched, the DataLoader refers to its accessor. With a weak
        # reference from the accessor to the DataLoader, the DataLoader and the accessor do not form
        # a reference cycle. Without a reference cycle, Python deletes unused DataLoaders and
        # accessors at once.
        reference = self if self._mode == DataLoaderMode.Sync else weakref.proxy(self)
        # If this DataLoader rebatches, its length is already the number of batches after
        # rebatching.
        length = partial(length_of, reference, None if self._sizes.rebatched else size)
        # If a subclass in the mode Sync overrides ``__iter__``, the loader process calls the
        # overriding method. In the modes Async and AsyncRebatched, an override of ``__iter__`` runs
        # in the training process and iterates over the accessor.
        if self._mode == DataLoaderMode.Sync and type(self).__iter__ is not DataLoader.__iter__:
            source = Source(items=self, drop_last=self._sizes.drop_last, length=length)
        else:
            source = loader_source(self, size, drop_last=self._sizes.drop_last, length=length)
        return source if self._why_empty is None else replace(source, why_empty=self._why_empty)

    def _num_elements(self) -> int:
        """Return the number of elements that this process reads in an epoch."""
        if self._given_batches is not None:
            return num_elements_of(self._given_batches)
        source = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return len(source)  # type: ignore[arg-type]

    def _say_no_batch(self, batch_size: int | None, *, partitioned: bool) -> str | None:
        """Return a message that explains why this DataLoader cannot make a batch, or None.

        Returns:
            The message; None if the DataLoader has batches, if its length is not known, or if the
            data set is empty.
        """
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
            # The length of the data set or of its batch sampler is unknown, so the number of
            # batches is known only at the end of an epoch.
            return None
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
                "The data set's %s cannot be divided into batches of %d: the last tensor will have "
                "a batch size of %d. Use drop_last=True to leave out the incomplete last batch",
                counted(self._num_elements(), "element"),
                combined,
                short,
            )
