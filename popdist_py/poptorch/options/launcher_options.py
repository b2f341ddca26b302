"""DistributedOptions: what PopDist calls ``popdist.poptorch.Options``.

Replicas, process and device come from the launcher; without one, this is a single instance whose
replicas are set by hand.
"""

from __future__ import annotations

from typing import Any, NoReturn

from popdist_py import context, popdist_functions
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options.groups import _DistributedOptions
from popdist_py.poptorch.options.options import Options

__all__ = ["DistributedOptions"]


def _refuse(setter: str) -> NoReturn:
    raise RuntimeError(
        f"Cannot call `{setter}` with popdist.poptorch.Options: the launcher decides; use its "
        "options, such as --num-replicas and --num-instances"
    )


class _LauncherDistributedOptions(_DistributedOptions):
    """Process index and count of the instance; the program cannot change them."""

    def disable(self) -> _DistributedOptions:
        """Raise RuntimeError: the launcher decides."""
        _refuse("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Raise RuntimeError: the launcher decides."""
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Raise RuntimeError: the launcher decides."""
        _refuse("Distributed.configureProcessId")


class DistributedOptions(Options):
    """Options of one instance of a job; everything not taken from the launcher is as usual.

    Args:
        ipus_per_replica: IPUs of one replica; None takes the launcher's number.

    Raises:
        ValueError: a number of IPUs per replica that is not the launcher's.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        instance = context.environment()
        launched = context.is_launched()
        if launched and ipus_per_replica not in (None, instance.num_ipus_per_replica):
            raise ValueError(
                f"ipus_per_replica={ipus_per_replica}: the launcher gave every replica "
                f"{instance.num_ipus_per_replica} IPUs; start with --ipus-per-replica "
                f"{ipus_per_replica}"
            )
        super().__init__()
        self.set(replication_factor=instance.num_local_replicas)
        if launched:
            self.createOrSet(ipu_id=popdist_functions.getDeviceId())
            if instance.executable_cache_path is not None:
                self.enableExecutableCaching(instance.executable_cache_path)
        self._declare(
            _launched=launched,
            _ipus_per_replica=ipus_per_replica or instance.num_ipus_per_replica,
        )

    def _make_distributed(self) -> _DistributedOptions:
        instance = context.environment()
        return _LauncherDistributedOptions(instance.instance_index, instance.num_instances)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the local replicas of a program that runs alone.

        Raises:
            RuntimeError: the program was started by the launcher.
        """
        if self._launched:
            _refuse("replicationFactor")
        return super().replicationFactor(replication_factor)

    def useIpuId(self, ipu_id: int) -> Options:
        """Raise RuntimeError: the launcher decides."""
        _refuse("useIpuId")

    @property
    def shares_devices(self) -> bool:
        """True: the launcher hands the devices out, so no instance waits for another's."""
        return True

    def check_ipus(self, needed: int) -> None:
        """Check that a model's replica needs no more IPUs than the launcher gave it.

        Raises:
            Error: it does.
        """
        if self._launched and needed > self._ipus_per_replica:
            raise Error(
                f"The model needs {needed} IPUs for each replica, but the launcher gave "
                f"{self._ipus_per_replica}: start with --ipus-per-replica {needed}"
            )

    def toDict(self) -> dict[str, Any]:
        """Return all values, with those of the device, frozen or not."""
        return {**super().toDict(), "ipus_per_replica": self._ipus_per_replica}


Options._for_launcher = DistributedOptions
