"""Probes, which ask the hosts for facts about themselves, for a launch or for ``--check``.

All hosts are probed in parallel. On each host, one ssh command runs probe_script.py. Reports are
cached, so that a dry run can plan for a host without contacting it. host_checks.py finds the
problems that a report shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from popdist_py.atomic_file import write_whole
from popdist_py.environment import RUN_ID
from poprun_py.errors import StartError
from poprun_py.machines import probe_script
from poprun_py.machines.folder_sync import environment_folder, folder_to_sync, sync_folder
from poprun_py.machines.host_checks import (
    CALLS_BACK,
    HostChecks,
    HostReport,
    ProbeRequest,
    all_problems,
    grouped_checks,
    make_request,
    raise_first_problem,
)
from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.machines.host_networks import (
    Network,
    listen_address,
    network_of_hosts,
    own_address,
)
from poprun_py.machines.leases import OtherJobs
from poprun_py.machines.machine import Machine
from poprun_py.machines.remote_shell import (
    Problem,
    Shell,
    end_process,
    explain_ssh_error,
    read_back,
    scratch_file,
    shell_of,
)
from poprun_py.options.launch_config import LaunchConfig

# The time-out for the report of one host, in seconds. The time-out prevents a hung host from
# delaying the launch.
_REPORT_SECONDS = 10.0
# The time-out for reports increases by this number of seconds for each ssh process, because a key
# exchange takes 0.07 s of CPU time and this machine may have a single core.
_SECONDS_PER_SSH = 0.1
_MAX_AT_ONCE = 128


# --- probes for a launch ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedHosts:
    """The known facts about the hosts of a launch, and how the hosts are reached.

    ``shell`` runs commands on the hosts. ``network`` is the network between the hosts, and
    ``mpi_network`` is the name of this network for MPI; an empty name lets MPI choose a network.
    ``shares_network`` tells whether this machine is on ``network``, so that MPI's daemons can also
    use the network. ``own_address`` is this machine's address on ``network``. The keys of
    ``addresses``, ``machines``, ``hostnames`` and ``other_jobs`` are the hosts' names in the
    options; hosts without a known value are left out. ``has_fabric`` tells whether at least one
    host has, or may have, a network that is faster than TCP. ``other_jobs`` are the other jobs that
    hold or await CPUs of each host.
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


def probe_hosts(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    contact: bool,
) -> ProbedHosts:
    """Return the known facts about ``hosts``.

    With ``contact``, the folder of ``--sync`` is copied to the hosts, and the hosts are probed.
    Without ``contact``, only cached reports are used.

    Raises:
        UsageError: Options for hosts contradict each other.
        StartError: A host cannot be reached, fails a vital check, or is not on the network.
    """
    shell = shell_of(config, hosts, environ)
    others = [host for host in hosts if not host.is_local]
    reports = cached_reports(hosts)
    if contact:
        _copy_folders(config, hosts, shell)
        if not config.no_check or any(host.name not in reports for host in others):
            reports = _require_reports(config, hosts, shell, mpirun)
    network, shares_network = _network(config, hosts, reports)
    return ProbedHosts(
        shell=shell,
        network=network.name,
        mpi_network=network.mpi_name,
        shares_network=shares_network,
        own_address=own_address(hosts, network),
        addresses=network.addresses,
        machines={name: machine for name, report in reports.items() if (machine := report.machine)},
        hostnames=_hostnames(hosts, reports),
        has_fabric=any(h.name not in reports or reports[h.name].has_fabric for h in others),
        other_jobs=_other_jobs(others, reports, environ),
    )


def probe_other_jobs(
    config: LaunchConfig, hosts: Sequence[Host], *, mpirun: str, environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    """Ask all hosts except this machine again for the jobs that hold or await CPUs.

    Hosts that do not answer are left out of the result.

    Raises:
        StartError: The command ssh cannot be run.
    """
    others = [host for host in hosts if not host.is_local]
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(others, shell_of(config, hosts, environ), request)
    return _other_jobs(others, reports, environ)


def _other_jobs(
    others: Sequence[Host], reports: Mapping[str, HostReport], environ: Mapping[str, str]
) -> dict[str, OtherJobs]:
    within = environ.get(RUN_ID, "")
    found = {h.name: reports[h.name].other_jobs(within) for h in others if h.name in reports}
    return {name: jobs for name, jobs in found.items() if any(jobs)}


def _require_reports(
    config: LaunchConfig, hosts: Sequence[Host], shell: Shell, mpirun: str
) -> dict[str, HostReport]:
    """Probe the hosts; unless ``--no-check`` is given, raise StartError if a vital check fails."""
    request = make_request(config.program, mpirun, leases=True)
    reports = request_reports(hosts, shell, request)
    if not config.no_check:
        raise_first_problem(reports, own_report(request).facts or {}, request)
    _require_different_machines(reports)
    return reports


def _require_different_machines(reports: Mapping[str, HostReport]) -> None:
    """Raise StartError if two hosts are the same machine, because mpirun would wait forever."""
    seen: dict[object, str] = {}
    for name, report in reports.items():
        addresses = frozenset(i.address for i in report.interfaces if i.carries_traffic)
        other = seen.setdefault((report.hostname, addresses), name)
        if addresses and other != name:
            raise StartError(
                f"hosts {other} and {name} are the same machine ({report.hostname}); name it once, "
                "with name:slots for several instances"
            )


def _copy_folders(config: LaunchConfig, hosts: Sequence[Host], shell: Shell) -> None:
    if config.synchronise_python_venv:
        sync_folder(
            environment_folder(config.shown("synchronise_python_venv")),
            hosts,
            shell,
            links_out=True,
        )
    if config.sync is not None:
        sync_folder(folder_to_sync(config.sync, config.named("sync")), hosts, shell)


def _network(
    config: LaunchConfig, hosts: Sequence[Host], reports: Mapping[str, HostReport]
) -> tuple[Network, bool]:
    return network_of_hosts(
        hosts,
        {name: report.interfaces for name, report in reports.items()},
        wanted=config.host_subnet,
        option=config.named("host_subnet"),
    )


def _hostnames(hosts: Sequence[Host], reports: Mapping[str, HostReport]) -> dict[str, str]:
    """Return the host name that each host reports for itself and that its instances use."""
    here = socket.gethostname()
    names = {
        h.name: here if h.is_local else reports[h.name].hostname
        for h in hosts
        if h.is_local or h.name in reports
    }
    return {name: hostname for name, hostname in names.items() if hostname}


# --- probes for --check and failed launches -----------------------------------------------------


def check_hosts(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
) -> HostChecks:
    """Return the results of ``--check``, with the problems of the hosts.

    Raises:
        UsageError: Options for hosts contradict each other.
    """
    shell = shell_of(config, hosts, environ)
    _copy_folders(config, hosts, shell)
    others = [host for host in hosts if not host.is_local]
    with _listening(others, config.host_subnet or "") as call_back:
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


def diagnose(
    config: LaunchConfig,
    hosts: Sequence[Host],
    *,
    mpirun: str,
    environ: Mapping[str, str],
    network: str = "",
) -> str:
    """Search for the reason of a failed launch, with the checks of ``--check``.

    Returns:
        Sentences about problems of the hosts that may be unrelated to the failure, or an empty
        text.

    Raises:
        StartError: A host has a problem that explains the failure.
    """
    others = [host for host in hosts if not host.is_local]
    with _listening(others, network or config.host_subnet or "") as call_back:
        request = make_request(config.program, mpirun, call_back)
        reports = request_reports(hosts, shell_of(config, hosts, environ), request)
    ours = own_report(request).facts or {}
    raise_first_problem(reports, ours, request, also=(CALLS_BACK,))
    _require_different_machines(reports)
    return all_problems(reports, ours, request)


@contextlib.contextmanager
def _listening(others: Sequence[Host], network: str) -> Iterator[tuple[str, int] | None]:
    """Listen for test connections of the other hosts.

    Yields the pair of address and port, or None if listening is impossible or there is no other
    host.
    """
    with contextlib.ExitStack() as stack:
        call_back = None
        if others:
            with contextlib.suppress(StartError):
                address = listen_address(others, network)
                # The connections are never accepted: the kernel completes them, and a completed
                # connection is enough to show that a host can connect.
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                server = stack.enter_context(
                    socket.create_server((address, 0), family=family, backlog=128)
                )
                call_back = (address, server.getsockname()[1])
        yield call_back


# --- probe requests, and reports of hosts -------------------------------------------------------


def request_reports(
    hosts: Sequence[Host],
    shell: Shell,
    request: ProbeRequest,
    *,
    limit_seconds: float = _REPORT_SECONDS,
) -> dict[str, HostReport]:
    """Probe all hosts at the same time, and return a mapping of host names to reports."""
    reports = {host.name: own_report(request, host) for host in hosts if host.is_local}
    others = [host for host in hosts if not host.is_local]
    for start in range(0, len(others), _MAX_AT_ONCE):
        batch = others[start : start + _MAX_AT_ONCE]
        reports |= _request_batch(batch, shell, request, limit_seconds)
    for report in reports.values():
        _cache(report)
    return {host.name: reports[host.name] for host in hosts}


def own_report(request: ProbeRequest, host: Host = LOCALHOST) -> HostReport:
    """Return a report about this machine, without a test connection and without leases."""
    facts = probe_script.report(replace(request, call_back=None, leases=False).to_json())
    return HostReport(host=host, facts={**facts, "files": probe_script.open_files(hard=True)})


@dataclass(frozen=True, slots=True)
class _Pending:
    """A running probe of a host, with its start time, its process and the process's output."""

    host: Host
    began: float
    out: IO[bytes]
    err: IO[bytes]
    process: subprocess.Popen[bytes]


def _request_batch(
    hosts: Sequence[Host], shell: Shell, request: ProbeRequest, limit_seconds: float
) -> dict[str, HostReport]:
    source = Path(probe_script.__file__).read_text(encoding="utf-8")
    text = f"{source}\nmain(json.loads({json.dumps(json.dumps(request.to_json()))}))\n".encode()
    with contextlib.ExitStack() as stack:
        pending = []
        for host in hosts:
            command = shell.command(host.name, (sys.executable, "-I", "-"))
            out, err = stack.enter_context(scratch_file()), stack.enter_context(scratch_file())
            process = _start(command, text, out, err)
            stack.callback(end_process, process)
            pending.append(_Pending(host, time.time(), out, err, process))
        deadline = time.monotonic() + limit_seconds + _SECONDS_PER_SSH * len(hosts)
        return {one.host.name: _collect(one, deadline) for one in pending}


def _start(
    command: tuple[str, ...], text: bytes, out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
    except OSError as error:
        raise StartError(
            f"cannot run {command[0]} to reach other hosts: {error.strerror}; install it"
        ) from None
    assert process.stdin is not None
    # The script fits into the pipe's buffer in the kernel, so writing never waits for a host.
    # os.write bypasses Python's buffer, because flushing that buffer fails if the process has
    # already ended.
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), text)
    process.stdin.close()
    process.stdin = None
    return process


def _collect(pending: _Pending, deadline: float) -> HostReport:
    """Return a host's report; without an answer before ``deadline``, the report has a problem."""
    host, process = pending.host, pending.process
    try:
        process.wait(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        end_process(process)
        return HostReport(host=host, problem=explain_ssh_error(host.name, "timed out", "ssh"))
    ended = time.time()
    lines = read_back(pending.out).decode(errors="replace").splitlines()
    line = next((each for each in lines if each.startswith(probe_script.MARK)), "")
    if not line:
        problem = _explain_no_report(host.name, process.returncode, read_back(pending.err))
        return HostReport(host=host, problem=problem)
    try:
        facts = json.loads(line.removeprefix(probe_script.MARK))
        sent = float(facts["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        problem = explain_ssh_error(host.name, "a damaged answer", sys.executable)
        return HostReport(host=host, problem=problem)
    off = max(0.0, sent - ended, pending.began - sent)
    return HostReport(host=host, facts=facts, clock_seconds=off)


def _explain_no_report(host: str, code: int, stderr: bytes) -> Problem:
    # If the probe printed no report, ssh failed or Python is missing on the host.
    text = stderr.decode(errors="replace")
    no_python = re.search(r"No such file|not found|Permission denied.*python", text)
    # With exit code 255, ssh itself failed, and a missing file in its error message is a file of
    # ssh, not Python.
    if code in (126, 127) or (no_python and code != 255):
        return Problem(
            f"{sys.executable} does not run there",
            "install the same environment at the same path, or copy it: --synchronise-python-venv "
            "yes",
        )
    if code == 255 or "srun:" in text:
        return explain_ssh_error(host, text, "ssh")
    return explain_ssh_error(host, text, sys.executable)


# --- cached reports -----------------------------------------------------------------------------


def _cache_file(host: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poprun-py" / "hosts" / f"{host}.json"


def _cache(report: HostReport) -> None:
    if report.facts is None or report.host.is_local:
        return
    with contextlib.suppress(OSError, RuntimeError):
        # Leases in reports are not cached, because jobs may take or return CPUs before the cached
        # report is read.
        facts = {**report.facts, "leases": []}
        path = _cache_file(report.host.name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(facts))


def cached_reports(hosts: Iterable[Host]) -> dict[str, HostReport]:
    """Return the cached reports of earlier probes; hosts without a valid report are left out."""
    reports = {}
    for host in hosts:
        # The user may lack a home folder, or another version of poprun-py may have written a
        # different format.
        with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
            facts = json.loads(_cache_file(host.name).read_text(encoding="utf-8"))
            if isinstance(facts, dict):
                report = HostReport(host=host, facts=facts)
                if all(interface.subnet for interface in report.interfaces):
                    reports[host.name] = report
    return reports
