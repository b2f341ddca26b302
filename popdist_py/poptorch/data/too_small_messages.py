"""Messages about data sets that are too small for one batch.

The functions in ``too_small_messages`` only return texts. The module ``loader_arguments.py``
computes the sizes of batches.
"""

from __future__ import annotations

from popdist_py.errors import counted
from popdist_py.poptorch.calls.batching import Batching

__all__ = ["empty_share", "too_few_batches", "too_few_elements"]


def too_few_elements(
    elements: int, batch_size: int, batching: Batching, *, num_instances: int
) -> str:
    """Return a message that a data set does not fill one batch on each instance.

    Args:
        elements: The number of elements of the data set, for all instances together.
        batch_size: The number of elements in a micro-batch.
        batching: The batching factors of the model, such as the device iterations.
        num_instances: The number of instances that share the data set.
    """
    combined = batch_size * batching.num_slices
    return _text(
        f"the data set has {counted(elements, 'element')}, but a combined batch needs "
        f"{counted(combined, 'element')}",
        f"batch_size {batch_size} x {_factors(batching)}",
        combined,
        num_instances,
    )


def empty_share(elements: int, *, instance: int, num_instances: int) -> str:
    """Return a message that one instance does not get any element of the data set.

    Args:
        elements: The number of elements of the data set, for all instances together.
        instance: The index of the instance.
        num_instances: The number of instances that share the data set.
    """
    return (
        f"The DataLoader of instance {instance} has no batches: the data set has "
        f"{counted(elements, 'element')} for {num_instances} instances. All instances must make a "
        "training call together, so the job fails if one instance makes no call. Give more data, "
        "or use drop_last=True, so that all instances have the same number of batches"
    )


def too_few_batches(batches: int, batching: Batching) -> str:
    """Return a message that the batches of a batch sampler do not fill one combined batch.

    Args:
        batches: The number of batches of the batch sampler.
        batching: The batching factors of the model, such as the device iterations.
    """
    return _text(
        f"the batch sampler has {counted(batches, 'batch')}, but a call of the model needs "
        f"{counted(batching.num_slices, 'batch')}",
        _factors(batching),
        batching.num_slices,
        num_instances=1,
    )


def _factors(batching: Batching) -> str:
    grouping = f" / inputReplicaGrouping {batching.group_size}" if batching.group_size > 1 else ""
    return (
        f"deviceIterations {batching.device_iterations} x replicationFactor "
        f"{batching.replicas}{grouping} x gradientAccumulation {batching.gradient_accumulation}"
    )


def _text(what: str, factors: str, needed: int, num_instances: int) -> str:
    on_each = (
        f" on each of {num_instances} instances, {needed * num_instances} in total"
        if num_instances > 1
        else ""
    )
    return (
        f"The DataLoader has no batches: {what} ({factors}){on_each}. Make a factor of the batch "
        "size smaller, give more data, or use drop_last=False"
    )
