"""What a DataLoader may be asked for: the sizes of its batches, and what does not go together.

Decisions and refusals only; nothing is loaded here.
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
    "is_partition",
    "load_sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSizes:
    """How many elements a batch holds, on the way from the data set to the model."""

    combined: int | None  # per call of the model; None when the data set yields whole batches
    loaded: int | None  # per batch that torch's DataLoader loads
    rebatched: bool  # whether the accessor assembles loaded batches into combined ones
    drop_last: bool


def load_sizes(
    micro_batches: int,
    batch_size: int | None,
    drop_last: bool,
    mode: DataLoaderMode,
    rebatched_worker_size: int | None,
    async_options: dict[str, Any] | None,
) -> LoadSizes:
    """Decide the sizes of batches for a model whose calls take ``micro_batches`` of them.

    Raises:
        AssertionError: sizes that do not go together.
    """
    combined = None if batch_size is None else batch_size * micro_batches
    assert "rebatched_size" not in (async_options or {}), (
        "'rebatched_size' is not an option for async_options: use mode AsyncRebatched"
    )
    rebatched = mode == DataLoaderMode.AsyncRebatched or (
        mode == DataLoaderMode.Async and not drop_last
    )
    # One element fills a batch: there is nothing to assemble, and no batch is ever short.
    rebatched = rebatched and combined is not None and combined > 1
    loaded = combined
    if mode == DataLoaderMode.AsyncRebatched and rebatched_worker_size is not None:
        assert 1 <= rebatched_worker_size <= (combined or 0), (
            f"rebatched_worker_size is {rebatched_worker_size}: it must be at least 1 and not "
            f"greater than the combined batch size, {combined}"
        )
        loaded = rebatched_worker_size
    return LoadSizes(combined=combined, loaded=loaded, rebatched=rebatched, drop_last=drop_last)


def check_mode(mode: Any) -> None:
    """Check the mode of a loader; the numbers of modes will do."""
    assert mode in tuple(DataLoaderMode), (
        f"mode={mode!r}: expected one of "
        f"{', '.join(f'poptorch.DataLoaderMode.{each.name}' for each in DataLoaderMode)}"
    )


def is_partition(sampler: Any) -> bool:
    """Tell whether a sampler yields one process's share: it must not be shared out again."""
    return (
        isinstance(sampler, torch.utils.data.distributed.DistributedSampler)
        and sampler.num_replicas > 1
    )


def check_batch_sampler(batch_size: int | None, shuffle: bool, partitioned: bool) -> None:
    """Check what is given beside a batch sampler.

    Raises:
        Error: another way to batch, or automatic partitioning.
    """
    if batch_size != 1 or shuffle:
        raise Error(
            "batch_sampler is mutually exclusive with batch_size and shuffle: got "
            f"batch_size={batch_size} and shuffle={shuffle}; give only the batch_sampler"
        )
    if partitioned:
        raise Error(
            "batch_sampler is mutually exclusive with auto_distributed_partitioning: partition "
            "in the sampler and give auto_distributed_partitioning=False"
        )


def check_iterable(num_workers: int, partitioned: bool, kwargs: dict[str, Any]) -> None:
    """Check what is given beside an iterable data set; warn of workers that would repeat it.

    Raises:
        AssertionError: automatic partitioning.
    """
    assert not partitioned, (
        "auto_distributed_partitioning is not supported for an IterableDataset with several "
        "processes: partition inside the data set and give auto_distributed_partitioning=False"
    )
    if num_workers > 1 and kwargs.get("worker_init_fn") is None:
        logger.warning(
            "IterableDataset used with num_workers=%d but no worker_init_fn specified: as a "
            "result every element of the data set will be returned %d times by the DataLoader",
            num_workers,
            num_workers,
        )
