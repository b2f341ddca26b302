"""The class ``DistributedOptions``, which PopDist's users import as ``popdist.poptorch.Options``.

The launcher sets the number of replicas, the index of the process and the device. If a program runs
without the launcher, the program itself sets the number of replicas.
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
    "the launcher numbers the instances of a job. Start the job with poprun-py --num-instances "
    "N, or use poptorch.Options to number the processes yourself"
)
# For each setter of ``Options`` that raises an error under the launcher, the advice to the user in
# the error's message.
_INSTEAD: Final = {
    "replicationFactor": "the launcher sets the number of replicas. Start the job with poprun-py "
    "--num-replicas R --num-instances N, which gives every instance R / N replicas",
    "useIpuId": "the launcher chooses the IPUs of every instance. Set the number of IPUs with "
    "poprun-py --num-replicas, --num-instances and --ipus-per-replica, or use poptorch.Options "
    "to choose an IPU by its id",
    "Distributed.disable": _PROCESSES,
    "Distributed.setEnvVarNames": _PROCESSES,
    "Distributed.configureProcessId": _PROCESSES,
}


def _refuse(setter: str, given: object = None, decided: object = None) -> NoReturn:
    values = (
        "" if given is None else f" (the program gives {given}, but the launcher has set {decided})"
    )
    raise RuntimeError(
        f"Cannot call `{setter}` with popdist.poptorch.Options{values}: {_INSTEAD[setter]}"
    )


class _LauncherDistributedOptions(_DistributedOptions):
    """The index of this process and the process count, which the launcher fixes."""

    def disable(self) -> _DistributedOptions:
        """Raise RuntimeError, because the launcher numbers the processes."""
        _refuse("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Raise RuntimeError, because the launcher numbers the processes."""
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Raise RuntimeError, because the launcher numbers the processes."""
        _refuse("Distributed.configureProcessId")

    def _change(self, name: str, value: Any) -> None:
        is_decided = name in ("distributed_process_id", "num_distributed_processes")
        if is_decided and value != self(name):
            _refuse("Distributed.configureProcessId", value, self(name))
        super()._change(name, value)


class DistributedOptions(Options):
    """The options of one instance (process) of a job, with values that the launcher sets.

    A program cannot change a value that the launcher has set, neither with a setter nor by
    assignment. All other options work as in the class ``poptorch.Options``. If a program runs
    without the launcher, the program itself sets the number of replicas.

    Args:
        ipus_per_replica: The number of IPUs of one replica; by default the number that the launcher
            sets.

    Raises:
        ValueError: ``ipus_per_replica`` differs from the number of IPUs that the launcher gave each
            replica.
    """

    # The names of the options whose values the launcher sets, and the names of their setters.
    _DECIDED: ClassVar = {"replication_factor": "replicationFactor", "ipu_id": "useIpuId"}

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        instance = context.environment()
        launched = context.is_launched()
        if launched and ipus_per_replica not in (None, instance.num_ipus_per_replica):
            raise ValueError(
                f"Options(ipus_per_replica={ipus_per_replica}) does not match the launcher, which "
                f"gave every replica {counted(instance.num_ipus_per_replica, 'IPU')}: start the "
                f"job with poprun-py --ipus-per-replica {ipus_per_replica}"
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
        # While the constructor copies the launcher's option values into the object, the attribute
        # ``_launched`` does not exist. As long as ``_launched`` does not exist, the constructor may
        # change all options.
        if self.__dict__.get("_launched") and name in self._DECIDED and value != self(name):
            _refuse(self._DECIDED[name], value, self(name))
        super()._change(name, value)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas of this instance, in a program that runs without the launcher.

        Raises:
            RuntimeError: The launcher gave this instance a different number of replicas.
        """
        return super().replicationFactor(replication_factor)

    def useIpuId(self, ipu_id: int) -> Options:
        """Raise RuntimeError, because the launcher chooses the IPUs of each instance."""
        _refuse("useIpuId")

    @property
    def shares_devices(self) -> bool:
        """True, because the launcher gives each instance (process of the job) its own devices."""
        return True

    def check_ipus(self, needed: int) -> None:
        """Check that the launcher gave each replica enough IPUs for a model.

        Args:
            needed: The number of IPUs that one replica of the model needs.

        Raises:
            Error: The launcher gave each replica fewer IPUs than the model needs.
        """
        if self._launched and needed > self._ipus_per_replica:
            raise Error(
                f"The model needs {counted(needed, 'IPU')} for each replica, but the launcher "
                f"gave each replica only {counted(self._ipus_per_replica, 'IPU')}: start the job "
                f"with poprun-py --ipus-per-replica {needed}"
            )

    def toDict(self) -> dict[str, Any]:
        """Return the values of all option groups and ``ipus_per_replica`` as a flat dictionary."""
        return {**super().toDict(), "ipus_per_replica": self._ipus_per_replica}


Options._for_launcher = DistributedOptions
