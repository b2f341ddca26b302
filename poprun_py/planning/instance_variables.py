"""Environment variables of the instances, such as those of PopDist, torchrun and the user.

mpi_commands.py writes the instances' variables into the mpirun command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from popdist_py.device_numbers import LINK_DOMAIN_IPUS, device_id
from popdist_py.environment import (
    CHECKPOINT_MEMORY,
    DEBUGGER,
    EXECUTABLE_CACHE_PATH,
    HEARTBEAT,
    INSTANCE_VARIABLES,
    IPU_MODEL,
    MEMORY_CHECKPOINTS,
    NETWORK,
    NODE_DEVICE_ID,
    RESTART_COUNT,
    RUN_FILES,
    RUN_ID,
    SDK_COMMAND,
    SDK_NAMES,
    STACKS,
    TIMELINE,
    TORCH_BACKEND,
    InstanceEnvironment,
)
from poprun_py.errors import UsageError, shortened
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.options.gathered_options import INTERNAL_VARIABLES, is_option_variable
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import is_word
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.hosts_and_mpi import PlanInputs
from poprun_py.planning.instances_on_hosts import Instance, Topology
from poprun_py.planning.job_partition import HOST, PARTITION, PORT
from poprun_py.terminal import SDK_NAME, command_name

Pairs = tuple[tuple[str, str], ...]

# The variable that contains the planned number of compute threads of an instance, as in PopRun.
# OMP_NUM_THREADS also limits libraries whose own variable, such as MKL_NUM_THREADS, is not set.
PLANNED_THREADS = "OMP_NUM_THREADS"
# The variables that PopRun forwards from the launcher's environment to every instance.
FORWARDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "POPLAR_ENGINE_OPTIONS")
# The launcher sends variables with these prefixes to the instances on other hosts. Variables with
# thread counts are not sent to other hosts, because thread counts are planned for each host.
# Variables with paths and limits are not sent to other hosts, because other hosts may differ.
_SENT_TO_HOSTS = (
    *("POPDIST_", "POPTORCH_", "POPLAR_"),
    # Instances set ACCELERATE_USE_CPU and GOMP_SPINCOUNT, but keep the values of the user.
    *("ACCELERATE_USE_CPU", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),
)
TARGET_OPTIONS = "POPLAR_TARGET_OPTIONS"
_EXPORT = re.compile(r"^export\s+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables that describe an instance of a job. If an instance starts another launcher, the other
# launcher does not pass these variables on to its mpirun.
_OF_OUTER_JOB = {
    *("POPRUN_CPUS", "POPRUN_MEMORY_NODES", RUN_ID),
    *(CHECKPOINT_MEMORY, MEMORY_CHECKPOINTS),
    *(DEBUGGER, HEARTBEAT, NETWORK, NODE_DEVICE_ID, RESTART_COUNT, STACKS),
    *(RUN_FILES, SDK_COMMAND, TIMELINE),
    *("GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    # If an mpirun of Open MPI 4 gets one of these variables from another MPI job, the mpirun
    # starts no instances, or acts as an instance of the other job.
    *("OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_ess_base_vpid"),
    *("OMPI_MCA_orte_ess_node_rank", "OMPI_MCA_orte_ess_num_procs"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"),
}


def planned_variables(
    inputs: PlanInputs, placements: Sequence[Placement], user_env: Pairs
) -> Iterator[Pairs]:
    """Yield the environment variables of each instance, with POPLAR_TARGET_OPTIONS last.

    Torchrun's variable MASTER_PORT is not included, because the launcher chooses the port when the
    job starts. Torchrun's ROLE_RANK and similar variables are not included, because the wrapper
    of the instance computes their values.
    """
    topology, environ, partition = inputs.topology, inputs.environ, inputs.partition
    common = _common_variables(inputs)
    set_by_user = {name for name, _ in user_env}.union(environ.keys() & THREAD_VARIABLES)
    bindings = placement_variables(placements, set_by_user)
    target = (TARGET_OPTIONS, target_options(topology, environ))
    for instance, binding in zip(topology.instances, bindings, strict=True):
        variables: dict[str, str | None] = {
            **popdist_variables(inputs.config, topology, instance),
            **common,
            **(partition.variables(instance.index) if partition is not None else {}),
        }
        yield (
            *((name, value) for name, value in variables.items() if value is not None),
            ("RANK", str(instance.index)),
            ("WORLD_SIZE", str(topology.num_instances)),
            ("LOCAL_RANK", str(instance.local_index)),
            ("LOCAL_WORLD_SIZE", str(topology.instances_per_host)),
            ("GROUP_RANK", str(instance.host_index)),
            *binding,
            target,
        )


def popdist_variables(
    config: LaunchConfig, topology: Topology, instance: Instance
) -> dict[str, str]:
    """Return PopDist's environment variables of one instance."""
    # An IPU device cannot span several IPU-Link domains. If a job has several IPU-Link domains,
    # PopRun therefore attaches no IPU device that all instances share.
    attached = not config.offline_mode and topology.num_ilds == 1
    environment = InstanceEnvironment(
        num_total_replicas=topology.num_replicas,
        num_local_replicas=topology.num_local_replicas,
        num_ipus_per_replica=topology.ipus_per_replica,
        replica_index_offset=instance.replicas.start,
        local_instance_index=instance.local_index,
        num_local_instances=topology.instances_per_host,
        node_device_id=device_id(topology.num_ipus, topology.num_ipus, 0) if attached else None,
        executable_cache_path=config.executable_cache_path,
    )
    return environment.to_environ()


def _common_variables(inputs: PlanInputs) -> dict[str, str]:
    """Return the environment variables that have the same value in all instances."""
    config, environ, probed = inputs.config, inputs.environ, inputs.probed
    partition = config.vipu_partition or environ.get(PARTITION)
    variables = {
        HOST: config.vipu_server_host or environ.get(HOST, "localhost"),
        PORT: str(config.vipu_server_port),
        **({PARTITION: partition} if partition else {}),
        "IPUOF_VIPU_API_TIMEOUT": str(config.vipu_server_timeout),
        "IPUOF_LOG_LEVEL": environ.get("IPUOF_LOG_LEVEL", "WARN"),
    }
    if "PYTHONUNBUFFERED" not in environ:
        # With PYTHONUNBUFFERED, Python writes each line of output immediately, even into a pipe.
        variables["PYTHONUNBUFFERED"] = "1"
    if inputs.mpi.library and "MPI4PY_LIBMPI" not in environ:
        variables["MPI4PY_LIBMPI"] = inputs.mpi.library
    if probed is not None and probed.network.name:
        variables[NETWORK] = probed.network.name
    if config.memory_checkpoints:
        variables[MEMORY_CHECKPOINTS] = "1"
    variables[SDK_NAMES] = config.sdk_names
    if command_name() == SDK_NAME:
        variables[SDK_COMMAND] = "1"
    variables[TORCH_BACKEND] = config.torch_backend
    if config.ipu_model is not None:
        variables[IPU_MODEL] = config.ipu_model
    # MASTER_ADDR is an address of the first host to which every instance can connect.
    hosts, addresses = inputs.topology.hosts, probed.network.addresses if probed is not None else {}
    is_alone = hosts[0].is_local and len(hosts) == 1
    address = "127.0.0.1" if is_alone else addresses.get(hosts[0].name, hosts[0].name)
    variables["MASTER_ADDR"] = address
    return variables


def attempt_variables(run_id: str, restart_count: int, max_restarts: int) -> dict[str, str]:
    """Return torchrun's variables for the ID of the run and the number of restarts so far."""
    return {
        RUN_ID: run_id,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        **({RESTART_COUNT: str(restart_count)} if max_restarts else {}),
    }


def settings_for_other_hosts(
    config: LaunchConfig, environ: Mapping[str, str], by_user: Collection[str]
) -> dict[str, str]:
    """Return the launcher's environment variables that instances on other hosts need.

    Variables that the mpirun command sets are left out. ``by_user`` contains the names of variables
    that the user's MPI arguments set in the mpirun command.
    """
    decided = {*INSTANCE_VARIABLES, *FORWARDED_VARIABLES, TARGET_OPTIONS, *by_user}
    if config.executable_cache_path is not None:
        decided.add(EXECUTABLE_CACHE_PATH)
    if config.ipu_model is not None:
        decided.add(IPU_MODEL)
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_SENT_TO_HOSTS) and name not in decided
    }


def placement_variables(placements: Sequence[Placement], skip: set[str]) -> list[Pairs]:
    """Return the environment variables for the thread count and the binding of each instance.

    If only one instance had a variable, Open MPI would pass the variable to all instances.
    Instances without the variable therefore get an empty value, and the wrapper unsets the
    variable. Variables whose names are in ``skip`` are left out.
    """
    by_instance = []
    for placement in placements:
        variables = {}
        if placement.threads and PLANNED_THREADS not in skip:
            variables[PLANNED_THREADS] = str(placement.threads)
        if placement.cpus:
            variables["POPRUN_CPUS"] = ",".join(map(str, placement.cpus))
        if placement.memory_nodes:
            variables["POPRUN_MEMORY_NODES"] = ",".join(map(str, placement.memory_nodes))
        by_instance.append(variables)
    names = dict.fromkeys(name for variables in by_instance for name in variables)
    return [tuple((name, each.get(name, "")) for name in names) for each in by_instance]


def target_options(topology: Topology, environ: Mapping[str, str]) -> str:
    """Return the value of POPLAR_TARGET_OPTIONS, a JSON object whose values are strings.

    Options of POPLAR_TARGET_OPTIONS in ``environ`` are kept, unless the launcher sets the same
    option. The IPUs of a whole IPU-Link domain form a torus with loop links. The IPUs of a part of
    an IPU-Link domain form a mesh. The values of POPLAR_TARGET_OPTIONS are taken from logs of
    PopRun.
    """
    of_user: Any = {}
    text = environ.get(TARGET_OPTIONS)
    if text:
        try:
            of_user = json.loads(text)
        except (ValueError, RecursionError):
            of_user = None
        if not isinstance(of_user, dict):
            raise UsageError(f"{TARGET_OPTIONS}={shortened(repr(text))}: expected a JSON object")
    size = min(topology.ipus_per_ild, LINK_DOMAIN_IPUS)
    is_whole = size == LINK_DOMAIN_IPUS
    of_job = {
        "ipuLinkDomainSize": str(size),
        "ipuLinkConfiguration": "slidingWindow" if is_whole else "default",
        "ipuLinkTopology": "torus" if is_whole else "mesh",
        "gatewayMode": "true",
        "instanceSize": str(topology.num_local_replicas * topology.ipus_per_replica),
    }
    return json.dumps({**of_user, **of_job}, separators=(",", ":"))


def user_variables(
    config: LaunchConfig, env_file_text: str | None, environ: Mapping[str, str]
) -> Pairs:
    """Return the variables of --env-file and --env, of which --env takes precedence.

    If an entry of --env or --env-file is only the name of a variable, the value is read from the
    launcher's environment ``environ``.

    Raises:
        UsageError: The name or value of a variable is not valid, or an entry is the name of a
            variable that ``environ`` does not contain.
    """
    variables: dict[str, str] = {}
    lines = [
        (f"{config.named('env_file')}, line {number}", _unquoted(line.strip()))
        for number, line in enumerate((env_file_text or "").split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for where, entry in [*lines, *((config.named("env"), entry) for entry in config.env)]:
        name, equals, value = _EXPORT.sub("", entry).partition("=")
        if not equals and not _NAME.fullmatch(name):
            # The error message does not contain the value of --env, which may be a secret.
            raise UsageError(
                f"{where}: an entry does not begin with the name of a variable; expected "
                "NAME=VALUE or NAME"
            )
        if not equals and name not in environ:
            raise UsageError(
                f"{where} {name}: the variable is not set in the launcher's environment; give "
                f"{name}=VALUE"
            )
        value = value if equals else environ.get(name, "")
        check_variable(where, name, value)
        variables[name] = value
    return tuple(variables.items())


def check_variable(where: str, name: str, value: Any) -> None:
    """Raise UsageError if a variable is not valid, or if only the launcher may set it."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where} {name!r}: expected NAME=VALUE or NAME")
    if name in INTERNAL_VARIABLES:
        raise UsageError(
            f"{where} {name}: only poprun-py may set this variable; choose another name"
        )
    if not is_word(value):
        raise UsageError(f"{where} {name}: expected a value without NUL characters")


def _unquoted(line: str) -> str:
    name, equals, value = line.partition("=")
    is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return f"{name}={value[1:-1]}" if is_quoted else f"{name}{equals}{value}"


def mpi_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of mpirun, made from the launcher's variables ``environ``.

    If an instance of another job started the launcher, the variables that describe this instance
    are left out. Variables that set options of the launcher are left out, because they would also
    apply to launchers that the instances of the job start. If HOME is not set, as in some services,
    HOME is added, because Open MPI does not start without HOME.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OF_OUTER_JOB and not is_option_variable(name)
    }
    if not kept.get("HOME"):
        try:
            kept["HOME"] = str(Path("~").expanduser())
        except RuntimeError:
            kept["HOME"] = "/"
    return kept
