"""The samplers that give a DataLoader's batches as many elements as one call of a model needs.

The function ``group_batches`` groups the batches of the program's batch sampler. The function
``shard_sampler`` divides the order of the data set among the processes. The module ``samplers.py``
defines the sampler classes that ``loader_samplers`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import default_collate

from popdist_py.poptorch.data.loader_arguments import LoadSizes
from popdist_py.poptorch.data.samplers import (
    BatchDataset,
    Concatenate,
    GroupedBatchSampler,
    ShardSampler,
    sampler_length,
)
from popdist_py.poptorch.data.shared_seed import share_sampler, shared_seed
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.sharding import shard

__all__ = ["group_batches", "shard_sampler"]


def group_batches(
    dataset: Any,
    batch_sampler: Iterable[Any],
    size: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> tuple[Any, dict[str, Any]]:
    """Return a data set and torch arguments for a DataLoader that concatenates batches.

    Args:
        dataset: The user's data set.
        batch_sampler: The user's batch sampler.
        size: The number of batches of ``batch_sampler`` to concatenate.
        drop_last: Whether to drop the last batches if there are fewer than ``size`` of them.
        collate_fn: The function that collates the elements of one batch.
    """
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


def shard_sampler(
    options: Options, dataset: Any, sizes: LoadSizes, shuffle: bool, sampler: Any
) -> ShardSampler:
    """Return a sampler that yields this process's share of the data set."""
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
