"""The functions of PopDist's Python API (``popdist.*``), with the same names.

The functions call the module ``context``. This module does not store any state.
"""

from __future__ import annotations

from popdist_py import context
from popdist_py.device_numbers import device_id
from popdist_py.errors import PopdistError


def isPopdistEnvSet() -> bool:
    """Tell whether the program was started by the launcher."""
    return context.is_launched()


def getNumTotalReplicas() -> int:
    """Return the total number of replicas of all instances, or 1 without the launcher."""
    return context.environment().num_total_replicas


def getNumLocalReplicas() -> int:
    """Return the number of replicas of this instance, or 1 without the launcher."""
    return context.environment().num_local_replicas


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs of one replica, or 1 without the launcher."""
    return context.environment().num_ipus_per_replica


def getReplicaIndexOffset() -> int:
    """Return the global index of this instance's first replica, or 0 without the launcher."""
    return context.environment().replica_index_offset


def getNumInstances() -> int:
    """Return the number of instances of the job, or 1 without the launcher.

    Raises:
        WireError: The instances do not have equal numbers of replicas.
    """
    return context.environment().num_instances


def getInstanceIndex() -> int:
    """Return the index of this instance in the job, or 0 without the launcher.

    Raises:
        WireError: The instances do not have equal numbers of replicas.
    """
    return context.environment().instance_index


def getLocalInstanceIndex() -> int:
    """Return the index of this instance on its host, or 0 without the launcher."""
    return context.environment().local_instance_index


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the id of the emulated multi-IPU device that this instance attaches to.

    In a system of N IPUs, the devices of one IPU have the ids 0 to N - 1. The devices of two IPUs
    have the next ids, then the devices of four IPUs, and so on. The ids of devices with s IPUs
    start at 2N - 2N/s. Instance i attaches to the device at index i among the devices with as many
    IPUs as an instance has. If N or s is not a power of two, it is rounded up to the next power of
    two. These rules were derived from the device ids in PopRun's logs. For example, 4 instances
    with 4 IPUs each attach to the devices 24 to 27.

    Args:
        ipusPerReplica: The number of IPUs of one replica. The value 0 selects the number that the
            launcher has set.

    Raises:
        ValueError: ``ipusPerReplica`` is negative.
    """
    if ipusPerReplica < 0:
        raise ValueError(
            f"getDeviceId({ipusPerReplica}): expected the number of IPUs per replica, or 0"
        )
    instance = context.environment()
    width = ipusPerReplica or instance.num_ipus_per_replica
    return device_id(
        instance.num_total_replicas * width,
        instance.num_local_replicas * width,
        instance.instance_index,
    )


def checkNumIpusPerReplica(n: int) -> bool:
    """Tell whether ``n`` is the number of IPUs of one replica."""
    return n == context.environment().num_ipus_per_replica


def registerDefaultBackend() -> None:
    """Choose MPI as the backend. This function does nothing, because MPI is the only backend."""


def registerBackend(path: str) -> None:
    """Raise an error, because a communication library for IPUs cannot connect emulated IPUs.

    Raises:
        PopdistError: Every call raises this error.
    """
    raise PopdistError(
        f"registerBackend({path!r}): MPI is the only backend of the emulation. Remove the call, or "
        "call registerDefaultBackend()"
    )


def initializeBackend() -> None:
    """Join the other instances, as ``init()`` does."""
    context.init()


def finalizeBackend() -> None:
    """Leave the job. After this call, collectives need a new call of ``init()``."""
    context.finalize()


def isBackendInitialized() -> bool:
    """Tell whether the program has called ``init()`` and has not left the job since then."""
    return context.is_initialised()
