"""PopDist's own functions, as PopDist spells them: each returns a value of the context.

Source: the PopDist Python API (``popdist.*``). No state lives here.
"""

from __future__ import annotations

from popdist_py import context
from popdist_py.device_numbers import device_id
from popdist_py.errors import PopdistError

__all__ = [
    "checkNumIpusPerReplica",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "initializeBackend",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "registerBackend",
    "registerDefaultBackend",
]


def isPopdistEnvSet() -> bool:
    """Tell whether the program was started by the launcher."""
    return context.is_launched()


def getNumTotalReplicas() -> int:
    """Return the number of replicas R over all instances; 1 without the launcher."""
    return context.environment().num_total_replicas


def getNumLocalReplicas() -> int:
    """Return the number of replicas L = R / I of this instance; 1 without the launcher."""
    return context.environment().num_local_replicas


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs of one replica; 1 without the launcher."""
    return context.environment().num_ipus_per_replica


def getReplicaIndexOffset() -> int:
    """Return the global index of this instance's first replica; 0 without the launcher."""
    return context.environment().replica_index_offset


def getNumInstances() -> int:
    """Return the number of instances I; 1 without the launcher.

    Raises:
        WireError: the replicas are not spread uniformly over the instances.
    """
    return context.environment().num_instances


def getInstanceIndex() -> int:
    """Return the index of this instance in [0, I); 0 without the launcher.

    Raises:
        WireError: the replicas are not spread uniformly over the instances.
    """
    return context.environment().instance_index


def getLocalInstanceIndex() -> int:
    """Return the index of this instance among those of its host; 0 without the launcher."""
    return context.environment().local_instance_index


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the id of the emulated multi-IPU device that this instance attaches to.

    A system of N IPUs numbers its single IPUs first, then its pairs, its fours, and so on: devices
    of s IPUs start at 2N - 2N/s, and instance i takes the i-th. Counts are rounded up to powers of
    two. Source: ids in PopRun's logs (16 IPUs, 4 for each of 4 instances: 24 to 27).

    Args:
        ipusPerReplica: IPUs of one replica; 0 takes the launcher's number.

    Raises:
        ValueError: ``ipusPerReplica`` is negative.
    """
    if ipusPerReplica < 0:
        raise ValueError(f"getDeviceId({ipusPerReplica}): expected 0, or the IPUs of one replica")
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
    """Choose MPI as the backend; it is the only one, so there is nothing to do."""


def registerBackend(path: str) -> None:
    """Refuse another backend: a shared object for IPUs cannot connect emulated ones.

    Raises:
        PopdistError: always.
    """
    raise PopdistError(
        f"registerBackend({path!r}): the emulation has one backend, MPI; leave the call out, or "
        "use registerDefaultBackend()"
    )


def initializeBackend() -> None:
    """Join the other instances: ``init()``."""
    context.init()


def finalizeBackend() -> None:
    """Leave the job; afterwards collectives need a new ``init()``."""
    context.finalize()


def isBackendInitialized() -> bool:
    """Tell whether ``init()`` was called and the job was not left since."""
    return context.is_initialised()
