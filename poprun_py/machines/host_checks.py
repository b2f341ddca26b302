"""Checks of the hosts of a job before a launch, for ``--check``, and after a failed launch.

The checks of software compare each host's versions with the versions on this machine.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from popdist_py.environment import RUN_ID
from poprun_py.display.formatting import bytes_text
from poprun_py.errors import StartError
from poprun_py.machines.host_list import Host, compress
from poprun_py.machines.host_networks import Network, listen_address, network_of_hosts
from poprun_py.machines.host_reports import (
    HostReport,
    ProbeRequest,
    cached_reports,
    make_request,
    own_report,
    request_reports,
)
from poprun_py.machines.machine import Machine
from poprun_py.machines.remote_leases import OtherJobs, parse_other_jobs
from poprun_py.machines.remote_shell import (
    Problem,
    Shell,
    environment_folder,
    folder_to_sync,
    shell_of,
    sync_folder,
)
from poprun_py.options.launch_config import LaunchConfig

_MIN_MEMORY, _MIN_SHM, _MIN_FILES = 512 << 20, 64 << 20, 1024
_MAX_CLOCK_SECONDS = 1.0
# The name of the check whether a host can connect to the launcher, as every instance must.
CALLS_BACK = "calls back"


# --- checks before a launch ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedHosts:
    """The known facts about the hosts of a launch, and the shell that runs commands on the hosts.

    The keys of ``machines``, ``hostnames`` and ``other_jobs`` are host names as the user gave them.
    Hosts without a known value have no key. ``hostnames`` has the name that each host reports for
    itself. ``has_fabric`` is False if all remote hosts reported that TCP is their fastest network.
    ``other_jobs`` has the jobs of other launchers that hold CPUs or wait for CPUs of each host.
    """

    shell: Shell
    network: Network = field(default_factory=Network)
    machines: Mapping[str, Machine]
    hostnames: Mapping[str, str]
    has_fabric: bool = False
    other_jobs: Mapping[str, OtherJobs] = field(default_factory=dict)


def probe_hosts(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    contact: bool,
) -> ProbedHosts:
    """Probe the hosts of a launch, or read cached reports, and return the known facts.

    If ``contact`` is True, the folders of ``--sync`` and ``--synchronise-python-venv`` are copied
    to the hosts, and the hosts are probed. If ``contact`` is False, only the cached reports of
    earlier probes are used.

    Raises:
        UsageError: An option about hosts is not valid, such as ``--ssh-args``.
        StartError: A host cannot be reached, fails a vital check, or is not on the network that
            ``--host-subnet`` names.
    """
    shell = shell_of(config, hosts, environ)
    others = [host for host in hosts if not host.is_local]
    reports = cached_reports(hosts)
    if contact:
        _copy_folders(config, hosts, shell)
        if not config.no_check or any(host.name not in reports for host in others):
            request = make_request(config.program, mpirun, leases=True)
            reports = request_reports(hosts, shell, request)
            if not config.no_check:
                raise_first_problem(all_checks(reports, request))
            _require_different_machines(reports)
    interfaces = {name: report.interfaces for name, report in reports.items()}
    hostnames = {name: report.hostname for name, report in reports.items()}
    hostnames |= {host.name: socket.gethostname() for host in hosts if host.is_local}
    return ProbedHosts(
        shell=shell,
        network=network_of_hosts(config, hosts, interfaces),
        machines={name: machine for name, report in reports.items() if (machine := report.machine)},
        hostnames={name: hostname for name, hostname in hostnames.items() if hostname},
        has_fabric=any(
            h.name not in reports or reports[h.name].facts.get("fabric", True) for h in others
        ),
        other_jobs=_other_jobs(others, reports, environ),
    )


def vital_problems(
    config: LaunchConfig, hosts: Sequence[Host], *, mpirun: str, environ: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Probe hosts, and return the first problem of each host that cannot run a job.

    Returns:
        A mapping of host names to a dictionary with the problem's ``text``, and with
        ``is_reached``, which tells whether the host has answered.

    Raises:
        UsageError: An option about hosts is not valid, such as ``--ssh-args``.
        StartError: The command ssh or srun cannot be run.
    """
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(hosts, shell_of(config, hosts, environ), request)
    found = {}
    for name, checks in all_checks(reports, request).items():
        # The first check is whether the host was reached at all.
        considered = checks[:1] if config.no_check else [c for c in checks if c.is_vital]
        problem = next((each.problem for each in considered if each.problem is not None), None)
        if problem is not None:
            found[name] = {"text": str(problem), "is_reached": bool(reports[name].facts)}
    return found


def probe_other_jobs(
    config: LaunchConfig, hosts: Sequence[Host], *, mpirun: str, environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    """Ask each remote host again which jobs hold CPUs or wait for CPUs of the host.

    Hosts that do not answer are missing in the returned mapping.

    Raises:
        StartError: The command ssh or srun cannot be run.
    """
    others = [host for host in hosts if not host.is_local]
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(others, shell_of(config, hosts, environ), request)
    return _other_jobs(others, reports, environ)


def _other_jobs(
    others: Sequence[Host], reports: Mapping[str, HostReport], environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    within = environ.get(RUN_ID, "")
    known = [host.name for host in others if host.name in reports]
    found = {name: parse_other_jobs(reports[name].facts.get("leases"), within) for name in known}
    return {name: jobs for name, jobs in found.items() if any(jobs)}


def _require_different_machines(reports: Mapping[str, HostReport]) -> None:
    """Raise StartError if two host names mean the same machine, because mpirun would hang."""
    seen: dict[object, str] = {}
    for name, report in reports.items():
        addresses = frozenset(i.address for i in report.interfaces if i.carries_traffic)
        other = seen.setdefault((report.hostname, addresses), name)
        if addresses and other != name:
            raise StartError(
                f"hosts {other} and {name} are the same machine ({report.hostname}); give the "
                "machine once, with name:slots for several instances"
            )


def _copy_folders(config: LaunchConfig, hosts: Sequence[Host], shell: Shell) -> None:
    if config.synchronise_python_venv:
        folder = environment_folder(config.shown("synchronise_python_venv"))
        sync_folder(folder, hosts, shell, links_out=True)
    if config.sync is not None:
        sync_folder(folder_to_sync(config.sync, config.named("sync")), hosts, shell)


# --- results of checks ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check of one host, with the problem that the check found.

    A problem that a check finds prevents the launch only if ``is_vital`` is True.
    """

    name: str
    text: str
    problem: Problem | None = None
    is_vital: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HostChecks:
    """The results of ``--check`` for all hosts, and for the network between the hosts.

    ``groups`` maps check results to the names of the hosts with exactly these results. ``network``
    is a sentence for the user about the network between the hosts.
    """

    groups: Mapping[tuple[Check, ...], Sequence[str]]
    network: str = ""
    has_network: bool = True

    @property
    def has_passed(self) -> bool:
        """Whether all checks of the hosts and of the network passed."""
        problems = (check.problem for checks in self.groups for check in checks)
        return self.has_network and not any(problems)


def all_checks(
    reports: Mapping[str, HostReport], request: ProbeRequest
) -> dict[str, tuple[Check, ...]]:
    """Return a mapping of host names to the results of all checks."""
    ours = own_report(request).facts
    return {name: checks_of(report, ours, request) for name, report in reports.items()}


def checks_of(
    report: HostReport, ours: Mapping[str, Any], request: ProbeRequest
) -> tuple[Check, ...]:
    """Check the host that sent ``report``; ``ours`` are the facts about this machine."""
    reached = Check(name="reached", text="no" if report.problem else "yes", problem=report.problem)
    if not report.facts:
        return (reached,)
    return (reached, *_installation(report.facts, ours, request), *_resources(report))


def _installation(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], request: ProbeRequest
) -> list[Check]:
    """Check that the host has the same software as this machine, at the same paths."""
    copy = (
        "install the same version on every host, or copy this environment with "
        "--synchronise-python-venv yes"
    )
    pairs = [
        ("Python", theirs["python"], ours["python"], copy),
        ("MPI", theirs["mpirun"], ours["mpirun"], f"expected {request.mpirun} on the host; {copy}"),
        (
            "poprun-py",
            theirs["poprun"],
            ours["poprun"],
            f"expected poprun-py in {request.root} on the host; {copy}",
        ),
        *((n, theirs["packages"].get(n, ""), ours["packages"][n], copy) for n in ours["packages"]),
    ]
    checks = [_compare(name, there, here, fix) for name, there, here, fix in pairs if there or here]
    share = "use a shared file system, or copy the folder of the program with --sync DIR"
    if request.program:
        state = theirs["program"]
        fault = "" if state == "ok" else f"the program {request.program} is {state} on the host"
        checks.append(_check("program", state, fault, share))
    state = "ok" if theirs["folder"] else "missing"
    fault = (
        "" if theirs["folder"] else f"the working folder {request.folder} is missing on the host"
    )
    return [*checks, _check("folder", state, fault, share)]


def _compare(name: str, there: str, here: str, fix: str) -> Check:
    short = there.rpartition(" ")[2] if name == "MPI" else there
    fault = f"{name} is {there or 'missing'} on the host and {here or 'missing'} on this machine"
    return _check(name, short or "missing", "" if there == here else fault, fix)


def _check(name: str, text: str, fault: str, fix: str, *, is_vital: bool = True) -> Check:
    problem = Problem(fault, fix) if fault else None
    return Check(name=name, text=text, problem=problem, is_vital=is_vital)


def _resources(report: HostReport) -> list[Check]:
    """Check the network, clock, memory and limits of a host without preventing the launch."""
    facts = report.facts
    interface = next((i for i in report.interfaces if i.carries_traffic), None)
    off = report.clock_seconds
    memory, shm, files = facts.get("memory"), facts.get("shm"), facts.get("files")
    # Each tuple has a check's name, its result, whether the result is good, a problem and a fix.
    results = [
        ("network", interface.name if interface else "none", interface is not None,
         "the host has no network other than loopback", "check the output of ip address"),
        ("clock", "ok" if off <= _MAX_CLOCK_SECONDS else f"{off:.1f} s off",
         off <= _MAX_CLOCK_SECONDS, f"the clock of the host is {off:.1f} s off",
         "run an NTP client on the host"),
        ("free memory", _size(memory), memory is None or memory >= _MIN_MEMORY,
         f"only {_size(memory)} of the host's memory are free", "end other programs on the host"),
        ("/dev/shm", _size(shm), shm is not None and shm >= _MIN_SHM,
         f"the free space in /dev/shm of the host is {_size(shm)}",
         "enlarge /dev/shm with mount -o remount,size=1G /dev/shm"),
        ("open files", "unlimited" if files is None else str(files),
         files is None or files >= _MIN_FILES,
         f"a process on the host may open at most {files} files",
         "raise the limit with ulimit -n 65536, or with nofile in /etc/security/limits.conf"),
    ]  # fmt: skip
    back = facts.get("called_back")
    if back is not None:
        results.append(
            (CALLS_BACK, "yes" if back else "no", back,
             "the host cannot open a connection to this machine",
             "open the firewall, or choose another network with --host-subnet")
        )  # fmt: skip
    return [
        _check(name, text, "" if is_good else fault, fix, is_vital=False)
        for name, text, is_good, fault, fix in results
    ]


def _size(count: int | None) -> str:
    # Memory sizes are rounded to whole units, so that --check shows hosts with slightly different
    # memory sizes as one group.
    return "unknown" if count is None else bytes_text(count, decimals=0)


def raise_first_problem(checks: Mapping[str, Sequence[Check]], also: Sequence[str] = ()) -> None:
    """Raise StartError if a host fails a vital check, or a check that ``also`` names.

    Raises:
        StartError: A host failed a check. The error message describes the first problem found and
            names all hosts that have this problem.
    """
    first = {
        name: next((c for c in own if c.problem and (c.is_vital or c.name in also)), None)
        for name, own in checks.items()
    }
    problems = _hosts_of_problems({name: [check] for name, check in first.items() if check})
    for problem, names in problems.items():
        more = len(problems) - 1
        others = (
            f" ({more} other problem{'s' * (more > 1)}; --check lists all problems)" if more else ""
        )
        raise StartError(f"host {compress(names)}: {problem}{others}")


def all_problems(checks: Mapping[str, Sequence[Check]]) -> str:
    """Return a sentence for each problem that the checks found, with the names of the hosts."""
    problems = _hosts_of_problems(checks)
    return ". ".join(f"Host {compress(names)}: {text}" for text, names in problems.items())


def grouped_checks(
    checks: Mapping[str, tuple[Check, ...]],
) -> dict[tuple[Check, ...], list[str]]:
    """Return a mapping of check results to the names of the hosts with exactly these results."""
    groups: dict[tuple[Check, ...], list[str]] = {}
    for name, own in checks.items():
        groups.setdefault(own, []).append(name)
    return groups


def _hosts_of_problems(checks: Mapping[str, Sequence[Check]]) -> dict[Problem, list[str]]:
    found: dict[Problem, list[str]] = {}
    for name, own in checks.items():
        for check in own:
            if check.problem is not None:
                found.setdefault(check.problem, []).append(name)
    return found


# --- checks for --check, and after a failed launch ----------------------------------------------


def check_hosts(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
) -> HostChecks:
    """Return the results of all checks that ``--check`` makes.

    Raises:
        UsageError: An option about hosts is not valid, such as ``--ssh-args``.
    """
    shell = shell_of(config, hosts, environ)
    _copy_folders(config, hosts, shell)
    others = [host for host in hosts if not host.is_local]
    with _listening(others, config.host_subnet or "") as call_back:
        request = make_request(config.program, mpirun, call_back)
        reports = request_reports(hosts, shell, request)
    groups = grouped_checks(all_checks(reports, request))
    if not others or not all(report.facts for report in reports.values()):
        return HostChecks(groups=groups)
    interfaces = {name: report.interfaces for name, report in reports.items()}
    try:
        network = network_of_hosts(config, hosts, interfaces)
    except StartError as error:
        return HostChecks(groups=groups, network=str(error), has_network=False)
    sentence = f"Traffic between the hosts goes over {network.name}."
    if not network.name:
        sentence = "The hosts share no network, so MPI chooses how the hosts communicate."
    return HostChecks(groups=groups, network=sentence)


def diagnose(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    network: str = "",
) -> str:
    """Check the hosts as ``--check`` does, to find the reason of a failed launch.

    Returns:
        Sentences about host problems that may be unrelated to the failed launch, or an empty text.

    Raises:
        StartError: A host has a problem that explains the failed launch.
    """
    others = [host for host in hosts if not host.is_local]
    with _listening(others, network or config.host_subnet or "") as call_back:
        request = make_request(config.program, mpirun, call_back)
        reports = request_reports(hosts, shell_of(config, hosts, environ), request)
    checks = all_checks(reports, request)
    raise_first_problem(checks, also=(CALLS_BACK,))
    _require_different_machines(reports)
    return all_problems(checks)


@contextlib.contextmanager
def _listening(others: Sequence[Host], network: str) -> Iterator[tuple[str, int] | None]:
    """Listen for test connections from remote hosts, and yield the listening address and port.

    If this machine cannot listen or there is no remote host, the context manager yields None.
    """
    address = ""
    if others:
        with contextlib.suppress(StartError):
            address = listen_address(others, network)
    if not address:
        yield None
        return
    # The launcher accepts no test connection: the kernel completes connections without accept().
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:
        yield address, server.getsockname()[1]
