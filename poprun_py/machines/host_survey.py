"""Surveys the hosts of a launch before it is planned: how to reach them and what they are.

Copies folders, asks the hosts, chooses the network. Without ``contact`` nothing leaves this
machine: then only what is remembered from an earlier look is used.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from popdist_py.environment import RUN_ID
from poprun_py.errors import StartError, UsageError
from poprun_py.machines import host_probe
from poprun_py.machines.folder_sync import environment_folder, folder_to_sync, sync_folder
from poprun_py.machines.host_checks import (
    CALLS_BACK,
    HostChecks,
    doubts,
    grouped_checks,
    require,
)
from poprun_py.machines.host_list import Host
from poprun_py.machines.host_report import HostReport, make_request
from poprun_py.machines.leases import OtherJobs
from poprun_py.machines.machine import Machine
from poprun_py.machines.network_choice import Interface, Network, choose_network
from poprun_py.machines.probe_hosts import own_report, remembered_reports, request_reports
from poprun_py.machines.remote_shell import Shell, shell_of
from poprun_py.options.launch_config import LaunchConfig

_THIS_MACHINE = "this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """How hosts are reached, and what is known of them.

    ``mpi_network`` is how MPI is told of ``network``; empty where it has to choose.
    ``shares_network`` tells whether this machine is on ``network`` too, so that the MPI daemons can
    use it as the instances do, and ``own_address`` at which address, where that is known.
    ``hostnames`` is what each host calls itself, where that is known. ``has_fabric``: some host has
    a faster network than TCP, or nobody knows. ``other_jobs`` are the jobs on the other hosts, by
    host name; hosts without jobs are left out.
    """

    shell: Shell
    network: str = ""
    mpi_network: str = ""
    shares_network: bool = True
    own_address: str = ""
    addresses: Mapping[str, str]
    machines: Mapping[str, Machine]
    hostnames: Mapping[str, str]
    has_fabric: bool = False
    other_jobs: Mapping[str, OtherJobs] = field(default_factory=dict)


def survey(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    contact: bool,
) -> Survey:
    """Return what is known of ``hosts``; with ``contact`` they are filled and asked first.

    Raises:
        UsageError: options of the group Hosts that do not fit.
        StartError: a host cannot be reached or lacks something vital, or is off the network.
    """
    shell = shell_of(config, hosts, environ)
    others = [host for host in hosts if not host.is_local]
    reports = remembered_reports(hosts)
    if contact:
        _fill(config, hosts, shell)
        if not config.no_check or any(host.name not in reports for host in others):
            reports = _look(config, hosts, shell, mpirun)
    network, shares = _network(config, hosts, reports)
    return Survey(
        shell=shell,
        network=network.name,
        mpi_network=network.mpi_name,
        shares_network=shares,
        own_address=_own_address(hosts, network),
        addresses=network.addresses,
        machines={name: machine for name, report in reports.items() if (machine := report.machine)},
        hostnames=_hostnames(hosts, reports),
        has_fabric=any(h.name not in reports or reports[h.name].has_fabric for h in others),
        other_jobs=_other_jobs(others, reports, environ),
    )


def probe_other_jobs(
    config: LaunchConfig, hosts: Sequence[Host], *, mpirun: str, environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    """Ask the other hosts again which jobs hold their CPUs; who does not answer has none.

    Raises:
        StartError: ssh cannot be run.
    """
    others = [host for host in hosts if not host.is_local]
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(others, shell_of(config, hosts, environ), request)
    return _other_jobs(others, reports, environ)


def _other_jobs(
    others: Sequence[Host], reports: Mapping[str, HostReport], environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    within = environ.get(RUN_ID, "")
    asked = [reports[host.name] for host in others if host.name in reports]
    found = {report.host.name: report.other_jobs(within) for report in asked}
    return {name: other_jobs for name, other_jobs in found.items() if any(other_jobs)}


def _look(
    config: LaunchConfig, hosts: Sequence[Host], shell: Shell, mpirun: str
) -> dict[str, HostReport]:
    """Ask every host; the short check, unless it was declined."""
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(hosts, shell, request)
    if not config.no_check:
        require(reports, own_report(request).facts or {}, request)
    _require_each_once(reports)
    return reports


def _require_each_once(reports: Mapping[str, HostReport]) -> None:
    """Refuse two names of one machine: mpirun waits forever for one of them.

    Raises:
        StartError: two hosts call themselves the same, and have the same addresses.
    """
    seen: dict[object, str] = {}
    for name, report in reports.items():
        addresses = frozenset(i.address for i in report.interfaces if i.carries_traffic)
        other = seen.setdefault((report.hostname, addresses), name)
        if addresses and other != name:
            raise StartError(
                f"hosts {other} and {name} are the same machine ({report.hostname}); name it once, "
                "with name:slots for several instances"
            )


def _fill(config: LaunchConfig, hosts: Sequence[Host], shell: Shell) -> None:
    """Copy to the other hosts what is asked for."""
    if config.synchronise_python_venv:
        sync_folder(
            environment_folder(config.shown("synchronise_python_venv")),
            hosts,
            shell,
            links_out=True,
        )
    if config.sync is not None:
        sync_folder(folder_to_sync(config.sync, config.named("sync")), hosts, shell)


def check_hosts(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
) -> HostChecks:
    """Check every host as ``--check`` does; what is wrong is in the result.

    Raises:
        UsageError: options of the group Hosts that do not fit.
    """
    shell = shell_of(config, hosts, environ)
    _fill(config, hosts, shell)
    others = [host for host in hosts if not host.is_local]
    with _called_back(others, config.host_subnet or "") as call_back:
        request = make_request(config.program, mpirun, call_back)
        reports = request_reports(hosts, shell, request)
    groups = grouped_checks(reports, own_report(request).facts or {}, request)
    if not others or any(report.facts is None for report in reports.values()):
        return HostChecks(groups=groups)
    try:
        network = _network(config, hosts, reports)[0]
    except StartError as error:
        return HostChecks(groups=groups, network=str(error), has_network=False)
    name = network.name or "whatever MPI chooses (the hosts share no network)"
    return HostChecks(groups=groups, network=f"Traffic between the hosts goes over {name}.")


@contextlib.contextmanager
def _called_back(others: Sequence[Host], network: str) -> Iterator[tuple[str, int] | None]:
    """Listen at an address to which other hosts connect as a test; None if that is impossible."""
    with contextlib.ExitStack() as stack:
        call_back = None
        if others:
            with contextlib.suppress(StartError):
                address = listen_address(others, network)
                # Nothing accepts the connections: the kernel completes them, which is enough to
                # show that a host can connect.
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                server = stack.enter_context(
                    socket.create_server((address, 0), family=family, backlog=128)
                )
                call_back = (address, server.getsockname()[1])
        yield call_back


def diagnose(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    network: str = "",
) -> str:
    """Look for the reason why a launch did not start, with the checks of ``--check``.

    Returns:
        Sentences about problems of the hosts that need not be the reason; empty if there are none.

    Raises:
        StartError: the reason, if a host shows one.
    """
    others = [host for host in hosts if not host.is_local]
    with _called_back(others, network or config.host_subnet or "") as call_back:
        request = make_request(config.program, mpirun, call_back)
        reports = request_reports(hosts, shell_of(config, hosts, environ), request)
    ours = own_report(request).facts or {}
    require(reports, ours, request, also=(CALLS_BACK,))
    _require_each_once(reports)
    return doubts(reports, ours, request)


def _hostnames(hosts: Sequence[Host], reports: Mapping[str, HostReport]) -> dict[str, str]:
    """Return the name that each host gives itself: its instances report the same."""
    here = socket.gethostname()
    names = {
        h.name: here if h.is_local else reports[h.name].hostname
        for h in hosts
        if h.is_local or h.name in reports
    }
    return {name: hostname for name, hostname in names.items() if hostname}


# --- networks ---------------------------------------------------------------------------------


def own_interfaces() -> tuple[Interface, ...]:
    """Return this machine's addresses."""
    return tuple(Interface(*entry) for entry in host_probe.networks())


def _network(
    config: LaunchConfig, hosts: Sequence[Host], reports: Mapping[str, HostReport]
) -> tuple[Network, bool]:
    """Choose the hosts' network; tells whether this machine is on it."""
    ours = own_interfaces()
    theirs = {h.name: ours if h.is_local else reports[h.name].interfaces
              for h in hosts if h.is_local or h.name in reports}  # fmt: skip
    wanted, option = config.host_subnet, config.named("host_subnet")
    if len(theirs) < len(hosts):
        if wanted is not None:
            # What is known of some hosts is enough to refuse a network that they are not on.
            choose_network(theirs, wanted=wanted, option=option)
        return Network(wanted or "", {}), True
    resolved = {name: address for name in theirs if (address := _resolve(name))}
    with_us = {**theirs, _THIS_MACHINE: ours} if not any(h.is_local for h in hosts) else theirs
    try:
        network = choose_network(with_us, wanted=wanted, option=option, resolved=resolved)
    except StartError:
        if with_us is theirs:
            raise
        network = Network("", {})
    if network.name:
        return network, True
    return choose_network(theirs, wanted=wanted, option=option, resolved=resolved), False


def _own_address(hosts: Sequence[Host], network: Network) -> str:
    name = next((host.name for host in hosts if host.is_local), _THIS_MACHINE)
    return network.addresses.get(name, "")


def _resolve(name: str) -> str:
    """Return the address behind a name; empty where only ssh knows the name."""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    by_family = sorted(addresses, key=lambda each: each[0] != socket.AF_INET)
    return str(by_family[0][4][0])


def listen_address(others: Sequence[Host], network: str) -> str:
    """Return this machine's address on ``network``, or else on the way to the other hosts.

    Connecting a datagram socket sends nothing: it only asks the kernel for the route.

    Raises:
        StartError: there is no way to the first of the others.
    """
    if network:
        with contextlib.suppress(StartError, UsageError):
            ours = choose_network({"": own_interfaces()}, wanted=network)
            return ours.addresses[""]
    name = others[0].name
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"host {name} cannot be reached ({reason}); check the name, or choose the network: "
            "--host-subnet"
        ) from None
