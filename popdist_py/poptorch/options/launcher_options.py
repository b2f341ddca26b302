"""DistributedOptions: what PopDist calls ``popdist.poptorch.Options``.

Replicas, process and device come from the launcher; without one, this is a single instance whose
replicas are set by hand.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NoReturn

from popdist_py import context, popdist_functions
from popdist_py.errors import counted
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options.groups import _DistributedOptions
from popdist_py.poptorch.options.options import Options

__all__ = ["DistributedOptions"]


_PROCESSES: Final = (
    "the launcher numbers the instances of a job: start with poprun-py --num-instances N, or use "
    "poptorch.Options to number processes by hand"
)
# What a program asks for instead, by the setter that it cannot call.
_INSTEAD: Final = {
    "replicationFactor": "every instance has R / N replicas: start with poprun-py --num-replicas R "
    "--num-instances N",
    "useIpuId": "the launcher gives every instance IPUs of its own: how many is said with "
    "poprun-py --num-replicas, --num-instances and --ipus-per-replica; poptorch.Options takes an "
    "id",
    "Distributed.disable": _PROCESSES,
    "Distributed.setEnvVarNames": _PROCESSES,
    "Distributed.configureProcessId": _PROCESSES,
}


def _refuse(setter: str, given: object = None, decided: object = None) -> NoReturn:
    values = "" if given is None else f" ({given} was given, {decided} is the launcher's)"
    raise RuntimeError(
        f"Cannot call `{setter}` with popdist.poptorch.Options{values}: {_INSTEAD[setter]}"
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

    def _change(self, name: str, value: Any) -> None:
        is_decided = name in ("distributed_process_id", "num_distributed_processes")
        if is_decided and value != self(name):
            _refuse("Distributed.configureProcessId", value, self(name))
        super()._change(name, value)


class DistributedOptions(Options):
    """Options of one instance of a job; everything not taken from the launcher is as usual.

    What the launcher decides cannot be changed: neither by a setter nor by the name of its value.
    Without a launcher, this is the one instance of a job whose replicas are set by hand.

    Args:
        ipus_per_replica: IPUs of one replica; None takes the launcher's number.

    Raises:
        ValueError: a number of IPUs per replica that is not the launcher's.
    """

    # The values that the launcher decides, and their setters.
    _DECIDED: ClassVar = {"replication_factor": "replicationFactor", "ipu_id": "useIpuId"}

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        instance = context.environment()
        launched = context.is_launched()
        if launched and ipus_per_replica not in (None, instance.num_ipus_per_replica):
            raise ValueError(
                f"ipus_per_replica={ipus_per_replica}: the launcher gave every replica "
                f"{counted(instance.num_ipus_per_replica, 'IPU')}; start with --ipus-per-replica "
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

    def _change(self, name: str, value: Any) -> None:
        # Not yet declared: the constructor takes the launcher's values.
        if self.__dict__.get("_launched") and name in self._DECIDED and value != self(name):
            _refuse(self._DECIDED[name], value, self(name))
        super()._change(name, value)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the local replicas of a program that runs alone.

        Raises:
            RuntimeError: the launcher decided on another number.
        """
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
                f"The model needs {counted(needed, 'IPU')} for each replica, but the launcher gave "
                f"{self._ipus_per_replica}: start with --ipus-per-replica {needed}"
            )

    def toDict(self) -> dict[str, Any]:
        """Return all values, with those of the device, frozen or not."""
        return {**super().toDict(), "ipus_per_replica": self._ipus_per_replica}


Options._for_launcher = DistributedOptions
