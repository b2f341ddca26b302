"""Functions that check a model against its options, before and after the first forward pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from popdist_py.collectives import Communicator
from popdist_py.collectives.signature import Signature
from popdist_py.errors import counted
from popdist_py.poptorch.calls.batching import Batching
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.options_without_effect import say_idle_in_model
from popdist_py.poptorch.tracing.block_places import ForwardPlaces

__all__ = ["check_changed_buffers", "check_norm_groups", "check_placement"]

_MAX_IPUS: Final = 64
# The largest number of buffer names that an error message lists.
_MOST_NAMES: Final = 3


def check_norm_groups(options: Options, batching: Batching, communicator: Communicator) -> None:
    """Check that the replicas can be divided into groups that share batch norm statistics.

    Raises:
        CollectiveMismatchError: The options of different instances contain different group sizes.
        Error: The group size does not divide the number of replicas.
    """
    size, setter = (
        options.Training.norm_group_size,
        "Options.Training.distributedBatchNormReplicaGroupSize",
    )
    if communicator.num_instances > 1:
        communicator.agree(Signature("compile", "training model"))
        communicator.agree(Signature(setter, str(size)))
    replicas = batching.replicas * communicator.num_instances
    if replicas % size:
        raise Error(
            f"{setter}({size}): the {counted(replicas, 'replica')} of all instances cannot be "
            f"divided into groups of {size}. Choose a group size that divides {replicas}"
        )


def check_placement(
    placement: ForwardPlaces, options: Options, batching: Batching, *, training: bool
) -> int:
    """Check that the pipeline has enough micro-batches, and that the number of IPUs is valid.

    Returns:
        The number of IPUs that all replicas of this process need.

    Raises:
        Error: The pipeline has more stages than a call has micro-batches, or the number of IPUs is
            too large or not a power of two.
    """
    if options._execution_strategy.is_pipelined:
        _check_pipeline_depth(placement.num_stages, batching, training=training)
    ipus = placement.num_ipus
    say_idle_in_model(options, placement)
    rounded = 1 << (ipus - 1).bit_length()
    if rounded != ipus:
        if not options.auto_round_num_ipus:
            raise Error(
                f"The model uses {ipus} IPUs, which is not a power of two: place the blocks of the "
                f"model on {rounded} IPUs, or call Options.autoRoundNumIPUs(True) to round up"
            )
        logger.warning("The number of IPUs of the model is rounded up from %d to %d", ipus, rounded)
    options.check_ipus(rounded)
    total = rounded * batching.replicas
    if total > _MAX_IPUS:
        raise Error(
            f"Too many IPUs requested ({total}): one process can use at most {_MAX_IPUS} IPUs. Use "
            "several processes, for example with poprun-py"
        )
    return total


def _check_pipeline_depth(stages: int, batching: Batching, *, training: bool) -> None:
    """Check that a call has at least as many micro-batches as the pipeline has stages.

    Graphcore's PopTorch also requires at least one micro-batch for each pipeline stage.

    Raises:
        Error: The call has fewer micro-batches than the pipeline has stages.
    """
    if stages == 1:
        return
    if training and batching.gradient_accumulation < stages:
        raise Error(
            f"The pipeline of the model has {stages} stages (forward and backward): "
            f"Options.Training.gradientAccumulation is {batching.gradient_accumulation}, and must "
            f"be at least {stages}"
        )
    if not training and batching.device_iterations < stages:
        raise Error(
            f"The pipeline of the model has {stages} stages: Options.deviceIterations is "
            f"{batching.device_iterations}, and must be at least {stages}"
        )


def check_changed_buffers(names: Collection[str], options: Options, batching: Batching) -> None:
    """Check that the options allow each replica a separate copy of the changed buffers.

    Args:
        names: The names of the buffers that the forward pass changes, without the running
            statistics of norm layers.
        options: The options of the model.
        batching: The numbers that determine how a call's samples are divided into micro-batches.

    Raises:
        Error: The options require equal buffers on all replicas, but the forward pass changes a
            buffer.
    """
    if names and options.broadcast_buffers:
        raise Error(
            "Buffer broadcasting is unsupported for buffers that the model changes "
            f"({_some(sorted(names))}) with a replication factor of {batching.replicas}: use "
            "Options.broadcastBuffers(False), which gives each replica its own buffers"
        )


def _some(names: list[str]) -> str:
    """Return a text with the first ``_MOST_NAMES`` names and the number of the other names."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
