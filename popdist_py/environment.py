"""Environment variables that describe an instance, and their conversion to and from objects.

``poprun_py`` writes these variables and ``popdist_py`` reads them. This module imports only the
standard library. The functions of this module take the environment as an argument and never read
``os.environ``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.errors import WireError

NUM_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
NUM_IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
NUM_LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
UNIFORM_REPLICAS = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
NODE_DEVICE_ID = "POPDIST_NODE_DEVICE_ID"
EXECUTABLE_CACHE_PATH = "POPDIST_EXECUTABLE_CACHE_PATH"
REPLICA_INDEX_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"

# Graphcore's PopRun and poprun-py both set the variables that are defined above this line. Only
# poprun-py sets the variables that are defined below this line.

# The number of instances on the host, for LOCAL_WORLD_SIZE and the collectives in shared memory.
NUM_LOCAL_INSTANCES = "POPDIST_NUM_LOCAL_INSTANCES"

# The name of the run, which is the same in every instance and after a restart.
RUN_ID = "POPRUN_RUN_ID"

# Settings of an instance's timeline files, as "BYTES:PREFIX". BYTES is the largest total size of
# the files, and PREFIX is the common beginning of their paths.
TIMELINE = "POPDIST_TIMELINE"
# The default limit for the total size of a job's timeline files, in MiB.
TIMELINE_MIB = 64

# The path prefix of the files that an instance writes into the folder of its run. Only one process
# of the instance writes these files. This process changes the value to "PID:PREFIX" with its
# process id. Each of these files has at most RUN_FILE_MIB MiB.
RUN_FILES = "POPDIST_RUN_FILES"
RUN_FILE_MIB = 64

# CALL is the path of a file with a pickled function and its arguments. The instance calls this
# function. CALL_FILES is the path prefix of the files for the result of the call.
CALL = "POPDIST_CALL"
CALL_FILES = "POPDIST_CALL_FILES"

# The path of the file that the instance and its wrapper map as shared memory.
HEARTBEAT = "POPDIST_HEARTBEAT"

# "no" turns off counting the steps of torch's optimizers. The start hook of an instance reads it.
COUNT_STEPS = "POPDIST_COUNT_STEPS"

# The number of a signal and the path of a file, as "NUMBER:PATH". When the process receives signal
# NUMBER, it writes the stacks of all its threads to the file PATH. After signal NUMBER - 1, the
# process writes a NUL byte to this file as soon as its main thread runs Python code.
STACKS = "POPDIST_STACKS"

# The number of times that the launcher has restarted the job.
RESTART_COUNT = "POPDIST_RESTART_COUNT"

# The job's folder on this host, for files that must not outlive the job. The wrapper sets
# JOB_FOLDER, and start_hook/sitecustomize.py reads it.
JOB_FOLDER = "POPDIST_JOB_FOLDER"

# The folder in memory (tmpfs) on this host for the newest states of the training. The folder
# outlives the programs of the job, so that a restarted program continues from these states. The
# wrapper sets CHECKPOINT_MEMORY, and the first program that saves a state creates the folder.
CHECKPOINT_MEMORY = "POPDIST_CHECKPOINT_MEMORY"

# "1" if the launcher's option --memory-checkpoints is set. TrainingCheckpoints then saves each step
# to the folder in memory, unless the program chooses another interval.
MEMORY_CHECKPOINTS = "POPDIST_MEMORY_CHECKPOINTS"

# The TCP port at which instance 0 accepts the other instances in a job that has several hosts and
# does not start MPI. The address is torchrun's MASTER_ADDR.
MEETING_PORT = "POPDIST_MEETING_PORT"

# The path of the pipe through which a program asks its wrapper for a terminal for the debugger.
# DEBUGGER is set only if the launcher has a keyboard.
DEBUGGER = "POPDIST_DEBUGGER"

# A secret that authenticates the connections between the instances of a job with several hosts. The
# wrapper sets SECRET.
SECRET = "POPDIST_SECRET"

# The interface or CIDR of the network that connects all hosts.
NETWORK = "POPDIST_NETWORK"

# The network interface for MPI's sockets in a job with one host. In a job with several hosts,
# start_hook/sitecustomize.py reads NETWORK instead of MPI_NETWORK.
MPI_NETWORK = "POPDIST_MPI_NETWORK"
LOOPBACK = "lo"

# Whether programs can import the emulation's packages under the SDK's names (poptorch, popdist,
# ...). With "auto", an installed package of the same name takes precedence over the emulation. With
# "yes", the emulation replaces installed packages too. With any other value, the SDK's names do not
# find the emulation. start_hook/sitecustomize.py reads SDK_NAMES.
SDK_NAMES = "POPDIST_SDK_NAMES"

# SDK_COMMAND is "1" if poprun or python -m popdist_py started the program. If such a program
# imports poptorch, its models are limited to the memory of an IPU, as on hardware.
SDK_COMMAND = "POPDIST_SDK_COMMAND"

# The torch.distributed back end for CPU tensors. The value "auto" keeps the back end that the
# program names. The values "gloo" and "popdist" select this back end for programs that name gloo,
# popdist or no back end.
TORCH_BACKEND = "POPDIST_TORCH_BACKEND"
TORCH_BACKENDS = ("auto", "gloo", "popdist")

# IPU_MODEL is the name of an IPU, from the launcher's option --ipu-model. The emulated memory and
# the estimated run times of the user's models are computed for this IPU. IPU_MEMORY selects the
# reaction to a model that is too large for this IPU, such as "warn".
IPU_MODEL = "POPDIST_IPU"
IPU_MEMORY = "POPDIST_IPU_MEMORY"

# The location of the pod with the job's IPUs (the launcher's --pod), or "none" for no pod.
POD = "POPRUN_POD"

# The variables that describe one instance or one job. Another job must not inherit these variables.
# EXECUTABLE_CACHE_PATH is missing here, because a user may set it for several jobs.
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
        CHECKPOINT_MEMORY,
        MEMORY_CHECKPOINTS,
        STACKS,
        RESTART_COUNT,
        MPI_NETWORK,
        NETWORK,
        SECRET,
        MEETING_PORT,
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

# The variables with which a user configures the collectives.
HANG_TIMEOUT = "POPDIST_HANG_TIMEOUT"
SHARED_MEMORY = "POPDIST_SHARED_MEMORY"
GRADIENT_OVERLAP = "POPDIST_GRADIENT_OVERLAP"
SHARED_WEIGHTS = "POPDIST_SHARED_WEIGHTS"
DETERMINISTIC = "POPDIST_DETERMINISTIC"

# A program that was asked to stop ends with this exit code after it has saved a checkpoint. After
# this exit code, the launcher runs the program again. The value 75 is EX_TEMPFAIL of sysexits.h.
RESUME_EXIT_CODE = 75

# The possible activities of an instance, as numbers in the heartbeat's shared memory. AUTOMATIC
# means that the library counts the program's steps without calls, so the activity is not known.
BETWEEN_CALLS, TRAINING, INFERENCE, COMPILING, AUTOMATIC = range(5)
# The names of the collectives. In memory shared with its wrapper, an instance stores its current
# collective as an index of COLLECTIVES. The index 0 means that no collective is running.
COLLECTIVES = (
    *("", "all_reduce", "broadcast", "broadcast_object", "all_gather", "all_gather_object"),
    *("gather", "gather_object", "reduce_scatter", "barrier", "reduce", "scatter", "all_to_all"),
)


def is_popdist_environment(environ: Mapping[str, str]) -> bool:
    """Tell whether the launcher's variables are set. Like PopDist, check only one of them."""
    return NUM_TOTAL_REPLICAS in environ


def counts_optimizers(environ: Mapping[str, str]) -> bool:
    """Tell whether the steps of torch's optimizers are counted, as the start hook decides."""
    return environ.get(COUNT_STEPS, "").strip().lower() not in ("no", "0", "false", "off")


def job_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that only the instances of this job know.

    Returns:
        The secret. It is empty if the job has only one host, or if the program runs without the
        launcher.
    """
    return environ.get(SECRET, "").encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceEnvironment:
    """One instance's view of a job with R replicas, I instances and L = R/I replicas per instance.

    The default values describe a program without the launcher, with one instance and one replica.
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
        """The number of instances of the job, I = R / L.

        Raises:
            WireError: The instances do not have equal numbers of replicas, so the number of
                instances is unknown.
        """
        self._require_uniform()
        return self.num_total_replicas // self.num_local_replicas

    @property
    def instance_index(self) -> int:
        """The index of this instance: its replica offset, divided by the replicas per instance.

        Raises:
            WireError: The instances do not have equal numbers of replicas, so the index is unknown.
        """
        self._require_uniform()
        return self.replica_index_offset // self.num_local_replicas

    def _require_uniform(self) -> None:
        if not self.uniform_replicas:
            raise WireError(
                "the index of this instance and the number of instances are unknown, because the "
                f"instances have different numbers of replicas ({UNIFORM_REPLICAS} is not 1)"
            )

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables that describe this instance, in PopRun's order."""
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
        """Return the instance that ``environ`` describes.

        Without the launcher's variables, the result has the default values.

        Raises:
            WireError: A variable is missing, is not an integer, or contradicts other variables.
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
                f"{REPLICA_INDEX_OFFSET}={offset} contradict one another. "
                f"{NUM_LOCAL_REPLICAS} + {REPLICA_INDEX_OFFSET} must be at most "
                f"{NUM_TOTAL_REPLICAS}. If {UNIFORM_REPLICAS} is 1, {NUM_LOCAL_REPLICAS} must also "
                "divide the other two values"
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
    """Settings of the communication between the instances of a job.

    Attributes:
        hang_timeout: The longest wait for another instance, in seconds. A longer wait raises an
            error. The value inf means that waits are not limited.
        shared_memory: Whether the instances of a host may exchange data through shared memory.
        gradient_overlap: Whether gradients are reduced during the backward pass instead of after
            it. With None, both ways are measured, and the faster one is used.
        shared_weights: Whether the instances of a host may share one copy of the weights.
        network: The interface or CIDR of the network between the hosts, or None if unknown.
        deterministic: Whether the bits of reduced floats must not depend on the hosts.
    """

    hang_timeout: float = 300.0
    shared_memory: bool = True
    gradient_overlap: bool | None = None
    shared_weights: bool = True
    network: str | None = None
    deterministic: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> CollectiveSettings:
        """Return the communication settings from the variables in ``environ``.

        Raises:
            WireError: A value is not valid.
        """
        text = environ.get(HANG_TIMEOUT, "300")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise WireError(
                f"{HANG_TIMEOUT}={text!r}: expected a number of seconds; 0 means no limit"
            )
        return cls(
            hang_timeout=seconds or float("inf"),
            shared_memory=bool(_switch(environ, SHARED_MEMORY, default=True)),
            gradient_overlap=_switch(environ, GRADIENT_OVERLAP, default=None),
            shared_weights=bool(_switch(environ, SHARED_WEIGHTS, default=True)),
            network=environ.get(NETWORK) or None,
            # PopTorch's option deterministicReduction also treats every value except 1 as 0.
            deterministic=environ.get(DETERMINISTIC) == "1",
        )


def _switch(environ: Mapping[str, str], name: str, *, default: bool | None) -> bool | None:
    """Convert a variable from 0 or 1 to a bool; return ``default`` if it is absent or empty."""
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise WireError(f"{name}={text!r}: expected 0 or 1")
    return default if text == "" else text == "1"


def _integer(
    environ: Mapping[str, str], name: str, *, minimum: int, default: int | None = None
) -> int:
    """Return a variable as an integer, or ``default`` if it is absent."""
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise WireError(
            f"{name} is not set, but {NUM_TOTAL_REPLICAS} is set. Start the program with "
            "poprun-py, or unset all POPDIST_* variables to run the program alone"
        )
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise WireError(f"{name}={text!r}: expected an integer of at least {minimum}")
    return value
