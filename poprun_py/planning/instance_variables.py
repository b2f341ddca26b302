"""The variables of every instance: the wire, what torchrun would set, placement, the user's own.

Pure: configuration, topology, placements and the launcher's environment in, pairs of name and value
out. How they are spelled on a command is the dialects' (mpi_commands.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popdist_py.device_numbers import LINK_DOMAIN_IPUS, device_id
from popdist_py.environment import (
    DEBUGGER,
    EXECUTABLE_CACHE_PATH,
    HEARTBEAT,
    INSTANCE_VARIABLES,
    IPU_MODEL,
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
from poprun_py.console import SDK_NAME, command_name
from poprun_py.errors import UsageError
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.options.environment_variables import INTERNAL_VARIABLES, is_option_variable
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import is_word
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.topology import Instance, Topology

if TYPE_CHECKING:
    from poprun_py.machines.probe import ProbedHosts

Pairs = tuple[tuple[str, str], ...]

# The only thread variable that PopRun plans: every library uses it if its own is not set.
PLANNED_THREADS = "OMP_NUM_THREADS"
# What PopRun copies from its own environment, by name.
FORWARDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "POPLAR_ENGINE_OPTIONS")
# Variables for which an instance sets a default: ACCELERATE_USE_CPU, by the wrapper
# (instance/program_environment.py), and GOMP_SPINCOUNT (popdist_thread_waiting.py of the start
# hook). OMP_WAIT_POLICY replaces the latter.
_OWN_IF_UNSET = ("ACCELERATE_USE_CPU", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Prefixes of the variables that instances on other hosts get too: settings of our libraries, and
# the user's values of those above. Thread counts are planned for each host's CPUs, or forwarded if
# the user set them. Paths and limits of this machine's system are not for other hosts.
_TRAVELLING = ("POPDIST_", "POPTORCH_", "POPLAR_", *_OWN_IF_UNSET)
TARGET_OPTIONS = "POPLAR_TARGET_OPTIONS"
_EXPORT = re.compile(r"^export\s+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Variables that a launcher inside an instance of another job inherits from it. They describe that
# instance, and this job does not always set them anew.
_OF_OUTER_JOB = {
    *("POPRUN_CPUS", "POPRUN_MEMORY_NODES", RUN_ID),
    *(DEBUGGER, HEARTBEAT, NETWORK, NODE_DEVICE_ID, RESTART_COUNT, STACKS),
    *(RUN_FILES, SDK_COMMAND, TIMELINE),
    *("GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    # Where these are set Open MPI 4 starts nothing, or takes itself for that instance.
    *("OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_ess_base_vpid"),
    *("OMPI_MCA_orte_ess_node_rank", "OMPI_MCA_orte_ess_num_procs"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"),
}


def wire_variables(
    config: LaunchConfig, topology: Topology, instance: Instance
) -> tuple[tuple[str, str], ...]:
    """Return PopDist's variables of one instance."""
    # No device spans IPU-Link domains: where there are several, PopRun attaches none for all.
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
    return tuple(environment.to_environ().items())


def common_variables(
    config: LaunchConfig,
    topology: Topology,
    environ: Mapping[str, str],
    reached: ProbedHosts | None,
    mpi_library: str,
) -> tuple[tuple[str, str], ...]:
    """Return the variables that every instance shares, by value."""
    host = config.vipu_server_host or environ.get("IPUOF_VIPU_API_HOST", "localhost")
    partition = config.vipu_partition or environ.get("IPUOF_VIPU_API_PARTITION_ID")
    variables = {
        "IPUOF_VIPU_API_HOST": host,
        "IPUOF_VIPU_API_PORT": str(config.vipu_server_port),
        **({"IPUOF_VIPU_API_PARTITION_ID": partition} if partition else {}),
        "IPUOF_VIPU_API_TIMEOUT": str(config.vipu_server_timeout),
        "IPUOF_LOG_LEVEL": environ.get("IPUOF_LOG_LEVEL", "WARN"),
    }
    if "PYTHONUNBUFFERED" not in environ:
        # Python then writes every line at once, also into a pipe.
        variables["PYTHONUNBUFFERED"] = "1"
    if mpi_library and "MPI4PY_LIBMPI" not in environ:
        variables["MPI4PY_LIBMPI"] = mpi_library
    if reached is not None and reached.network:
        variables[NETWORK] = reached.network
    variables[SDK_NAMES] = config.sdk_names
    if command_name() == SDK_NAME:
        variables[SDK_COMMAND] = "1"
    variables[TORCH_BACKEND] = config.torch_backend
    if config.ipu_model is not None:
        variables[IPU_MODEL] = config.ipu_model
    variables["MASTER_ADDR"] = _master_address(topology, reached)
    return tuple(variables.items())


def _master_address(topology: Topology, reached: ProbedHosts | None) -> str:
    """Return the address of the first host as every instance can use it."""
    first = topology.hosts[0]
    if first.is_local and len(topology.hosts) == 1:
        return "127.0.0.1"
    return reached.addresses.get(first.name, first.name) if reached is not None else first.name


def torchrun_variables(topology: Topology, instance: Instance) -> tuple[tuple[str, str], ...]:
    """Return what torchrun would set; MASTER_PORT is chosen when the job starts.

    The wrapper adds what follows from these, such as ROLE_RANK; ``attempt_variables`` what differs
    between the attempts at a job.
    """
    return (
        ("RANK", str(instance.index)),
        ("WORLD_SIZE", str(topology.num_instances)),
        ("LOCAL_RANK", str(instance.local_index)),
        ("LOCAL_WORLD_SIZE", str(topology.instances_per_host)),
        ("GROUP_RANK", str(instance.host_index)),
    )


def attempt_variables(run_id: str, restart_count: int, max_restarts: int) -> dict[str, str]:
    """Return what instances are told of the run and of this attempt at it, as torchrun does."""
    return {
        RUN_ID: run_id,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        **({RESTART_COUNT: str(restart_count)} if max_restarts else {}),
    }


def travelling_variables(
    config: LaunchConfig, environ: Mapping[str, str], by_user: Collection[str]
) -> dict[str, str]:
    """Return the launcher's settings of our libraries that instances on other hosts get too.

    Args:
        config: what is asked for.
        environ: the launcher's environment, perhaps that of an instance of another job.
        by_user: names that the user's MPI arguments set.
    """
    decided = {*INSTANCE_VARIABLES, *FORWARDED_VARIABLES, TARGET_OPTIONS, *by_user}
    if config.executable_cache_path is not None:
        decided.add(EXECUTABLE_CACHE_PATH)
    if config.ipu_model is not None:
        decided.add(IPU_MODEL)
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_TRAVELLING) and name not in decided
    }


def placement_variables(
    placements: Sequence[Placement], skip: set[str]
) -> list[tuple[tuple[str, str], ...]]:
    """Return the variables with each instance's thread count and binding, except those in ``skip``.

    Open MPI gives a variable of one part of the command to every part that does not set it. A
    variable that one instance has is therefore set, empty, for all: the wrapper takes empty for
    unset.
    """
    own = [
        {
            **(
                {PLANNED_THREADS: str(p.threads)}
                if p.threads and PLANNED_THREADS not in skip
                else {}
            ),
            **({"POPRUN_CPUS": ",".join(map(str, p.cpus))} if p.cpus else {}),
            **(
                {"POPRUN_MEMORY_NODES": ",".join(map(str, p.memory_nodes))}
                if p.memory_nodes
                else {}
            ),
        }
        for p in placements
    ]
    names = dict.fromkeys(name for variables in own for name in variables)
    return [tuple((name, variables.get(name, "")) for name in names) for variables in own]


def user_threads(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the thread counts that the user set, by variable.

    ``environ`` holds the variables of the instances that the user decides. Values that are not
    numbers are left out. If a value is a list with a count for each nested level, the first count
    is used.
    """
    texts = {name: environ.get(name, "").partition(",")[0].strip() for name in THREAD_VARIABLES}
    return {
        name: int(text)
        for name, text in texts.items()
        if text.isascii() and text.isdigit() and len(text) < 10
    }


def target_options(topology: Topology, environ: Mapping[str, str]) -> str:
    """Return POPLAR_TARGET_OPTIONS: the environment's first, ours over it, all values strings.

    A whole IPU-Link domain is a torus with loop links, a part of one a mesh. Source: PopRun's logs
    of 4 and 64 IPUs; the gateway mode is on in all of them, for IPU-Machines have a gateway each.
    """
    theirs: Any = {}
    text = environ.get(TARGET_OPTIONS)
    if text:
        try:
            theirs = json.loads(text)
        except (ValueError, RecursionError):
            theirs = None
        if not isinstance(theirs, dict):
            shown = repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
            raise UsageError(f"{TARGET_OPTIONS}={shown}: expected a JSON object")
    size = min(topology.ipus_per_ild, LINK_DOMAIN_IPUS)
    is_whole = size == LINK_DOMAIN_IPUS
    ours = {
        "ipuLinkDomainSize": str(size),
        "ipuLinkConfiguration": "slidingWindow" if is_whole else "default",
        "ipuLinkTopology": "torus" if is_whole else "mesh",
        "gatewayMode": "true",
        "instanceSize": str(topology.num_local_replicas * topology.ipus_per_replica),
    }
    return json.dumps({**theirs, **ours}, separators=(",", ":"))


def user_variables(
    env: tuple[str, ...],
    env_file_text: str | None,
    environ: Mapping[str, str],
    *,
    env_option: str = "--env",
    file_option: str = "--env-file",
) -> Pairs:
    """Merge --env-file and --env; a bare NAME takes the launcher's value.

    ``env_option`` and ``file_option`` are how messages name the two.

    Raises:
        UsageError: no valid name or value, or a bare NAME that is not set.
    """
    variables: dict[str, str] = {}
    lines = [
        (f"{file_option}, line {number}", _unquoted(line.strip()))
        for number, line in enumerate((env_file_text or "").split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for where, entry in [*lines, *((env_option, entry) for entry in env)]:
        name, equals, value = _EXPORT.sub("", entry).partition("=")
        if not equals and not _NAME.fullmatch(name):  # it may hold a value, which may be secret
            raise UsageError(f"{where}: no name of a variable: expected NAME=VALUE or NAME")
        if not equals and name not in environ:
            raise UsageError(f"{where} {name}: not set in this environment; give {name}=VALUE")
        value = value if equals else environ.get(name, "")
        check_variable(where, name, value)
        variables[name] = value
    return tuple(variables.items())


def check_variable(where: str, name: str, value: Any) -> None:
    """Refuse a user's variable that no process can have, or that is the launcher's own.

    Raises:
        UsageError: what is wrong with it.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where} {name!r}: expected NAME=VALUE or NAME")
    if name in INTERNAL_VARIABLES:
        raise UsageError(f"{where} {name}: poprun-py sets it for itself; choose another name")
    if not is_word(value):
        raise UsageError(f"{where} {name}: expected a value without NUL characters")


def _unquoted(line: str) -> str:
    """Take off the quotes around a whole value, as shells do."""
    name, equals, value = line.partition("=")
    is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return f"{name}={value[1:-1]}" if is_quoted else f"{name}{equals}{value}"


def mpi_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of mpirun, without the variables of one instance of an outer job.

    Options of this launch stay out too: a launcher that an instance starts would take them for its
    own.

    Open MPI does not start without a home, which services and cron do not always set.
    """
    left = {
        name: value
        for name, value in environ.items()
        if name not in _OF_OUTER_JOB and not is_option_variable(name)
    }
    if not left.get("HOME"):
        try:
            left["HOME"] = str(Path("~").expanduser())
        except RuntimeError:
            left["HOME"] = "/"
    return left
