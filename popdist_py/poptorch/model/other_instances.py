"""The connection of a training model to the other instances of the job.

This module reads the options and the launcher's environment variables. It does not send tensors.
"""

from __future__ import annotations

from popdist_py import context
from popdist_py.collectives import Communicator
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["communicator_for"]


def communicator_for(options: Options, *, training: bool) -> Communicator:
    """Return the communicator of a model, which connects the instances if the model trains."""
    return _join(options) if training else _Alone(options)


class _Alone(SoloCommunicator):
    """The communicator of an inference model, which contains only this instance.

    The instance keeps its index in the job, because the indices of its replicas depend on it.
    """

    def __init__(self, options: Options) -> None:
        self.instance_index = options.Distributed.processId


def _join(options: Options) -> Communicator:
    """Return the communicator of all instances, and call ``init()`` if the program did not."""
    _check_replicas(options)
    if options.Distributed.numProcesses == 1:
        return SoloCommunicator()
    if not context.is_launched():
        logger.warning(
            "Options.Distributed has %d processes, but nothing connects them: this one trains on "
            "its own. Start them with poprun-py, so that gradients are reduced over all",
            options.Distributed.numProcesses,
        )
    if not context.is_initialised():
        context.init()
    return context.communicator()


def _check_replicas(options: Options) -> None:
    """Warn if a training model runs a different number of replicas than the launcher planned."""
    instance, replicas = context.environment(), options.replication_factor
    takes_part = options.Distributed.numProcesses == instance.num_instances
    if context.is_launched() and takes_part and replicas != instance.num_local_replicas:
        logger.warning(
            "The launcher gave this instance %d local replicas, but Options.replicationFactor is "
            "%d, which counts: poptorch.DistributedOptions() takes the launcher's number, as "
            "popdist.poptorch.Options(ipus_per_replica=...) does",
            instance.num_local_replicas,
            replicas,
        )
