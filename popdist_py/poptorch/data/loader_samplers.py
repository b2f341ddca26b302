"""The samplers that give a DataLoader's batches as many elements as one call of a model needs.

The function ``group_batches`` groups the batches of the program's batch sampler. The function
``order_arguments`` divides the order of the data set among the processes. The module
``samplers.py`` defines the sampler classes that ``loader_samplers`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from popdist_py.poptorch.data.loader_arguments import LoadSizes
from popdist_py.poptorch.data.samplers import (
    BatchDataset,
    Concatenate,
    GlobalOrderSampler,
    GroupedBatchSampler,
    ShardSampler,
    sampler_length,
)
from popdist_py.poptorch.data.shared_seed import share_sampler, shared_seed
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.sharding import global_share, shard

__all__ = ["group_batches", "order_arguments"]


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
            "The batch sampler %s has no usable __len__, so the length of the DataLoader is "
            "unknown. Define __len__ in the batch sampler if the program needs len(loader)",
            type(batch_sampler).__name__,
        )
    if size == 1:
        return dataset, {"batch_sampler": batch_sampler}
    return BatchDataset(dataset, collate_fn or torch.utils.data.default_collate), {
        "batch_sampler": GroupedBatchSampler(batch_sampler, size, drop_last),
        "collate_fn": Concatenate(),
    }


def order_arguments(
    options: Options,
    dataset: Any,
    sizes: LoadSizes,
    *,
    shuffle: bool,
    order: str | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the torch arguments that determine in which order a DataLoader reads a data set.

    Args:
        options: The options of the model.
        dataset: A map-style data set.
        sizes: The sizes of the DataLoader's batches.
        shuffle: Whether to read the data set in a new random order in each epoch.
        order: The program's argument ``distributed_order``; None if each process reads the whole
            data set.
        given: The program's keyword arguments for torch's DataLoader.
    """
    sampler = given.get("sampler")
    if order is None or (shuffle and sampler is not None):
        # Torch's DataLoader refuses a sampler together with ``shuffle``.
        return {"shuffle": shuffle}
    if options.Distributed.numProcesses > 1:
        return {"sampler": _divided(options, dataset, sizes, shuffle, order, sampler)}
    if order == "contiguous":
        return {"shuffle": shuffle}
    share_sampler(sampler, options)
    if shuffle and (given.get("generator") is None or options.exists("random_seed")):
        # The data set of a single instance may grow between two epochs, as in torch.
        indices = torch.utils.data.SequentialSampler(dataset)
        return {"sampler": GlobalOrderSampler(indices, None, shared_seed(options))}
    return {"shuffle": shuffle}


def _divided(
    options: Options, dataset: Any, sizes: LoadSizes, shuffle: bool, order: str, sampler: Any
) -> GlobalOrderSampler:
    """Return a sampler that yields this process's share of the data set."""
    assert sizes.combined is not None, (
        "batch_size=None is not allowed with auto_distributed_partitioning=True: pass a "
        "batch_size, or pass auto_distributed_partitioning=False"
    )
    share_sampler(sampler, options)
    indices = range(len(dataset)) if sampler is None else sampler
    seed = shared_seed(options) if shuffle else None
    division: Any = {
        "num_processes": options.Distributed.numProcesses,
        "process": options.Distributed.processId,
        "step": sizes.combined,
        "drop_last": sizes.drop_last,
    }
    if order == "contiguous":
        return ShardSampler(indices, shard(len(indices), **division), seed)
    rows = sizes.combined // options.batching(training=False).num_steps
    return GlobalOrderSampler(indices, global_share(len(indices), rows=rows, **division), seed)
