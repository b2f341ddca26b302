"""Reports of hosts about themselves, which are requested over ssh and cached in files.

The launcher asks all hosts for reports in parallel. On each remote host, one ssh command runs
probe_script.py. Reports are cached, so that a dry run can plan without contacting hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from popdist_py.atomic_file import write_whole
from poprun_py.machines import probe_script
from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.machines.host_networks import Interface
from poprun_py.machines.machine import HardwareError, Machine
from poprun_py.machines.remote_shell import (
    HostProcess,
    Problem,
    Shell,
    explain_ssh_error,
    started,
)

# The time-out for the report of one host, in seconds.
_REPORT_SECONDS = 10.0
# The time-out for reports is longer by this number of seconds for each ssh process: the key
# exchange of ssh takes 0.07 s of CPU time, and this machine may have a single core.
_SECONDS_PER_SSH = 0.1
_MAX_AT_ONCE = 128
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """The arguments of probe_script.py, which are the same for all hosts.

    ``root`` is the folder with the poprun-py packages. ``program`` is the absolute path of the
    user's program; empty if the user gave no path. ``folder`` is the working folder of the job.
    Hosts report the versions of the Python distributions in ``packages``. ``call_back`` is the
    address and port of the launcher to which hosts open a test connection. If ``leases`` is True,
    hosts also report the jobs that hold CPUs or wait for CPUs.
    """

    root: str = str(_ROOT)
    program: str
    folder: str
    mpirun: str
    packages: tuple[str, ...] = ("mpi4py", "torch", "numpy")
    call_back: tuple[str, int] | None = None
    leases: bool = False


def make_request(
    program: Sequence[str],
    mpirun: str,
    call_back: tuple[str, int] | None = None,
    *,
    leases: bool = False,
) -> ProbeRequest:
    """Return the probe request for a job that runs ``program`` in the working folder."""
    script = program[1] if len(program) > 1 and program[0] == sys.executable else ""
    named = script or (program[0] if program and "/" in program[0] else "")
    return ProbeRequest(
        program=str(Path(named).absolute()) if named and not named.startswith("-") else "",
        folder=str(Path.cwd()),
        mpirun=mpirun,
        call_back=call_back,
        leases=leases,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """The facts that one host reported, or the problem that prevented a report.

    ``facts`` are the JSON values that ``report`` in probe_script.py returns; ``facts`` is empty if
    the host sent no report. ``clock_seconds`` is a lower bound for the error of the host's clock in
    seconds. The exact error is unknown, because a report takes time to arrive.
    """

    host: Host
    facts: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem | None = None
    clock_seconds: float = 0.0

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The host's network addresses."""
        return tuple(Interface(*entry) for entry in self.facts.get("networks", ()))

    @property
    def machine(self) -> Machine | None:
        """The host's hardware; None if it is unknown."""
        with contextlib.suppress(HardwareError):
            return Machine.from_json(self.facts.get("machine"))
        return None

    @property
    def hostname(self) -> str:
        """The host name that the host itself reports; empty if unknown."""
        return str(self.facts.get("host", ""))


def request_reports(
    hosts: Sequence[Host], shell: Shell, request: ProbeRequest
) -> dict[str, HostReport]:
    """Probe all hosts at the same time, and return a mapping of host names to reports."""
    reports = {host.name: own_report(request, host) for host in hosts if host.is_local}
    others = [host for host in hosts if not host.is_local]
    source = Path(probe_script.__file__).read_text(encoding="utf-8")
    arguments = json.dumps(json.dumps(asdict(request)))
    text = f"{source}\nmain(json.loads({arguments}))\n".encode()
    for start in range(0, len(others), _MAX_AT_ONCE):
        batch = others[start : start + _MAX_AT_ONCE]
        commands = {h.name: shell.command(h.name, (sys.executable, "-I", "-")) for h in batch}
        with started(commands, text) as running:
            deadline = time.monotonic() + _REPORT_SECONDS + _SECONDS_PER_SSH * len(batch)
            for host, process in zip(batch, running, strict=True):
                reports[host.name] = _collect(host, process, deadline)
                _cache(reports[host.name])
    return {host.name: reports[host.name] for host in hosts}


def own_report(request: ProbeRequest, host: Host = LOCALHOST) -> HostReport:
    """Return a report about this machine, without a test connection and without leases."""
    facts = probe_script.report(asdict(replace(request, call_back=None, leases=False)))
    return HostReport(host=host, facts={**facts, "files": probe_script.open_files(hard=True)})


def _collect(host: Host, running: HostProcess, deadline: float) -> HostReport:
    """Return a host's report, or a report of a problem if the host does not answer in time."""
    if not running.ends_before(deadline):
        return HostReport(host=host, problem=explain_ssh_error(host.name, "timed out", "ssh"))
    ended = time.time()
    lines = running.output().splitlines()
    line = next((each for each in lines if each.startswith(probe_script.MARK)), "")
    if not line:
        problem = _explain_no_report(host.name, running.process.returncode, running.errors())
        return HostReport(host=host, problem=problem)
    try:
        facts = json.loads(line.removeprefix(probe_script.MARK))
        sent = float(facts["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        problem = explain_ssh_error(host.name, "a damaged answer", sys.executable)
        return HostReport(host=host, problem=problem)
    off = max(0.0, sent - ended, running.began - sent)
    return HostReport(host=host, facts=facts, clock_seconds=off)


def _explain_no_report(host: str, code: int, stderr: str) -> Problem:
    # If the probe printed no report, ssh failed or Python is missing on the host.
    no_python = re.search(r"No such file|not found|Permission denied.*python", stderr)
    # If ssh itself failed (exit code 255), a missing file in the error message is not Python.
    if code in (126, 127) or (no_python and code != 255):
        return Problem(
            f"{sys.executable} does not run on the host",
            "install the same environment at the same path, or copy this environment with "
            "--synchronise-python-venv yes",
        )
    is_of_ssh = code == 255 or "srun:" in stderr
    return explain_ssh_error(host, stderr, "ssh" if is_of_ssh else sys.executable)


# --- cached reports -----------------------------------------------------------------------------


def _cache_file(host: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poprun-py" / "hosts" / f"{host}.json"


def _cache(report: HostReport) -> None:
    if not report.facts:
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
        # Reading a cached report fails if the user has no home folder, or if another version of
        # poprun-py wrote a different format.
        with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
            facts = json.loads(_cache_file(host.name).read_text(encoding="utf-8"))
            if isinstance(facts, dict):
                report = HostReport(host=host, facts=facts)
                if all(interface.subnet for interface in report.interfaces):
                    reports[host.name] = report
    return reports
