"""The choice of the communicator that connects a model to the job's other instances.

The choice of the communicator depends on the options and on the launcher's environment variables.
The module ``communicator_choice`` does not send tensors.
"""

from __future__ import annotations

from popdist_py import context
from popdist_py.collectives import Communicator
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["communicator_for"]


def communicator_for(options: Options, *, training: bool) -> Communicator:
    """Return a communicator of all instances for training, or of this instance for inference."""
    return _join(options) if training else _Alone(options)


class _Alone(SoloCommunicator):
    """The communicator of an inference model, whose only member is this instance.

    The communicator of an inference model reports this instance's index in the job, because the
    indices of the instance's replicas depend on this index.
    """

    def __init__(self, options: Options) -> None:
        self.instance_index = options.Distributed.processId


def _join(options: Options) -> Communicator:
    """Return the communicator of all instances; call ``init()`` first if necessary."""
    _check_replicas(options)
    if options.Distributed.numProcesses == 1:
        return SoloCommunicator()
    if not context.is_launched():
        logger.warning(
            "Options.Distributed has %d processes, but these processes are not connected: this "
            "process trains alone. Start the processes with poprun-py, so that gradients are "
            "reduced over all processes",
            options.Distributed.numProcesses,
        )
    if not context.is_initialised():
        context.init()
    return context.communicator()


def _check_replicas(options: Options) -> None:
    """Log a warning if the options and the launcher have different numbers of replicas."""
    instance, replicas = context.environment(), options.replication_factor
    takes_part = options.Distributed.numProcesses == instance.num_instances
    if context.is_launched() and takes_part and replicas != instance.num_local_replicas:
        logger.warning(
            "The launcher gave this instance %d local replicas, but Options.replicationFactor is "
            "%d, and replicationFactor is used. To use the number of the launcher, make the "
            "options with poptorch.DistributedOptions() or "
            "popdist.poptorch.Options(ipus_per_replica=...)",
            instance.num_local_replicas,
            replicas,
        )
