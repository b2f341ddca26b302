"""The hosts of a launch, their machines and the installed MPI.

The functions here read files and the hardware of this machine, and probe the other hosts of a job.
launch_plan.py computes a launch plan from the collected data.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.errors import UsageError
from poprun_py.machines.host_list import Host, resolve_hosts, with_names
from poprun_py.machines.machine import Machine, load_machines
from poprun_py.machines.machine_reader import read_machine
from poprun_py.options.config_files import read_text_file
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.installed_mpi import Mpi, find_mpi
from poprun_py.planning.instances_on_hosts import Topology

if TYPE_CHECKING:
    from poprun_py.machines.host_checks import ProbedHosts
    from poprun_py.planning.partition_decision import PartitionDecision


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """The values from which the plan of a launch is computed.

    Attributes:
        config: The options of the launch.
        topology: The hosts of the job, and the instances of each host.
        environ: The launcher's environment.
        machines: The hardware of each host; None for a host with unknown hardware.
        mpi: The installed MPI.
        probed: The results of probing the other hosts; None for a job on this machine only.
        env_file_text: The content of the file of ``--env-file``; None without ``--env-file``.
        partition: The decision about the IPU partition of the job; None if no pod is configured.
        folder: The working folder of the job; empty for the working folder of the launcher.
    """

    config: LaunchConfig
    topology: Topology
    environ: Mapping[str, str] = field(repr=False)
    machines: tuple[Machine | None, ...]
    mpi: Mpi
    probed: ProbedHosts | None = None
    env_file_text: str | None = None
    partition: PartitionDecision | None = None
    folder: str = ""


def gather_inputs(
    config: LaunchConfig,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    contact: bool,
    mpi: Mpi | None = None,
) -> PlanInputs:
    """Gather the inputs of a launch plan, except the decision about the IPU partition.

    If ``contact`` is True, the launcher copies files to the job's other hosts and probes them. If
    ``contact`` is False, the launcher uses the hosts' reports that earlier launches stored. The
    default of ``mpi`` is the installed MPI.

    Raises:
        UsageError: A file cannot be read, or the value of an option is not valid.
        StartError: No MPI is installed, or the launcher cannot use a host of the job.
    """
    check_subnet(config)
    hosts = topology.hosts
    mpi = mpi or find_mpi(config.mpi, environ, config.named("mpi"))
    probed = None
    if topology.spans_hosts:
        from poprun_py.machines.host_checks import probe_hosts

        probed = probe_hosts(config, hosts, mpirun=mpi.path, environ=environ, contact=contact)
    text = None
    if config.env_file is not None:
        text = read_text_file(config.env_file, config.named("env_file"))
    return PlanInputs(
        config=config,
        topology=topology,
        environ=environ,
        machines=_machines_of(config, hosts, probed.machines if probed is not None else {}),
        mpi=mpi,
        probed=probed,
        env_file_text=text,
    )


def shown_machines(
    config: LaunchConfig, environ: Mapping[str, str], hosts: tuple[Host, ...]
) -> tuple[Machine | None, ...]:
    """Return the hardware of each host for --print-hardware; None for an unknown machine."""
    check_subnet(config)
    reported: Mapping[str, Machine] = {}
    if not is_described(config) and not all(host.is_local for host in hosts):
        from poprun_py.machines.host_checks import probe_hosts

        mpirun = find_mpi(config.mpi, environ, config.named("mpi")).path
        probed = probe_hosts(config, hosts, mpirun=mpirun, environ=environ, contact=True)
        reported = probed.machines
    return _machines_of(config, hosts, reported)


def check_subnet(config: LaunchConfig) -> None:
    """Raise UsageError if the value of --host-subnet is not valid."""
    if config.host_subnet is not None:
        from poprun_py.machines.host_networks import parse_subnet

        parse_subnet(config.host_subnet, config.named("host_subnet"))


def hosts_of(config: LaunchConfig, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that ``config`` or else ``environ`` names, or this machine if neither does.

    Raises:
        UsageError: The list of hosts is malformed, or the file with the list cannot be read.
    """
    # ssh is not used for hosts whose name is a name or address of this machine.
    name = socket.gethostname()
    own_names = {name, name.partition(".")[0]}
    if config.host is not None or config.host_file is not None:
        from poprun_py.machines.probe_script import networks

        own_names.update(address for _, address, *_ in networks())
    option = config.named("host_file") if config.host_file is not None else "host file"
    hosts = resolve_hosts(
        config,
        environ,
        read_text=lambda path: read_text_file(path, option),
        local_names=frozenset(own_names),
    )
    return with_names(hosts) if any(":" in host.name for host in hosts) else hosts


def with_instances(config: LaunchConfig, hosts: tuple[Host, ...]) -> LaunchConfig:
    """Return ``config`` with the number of instances that --nproc-per-node requests.

    Raises:
        UsageError: The numbers of instances, replicas and IPUs are contradictory, or the number of
            instances depends on the CPUs of a host with unknown hardware.
    """
    if isinstance(config.nproc_per_node, int):
        return config.on_hosts(len(hosts))
    usable = []
    for host, machine in zip(hosts, _machines_of(config, hosts, {}), strict=True):
        if machine is None:
            raise UsageError(
                f"{config.shown('nproc_per_node')}: the launcher does not know the CPUs of host "
                f"{host.name} before the launch; give the number of instances per host"
            )
        cpus = sum(len(core.cpus) for core in machine.usable_cores)
        usable.append(min(cpus, machine.quota_cpus or cpus))
    return config.on_hosts(len(hosts), min(usable))


def is_described(config: LaunchConfig) -> bool:
    """Tell whether an option names a file or folder that describes the hardware of the hosts."""
    return config.hardware is not None or config.hardware_root is not None


def _machines_of(
    config: LaunchConfig, hosts: tuple[Host, ...], reported: Mapping[str, Machine]
) -> tuple[Machine | None, ...]:
    """Return the hardware of each host; None for a host with unknown hardware.

    ``reported`` maps the names of other hosts to the hardware that they report.
    """
    if config.hardware is not None:
        text = read_text_file(config.hardware, config.named("hardware"))
        return load_machines(text, config.hardware, [host.name for host in hosts])
    if config.hardware_root is not None:
        return (read_machine(Path(config.hardware_root)),) * len(hosts)
    here = read_machine() if any(host.is_local for host in hosts) else None
    return tuple(here if host.is_local else reported.get(host.name) for host in hosts)
