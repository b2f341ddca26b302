"""The choice of the hosts for a launch, from options, Slurm, a Kubernetes MPIJob or this machine.

Only ``with_names`` has side effects: it asks the resolver for the names of IPv6 addresses.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from popdist_py.errors import are, counted
from poprun_py.errors import UsageError
from poprun_py.machines.host_list import (
    LOCALHOST,
    MAX_HOSTS,
    Host,
    parse_host_file,
    parse_host_list,
)

# Environment variables with the path of a host file for Open MPI. A Kubernetes MPIJob sets one of
# these variables.
DEFAULT_HOST_FILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_TASKS = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")


def resolve_hosts(
    *,
    host: str | None,
    host_file: str | None,
    environ: Mapping[str, str],
    read_text: Callable[[str], str],
    local_names: frozenset[str] = frozenset(),
    num_instances: int = 1,
    host_source: str = "--host",
    host_file_source: str = "--host-file",
) -> tuple[Host, ...]:
    """Return the hosts of a launch, in order.

    ``--host`` takes precedence over ``--host-file``. Without ``--host`` and ``--host-file``, the
    hosts come from the Slurm allocation or the MPI host file that ``environ`` names. If ``environ``
    names neither, this machine is the only host. ``local_names`` are the names of this machine.
    ``read_text`` returns the text of a file. ``host_source`` and ``host_file_source`` are the
    options' names in messages.

    Raises:
        UsageError: A host list is malformed, a host is given twice, or the Slurm allocation has too
            few tasks.
    """
    if host is not None:
        hosts = parse_host_list(host, source=host_source)
    elif host_file is not None:
        hosts = parse_host_file(read_text(host_file), source=f"{host_file_source} {host_file}")
    elif environ.get("SLURM_JOB_NODELIST"):
        hosts = _slurm_hosts(environ, num_instances)
    elif default_file := next((environ[n] for n in DEFAULT_HOST_FILES if environ.get(n)), ""):
        hosts = parse_host_file(read_text(default_file), source=default_file)
    else:
        return (LOCALHOST,)
    local = _LOCAL_NAMES | {name.lower() for name in local_names}
    here = [h.name for h in hosts if h.name.lower() in local]
    if len(here) > 1:
        raise UsageError(
            f"hosts {here[0]} and {here[1]} are both this machine; name it once, with name:slots "
            "for several instances"
        )
    return tuple(replace(h, is_local=h.name.lower() in local) for h in hosts)


def _slurm_hosts(environ: Mapping[str, str], num_instances: int) -> tuple[Host, ...]:
    """Return the hosts of a Slurm allocation.

    The number of slots of a host is the number of Slurm tasks that the user asked for on the host.
    If each node has one task with several CPUs, the number of slots is unlimited (None): the task
    is meant for the launcher, as with torchrun, and the instances divide the CPUs of the task.

    Raises:
        UsageError: There are fewer Slurm tasks than instances.
    """
    hosts = parse_host_list(environ["SLURM_JOB_NODELIST"], source="SLURM_JOB_NODELIST")
    requested = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    if not requested or environ.get("SLURM_STEP_ID"):
        # If the user did not ask for tasks, Slurm's default is one task for each node. In a Slurm
        # step, Slurm's environment variables describe the step, whose only task is the launcher,
        # and not the allocation.
        return hosts
    tasks = parse_tasks_per_node(
        environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE", ""), len(hosts)
    )
    if set(tasks) == {1} and environ.get("SLURM_CPUS_PER_TASK", "1") != "1":
        return hosts
    share, rest = divmod(num_instances, min(len(hosts), num_instances))
    lacking = [h.name for h, n in zip(hosts[:num_instances], tasks, strict=False) if n < share]
    if lacking and not rest:
        raise UsageError(
            f"Slurm allocated {counted(tasks[0], 'task')} to {lacking[0]}, "
            f"{counted(share, 'instance')} {are(share)} planned on it "
            f"({counted(num_instances, 'instance')} / "
            f"{counted(min(len(hosts), num_instances), 'node')}): ask for "
            f"--ntasks-per-node={share} in sbatch or salloc, or give --num-instances {sum(tasks)}"
        )
    return tuple(Host(name=h.name, slots=n) for h, n in zip(hosts, tasks, strict=True))


def slurm_tasks(
    hosts: Sequence[Host], instances_per_host: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return Slurm's environment variables with values that match the hosts of the plan.

    Open MPI starts one instance for each Slurm task that these variables count. The values that
    Slurm itself set may count only one task for each node, and may name nodes that the plan does
    not use.
    """
    if not environ.get("SLURM_JOB_NODELIST"):
        return {}
    nodes, count = ",".join(host.name for host in hosts), str(len(hosts))
    return {
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": count,
        "SLURM_JOB_NUM_NODES": count,
        "SLURM_TASKS_PER_NODE": f"{instances_per_host}(x{count})",
    }


def parse_tasks_per_node(text: str, num_hosts: int) -> list[int]:
    """Return the number of tasks of each node from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        UsageError: The text is not in Slurm's short form, or describes another number of nodes.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[2] or 1) > MAX_HOSTS:
            tasks = []
            break
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) == 1:
        tasks *= num_hosts
    if len(tasks) != num_hosts:
        raise UsageError(
            f"SLURM_TASKS_PER_NODE {text!r}: expected the tasks of "
            f"{counted(num_hosts, 'node')}, such as 2(x3)"
        )
    return tasks


# --- names of IPv6 addresses --------------------------------------------------------------------


def with_names(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Replace each IPv6 address in ``hosts`` by a host name, because mpirun rejects IPv6 addresses.

    Raises:
        UsageError: The name of an address is unknown, or two hosts have the same name.
    """
    named: list[Host] = []
    for host in hosts:
        name = _name_of_address(host) if ":" in host.name else host.name
        if any(name.lower() == each.name.lower() for each in named):
            raise UsageError(f"host {host.name} is {name}, which is given too; give it once")
        named.append(replace(host, name=name))
    return tuple(named)


def _name_of_address(host: Host) -> str:
    if host.is_local:
        return socket.gethostname()
    try:
        return socket.getnameinfo((host.name, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        raise UsageError(
            f"host {host.name} has no name here, and mpirun takes no IPv6 address; add a line such "
            f"as '{host.name} node1' to /etc/hosts, or give a name that resolves to it"
        ) from None
