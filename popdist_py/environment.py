"""The variables by which the launcher tells an instance its place: text <-> InstanceEnvironment.

``poprun_py`` writes these variables and ``popdist_py`` reads them. The module needs the standard
library alone. It never reads ``os.environ`` by itself, so that tests can pass both sides as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.errors import WireError

__all__ = [
    "BETWEEN_CALLS",
    "COLLECTIVES",
    "COMPILING",
    "INFERENCE",
    "INSTANCE_VARIABLES",
    "RESUME_EXIT_CODE",
    "TRAINING",
    "CollectiveSettings",
    "InstanceEnvironment",
    "is_popdist_environment",
    "job_secret",
]

NUM_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
NUM_IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
NUM_LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
UNIFORM_REPLICAS = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
NODE_DEVICE_ID = "POPDIST_NODE_DEVICE_ID"
EXECUTABLE_CACHE_PATH = "POPDIST_EXECUTABLE_CACHE_PATH"
REPLICA_INDEX_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"

# Beyond PopRun: the number of instances on the host, for LOCAL_WORLD_SIZE and the collectives in
# shared memory.
NUM_LOCAL_INSTANCES = "POPDIST_NUM_LOCAL_INSTANCES"

# Beyond PopRun: the name of the run, the same in every instance and after a restart.
RUN_ID = "POPRUN_RUN_ID"

# Beyond PopRun: where an instance records its timeline, and the bytes of its files together
# ("BYTES:PREFIX").
TIMELINE = "POPDIST_TIMELINE"
# The bytes of all files of a job's timeline, in MiB, where the user does not say.
TIMELINE_MIB = 64

# Beyond PopRun: what the paths begin with of files that a program leaves in the folder of its run;
# "PID:PREFIX" once a process has them for itself. The most MiB of one of them.
RUN_FILES = "POPDIST_RUN_FILES"
RUN_FILE_MIB = 64

# Beyond PopRun: the file with the call of a function that the instance is to make, and what the
# paths begin with of the files that it leaves its result in.
CALL = "POPDIST_CALL"
CALL_FILES = "POPDIST_CALL_FILES"

# Beyond PopRun, from the supervisor: the memory shared with the instance's wrapper; a signal number
# and the file to which the signal writes the stacks of all threads ("NUMBER:PATH"), and to which
# the signal before that one makes Python write a NUL as soon as it runs; and the number of restarts
# of the job.
HEARTBEAT = "POPDIST_HEARTBEAT"
STACKS = "POPDIST_STACKS"
RESTART_COUNT = "POPDIST_RESTART_COUNT"

# Beyond PopRun, from the wrapper: the job's folder on this host, for files that must not outlive
# the job. Read by start_hook/sitecustomize.py.
JOB_FOLDER = "POPDIST_JOB_FOLDER"

# Beyond PopRun: the wrapper's pipe by which a program asks for a terminal for its debugger; set
# where the launcher has a keyboard.
DEBUGGER = "POPDIST_DEBUGGER"

# Beyond PopRun, from the wrapper: what only the instances of a job of several hosts know, by which
# their connections know one another.
SECRET = "POPDIST_SECRET"

# Beyond PopRun: the network that all hosts are on, by interface or CIDR.
NETWORK = "POPDIST_NETWORK"

# Beyond PopRun: where MPI may listen in an instance of a job of one host, as an interface. Read by
# start_hook/sitecustomize.py, as NETWORK is with several hosts.
MPI_NETWORK = "POPDIST_MPI_NETWORK"
LOOPBACK = "lo"

# Beyond PopRun: whether a Python finds the SDK's packages (poptorch, popdist, ...) here: "auto"
# where they are not installed, "yes" even there, else never. Read by start_hook/sitecustomize.py.
SDK_NAMES = "POPDIST_SDK_NAMES"

# Beyond PopRun: "1" if poprun or python -m popdist_py started the program. If the program imports
# poptorch, its models then have the memory of an IPU, as on hardware.
SDK_COMMAND = "POPDIST_SDK_COMMAND"

# Beyond PopRun: the back end that a program of torch.distributed gets for CPU tensors: "auto" the
# one that it names, else this one where it names gloo, popdist or nothing.
TORCH_BACKEND = "POPDIST_TORCH_BACKEND"
TORCH_BACKENDS = ("auto", "gloo", "popdist")

# Beyond PopRun: the IPU whose memory and time models have, by name (the launcher's --ipu-model),
# and what happens to a model that is too large for it.
IPU_MODEL = "POPDIST_IPU"
IPU_MEMORY = "POPDIST_IPU_MEMORY"

# The launcher's option --pod: where the pod is that the job's IPUs are of; "none" for no pod.
POD = "POPRUN_POD"

# What describes one instance of a job, or the job itself: another job must not inherit it. A path
# to a cache may be a user's own setting.
INSTANCE_VARIABLES = frozenset(
    {
        NUM_TOTAL_REPLICAS,
        NUM_IPUS_PER_REPLICA,
        NUM_LOCAL_REPLICAS,
        UNIFORM_REPLICAS,
        NODE_DEVICE_ID,
        REPLICA_INDEX_OFFSET,
        LOCAL_INSTANCE_INDEX,
        NUM_LOCAL_INSTANCES,
        HEARTBEAT,
        JOB_FOLDER,
        STACKS,
        RESTART_COUNT,
        MPI_NETWORK,
        NETWORK,
        SECRET,
        DEBUGGER,
        SDK_COMMAND,
        SDK_NAMES,
        TORCH_BACKEND,
        TIMELINE,
        RUN_FILES,
        CALL,
        CALL_FILES,
    }
)

# Set by a user, for the collectives.
HANG_TIMEOUT = "POPDIST_HANG_TIMEOUT"
SHARED_MEMORY = "POPDIST_SHARED_MEMORY"
GRADIENT_OVERLAP = "POPDIST_GRADIENT_OVERLAP"
SHARED_WEIGHTS = "POPDIST_SHARED_WEIGHTS"

# sysexits.h EX_TEMPFAIL: a program that was asked to stop and has saved a checkpoint ends with it;
# the launcher takes it for "run me again".
RESUME_EXIT_CODE = 75

# What an instance does now, as the heartbeat tells the launcher.
BETWEEN_CALLS, TRAINING, INFERENCE, COMPILING = range(4)
# The calls that all instances make, as the memory shared with the wrapper numbers them; 0 is none.
COLLECTIVES = (
    *("", "all_reduce", "broadcast", "broadcast_object", "all_gather", "all_gather_object"),
    *("gather", "gather_object", "reduce_scatter", "barrier", "reduce", "scatter", "all_to_all"),
)


def is_popdist_environment(environ: Mapping[str, str]) -> bool:
    """Tell whether the launcher made ``environ`` (PopDist too tests for the replica total)."""
    return NUM_TOTAL_REPLICAS in environ


def job_secret(environ: Mapping[str, str]) -> bytes:
    """Return what only the instances of this job know; nothing on one host, or without launcher."""
    return environ.get(SECRET, "").encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceEnvironment:
    """One instance's view of the job: R replicas, I instances, L = R/I replicas in this one.

    The defaults describe a program that runs without the launcher: one instance, one replica.
    """

    num_total_replicas: int = 1
    num_local_replicas: int = 1
    num_ipus_per_replica: int = 1
    replica_index_offset: int = 0
    local_instance_index: int = 0
    num_local_instances: int = 1
    uniform_replicas: bool = True
    node_device_id: int | None = None
    executable_cache_path: str | None = None

    @property
    def num_instances(self) -> int:
        """Number of instances I = R / L.

        Raises:
            WireError: the replicas are not spread uniformly, so that I is not known.
        """
        self._require_uniform()
        return self.num_total_replicas // self.num_local_replicas

    @property
    def instance_index(self) -> int:
        """Index of this instance in [0, I): its replica offset divided by L.

        Raises:
            WireError: the replicas are not spread uniformly, so that the index is not known.
        """
        self._require_uniform()
        return self.replica_index_offset // self.num_local_replicas

    def _require_uniform(self) -> None:
        if not self.uniform_replicas:
            raise WireError(
                f"{UNIFORM_REPLICAS} is not set: the instance index and count are only known "
                "when every instance has the same number of replicas"
            )

    def to_environ(self) -> dict[str, str]:
        """Return the variables of this instance, in the order in which PopRun sets them."""
        variables = {
            NUM_TOTAL_REPLICAS: str(self.num_total_replicas),
            NUM_IPUS_PER_REPLICA: str(self.num_ipus_per_replica),
            NUM_LOCAL_REPLICAS: str(self.num_local_replicas),
        }
        if self.uniform_replicas:
            variables[UNIFORM_REPLICAS] = "1"
        if self.node_device_id is not None:
            variables[NODE_DEVICE_ID] = str(self.node_device_id)
        if self.executable_cache_path is not None:
            variables[EXECUTABLE_CACHE_PATH] = self.executable_cache_path
        variables[REPLICA_INDEX_OFFSET] = str(self.replica_index_offset)
        variables[LOCAL_INSTANCE_INDEX] = str(self.local_instance_index)
        variables[NUM_LOCAL_INSTANCES] = str(self.num_local_instances)
        return variables

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> InstanceEnvironment:
        """Read the instance from ``environ``; without the launcher's variables, the defaults.

        Raises:
            WireError: a variable is missing, is no integer, or the numbers contradict.
        """
        if not is_popdist_environment(environ):
            return cls()
        total = _integer(environ, NUM_TOTAL_REPLICAS, minimum=1)
        local = _integer(environ, NUM_LOCAL_REPLICAS, minimum=1)
        offset = _integer(environ, REPLICA_INDEX_OFFSET, minimum=0)
        uniform = environ.get(UNIFORM_REPLICAS) == "1"
        if offset + local > total or (uniform and (total % local or offset % local)):
            raise WireError(
                f"{NUM_TOTAL_REPLICAS}={total}, {NUM_LOCAL_REPLICAS}={local} and "
                f"{REPLICA_INDEX_OFFSET}={offset} contradict one another: the local replicas must "
                "divide the total and the offset must be a multiple of them"
            )
        return cls(
            num_total_replicas=total,
            num_local_replicas=local,
            num_ipus_per_replica=_integer(environ, NUM_IPUS_PER_REPLICA, minimum=1, default=1),
            replica_index_offset=offset,
            local_instance_index=_integer(environ, LOCAL_INSTANCE_INDEX, minimum=0, default=0),
            num_local_instances=_integer(environ, NUM_LOCAL_INSTANCES, minimum=1, default=1),
            uniform_replicas=uniform,
            node_device_id=(
                _integer(environ, NODE_DEVICE_ID, minimum=0) if NODE_DEVICE_ID in environ else None
            ),
            executable_cache_path=environ.get(EXECUTABLE_CACHE_PATH),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSettings:
    """How the instances of a job communicate.

    Attributes:
        hang_timeout: seconds after which a wait for another instance is an error; inf: never.
        shared_memory: whether instances of a host may exchange data through shared memory.
        gradient_overlap: whether gradients are reduced while backward runs; None: the faster
            one, by measurement.
        shared_weights: whether instances of a host may share one copy of the weights.
        network: interface or CIDR of the network between the hosts; None if it is not known.
    """

    hang_timeout: float = 300.0
    shared_memory: bool = True
    gradient_overlap: bool | None = None
    shared_weights: bool = True
    network: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CollectiveSettings:
        """Read the settings from ``environ``.

        Raises:
            WireError: a value is not accepted.
        """
        text = environ.get(HANG_TIMEOUT, "300")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise WireError(f"{HANG_TIMEOUT}={text!r}: a number of seconds is expected; 0 = never")
        return cls(
            hang_timeout=seconds or float("inf"),
            shared_memory=bool(_switch(environ, SHARED_MEMORY, default=True)),
            gradient_overlap=_switch(environ, GRADIENT_OVERLAP, default=None),
            shared_weights=bool(_switch(environ, SHARED_WEIGHTS, default=True)),
            network=environ.get(NETWORK) or None,
        )


def _switch(environ: Mapping[str, str], name: str, *, default: bool | None) -> bool | None:
    """Read a variable that is 0 or 1, or ``default`` when it is absent or empty."""
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise WireError(f"{name}={text!r}: 0 or 1 is expected")
    return default if text == "" else text == "1"


def _integer(
    environ: Mapping[str, str], name: str, *, minimum: int, default: int | None = None
) -> int:
    """Read one whole number, or ``default`` when the variable is absent."""
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise WireError(
            f"{name} is not set although {NUM_TOTAL_REPLICAS} is: start the program with "
            "poprun-py, or unset the POPDIST_* variables to run it alone"
        )
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise WireError(f"{name}={text!r}: a whole number of at least {minimum} is expected")
    return value
