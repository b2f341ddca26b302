"""Checks of the arguments of DataLoader, and the sizes of its batches.

The functions in ``loader_arguments`` do not load any data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.poptorch.enums import DataLoaderMode
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = [
    "LoadSizes",
    "check_batch_sampler",
    "check_iterable",
    "check_mode",
    "check_order",
    "is_partition",
    "load_sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSizes:
    """The numbers of elements in a DataLoader's batches.

    Attributes:
        combined: The number of elements for one call of the model; None if the data set yields
            whole batches.
        loaded: The number of elements in a batch that torch's DataLoader loads, before rebatching;
            None if the data set yields whole batches.
        rebatched: Whether the accessor assembles batches of ``combined`` elements from batches of
            ``loaded`` elements.
        drop_last: Whether the last batch of an epoch is dropped if it is incomplete.
    """

    combined: int | None
    loaded: int | None
    rebatched: bool
    drop_last: bool


def load_sizes(
    micro_batches: int,
    batch_size: int | None,
    drop_last: bool,
    mode: DataLoaderMode,
    rebatched_worker_size: int | None,
    async_options: dict[str, Any] | None,
) -> LoadSizes:
    """Return the sizes of a DataLoader's batches, computed from the DataLoader's arguments.

    Args:
        micro_batches: The number of micro-batches for one call of the model.
        batch_size: The number of elements in a micro-batch; None if the data set yields whole
            batches.
        drop_last: Whether the last batch of an epoch is dropped if it is incomplete.
        mode: The mode of the DataLoader (Sync, Async or AsyncRebatched).
        rebatched_worker_size: The batch size of the worker processes in the mode AsyncRebatched.
        async_options: The program's keyword arguments for the accessor.

    Raises:
        AssertionError: The argument ``rebatched_worker_size`` is not between 1 and the number of
            elements for one call, or ``async_options`` contains ``rebatched_size``.
    """
    combined = None if batch_size is None else batch_size * micro_batches
    assert "rebatched_size" not in (async_options or {}), (
        "'rebatched_size' is not an option for async_options: to rebatch, use "
        "mode=poptorch.DataLoaderMode.AsyncRebatched"
    )
    rebatched = mode == DataLoaderMode.AsyncRebatched or (
        mode == DataLoaderMode.Async and not drop_last
    )
    # Batches of one element need not be assembled, because they are never incomplete.
    rebatched = rebatched and combined is not None and combined > 1
    loaded = combined
    if mode == DataLoaderMode.AsyncRebatched and rebatched_worker_size is not None:
        assert 1 <= rebatched_worker_size <= (combined or 0), (
            f"rebatched_worker_size is {rebatched_worker_size}: it must be at least 1, and at most "
            f"the number of elements in a combined batch, {combined}"
        )
        loaded = rebatched_worker_size
    return LoadSizes(combined=combined, loaded=loaded, rebatched=rebatched, drop_last=drop_last)


def check_mode(mode: Any) -> None:
    """Check the mode of a DataLoader.

    Args:
        mode: A member of DataLoaderMode, or the number of a member.

    Raises:
        AssertionError: ``mode`` is not a mode of DataLoader.
    """
    assert mode in tuple(DataLoaderMode), (
        f"mode={mode!r}: expected one of "
        f"{', '.join(f'poptorch.DataLoaderMode.{each.name}' for each in DataLoaderMode)}"
    )


def check_order(distributed_order: Any) -> None:
    """Check the argument ``distributed_order`` of a DataLoader.

    Raises:
        AssertionError: ``distributed_order`` is not the name of an order.
    """
    assert distributed_order in ("global", "contiguous"), (
        f'distributed_order={distributed_order!r}: expected "global" or "contiguous"'
    )


def is_partition(sampler: Any) -> bool:
    """Tell whether a sampler yields only one process's share of a data set.

    The DataLoader must not divide the indices again if the sampler yields only one process's share
    of the data set.
    """
    return (
        isinstance(sampler, torch.utils.data.distributed.DistributedSampler)
        and sampler.num_replicas > 1
    )


def check_batch_sampler(batch_size: int | None, shuffle: bool, partitioned: bool) -> None:
    """Check the arguments that a program passes to DataLoader together with a batch sampler.

    Raises:
        Error: Besides the batch sampler, the program passes a batch size, shuffle or automatic
            partitioning.
    """
    if batch_size != 1 or shuffle:
        raise Error(
            "batch_sampler is mutually exclusive with batch_size and shuffle: got "
            f"batch_size={batch_size} and shuffle={shuffle}. Omit batch_size and shuffle"
        )
    if partitioned:
        raise Error(
            "batch_sampler is mutually exclusive with auto_distributed_partitioning: divide the "
            "elements among the instances in the sampler, and pass "
            "auto_distributed_partitioning=False"
        )


def check_iterable(num_workers: int, partitioned: bool, kwargs: dict[str, Any]) -> None:
    """Check the arguments that a program passes to DataLoader with an iterable data set.

    ``check_iterable`` logs a warning if every worker process would return the whole data set.

    Raises:
        AssertionError: The program requests automatic partitioning of the iterable data set.
    """
    assert not partitioned, (
        "auto_distributed_partitioning is not supported for an IterableDataset with several "
        "processes: divide the elements among the processes in the data set, and pass "
        "auto_distributed_partitioning=False"
    )
    if num_workers > 1 and kwargs.get("worker_init_fn") is None:
        logger.warning(
            "IterableDataset used with num_workers=%d but no worker_init_fn specified: as a "
            "result every element of the data set will be returned %d times by the DataLoader",
            num_workers,
            num_workers,
        )
