"""The facts that a probe reports about a host, and the checks that find problems in a report.

The functions only evaluate reports; probe.py asks the hosts for the reports.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poprun_py.display.formatting import bytes_text
from poprun_py.errors import StartError
from poprun_py.machines.host_list import Host, compress
from poprun_py.machines.host_networks import Interface
from poprun_py.machines.leases import OtherJobs, parse_other_jobs
from poprun_py.machines.machine import HardwareError, Machine
from poprun_py.machines.remote_shell import Problem

# The name of the check that a host can connect to the launcher. Every instance must connect to the
# launcher.
CALLS_BACK = "calls back"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("mpi4py", "torch", "numpy")
_MIN_MEMORY, _MIN_SHM, _MIN_FILES = 512 << 20, 64 << 20, 1024
_MAX_CLOCK_SECONDS = 1.0


# --- reports of the hosts -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """The arguments of a probe, which are the same for all hosts.

    ``root`` is the folder with the poprun-py packages. ``program`` is the path of a file that must
    be readable, or empty. ``folder`` is the working folder of the job. ``packages`` are the Python
    distributions whose versions are reported. ``call_back`` is the launcher's address and port for
    a test connection. ``leases`` tells whether to list the jobs that hold CPUs of the host.
    """

    root: str
    program: str
    folder: str
    mpirun: str
    packages: tuple[str, ...] = _PACKAGES
    call_back: tuple[str, int] | None = None
    leases: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return this request as JSON values."""
        return asdict(self)


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
        root=str(_ROOT),
        program=str(Path(named).absolute()) if named and not named.startswith("-") else "",
        folder=str(Path.cwd()),
        mpirun=mpirun,
        call_back=call_back,
        leases=leases,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """The facts that one host reported, or the problem that prevented a report.

    ``facts`` are the JSON values that ``report`` in probe_script.py returns. ``clock_seconds`` is
    the least possible error of the host's clock in seconds: the exact error is unknown, because a
    report takes time to arrive.
    """

    host: Host
    facts: Mapping[str, Any] | None = None
    problem: Problem | None = None
    clock_seconds: float = 0.0

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The host's network addresses."""
        return tuple(Interface(*entry) for entry in (self.facts or {}).get("networks", ()))

    @property
    def machine(self) -> Machine | None:
        """The host's hardware; None if it is unknown."""
        description = (self.facts or {}).get("machine")
        with contextlib.suppress(HardwareError):
            return Machine.from_json(description) if description is not None else None
        return None

    def other_jobs(self, within: str) -> OtherJobs:
        """Return the other jobs that hold CPUs of the host or wait for them.

        The argument ``within`` has the same meaning as in ``parse_other_jobs``.
        """
        return parse_other_jobs((self.facts or {}).get("leases"), within)

    @property
    def hostname(self) -> str:
        """The host name that the host itself reports; empty if unknown."""
        return str((self.facts or {}).get("host", ""))

    @property
    def has_fabric(self) -> bool:
        """Whether the host has a network that is faster than TCP; True if unknown."""
        return bool((self.facts or {}).get("fabric", True))


# --- checks of a host ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check of one host, with the problem that the check found.

    A launch fails if a vital check finds a problem; the results of other checks are only shown.
    """

    name: str
    text: str
    problem: Problem | None = None
    is_vital: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HostChecks:
    """The results of ``--check`` for each group of hosts with equal results, and for the network.

    ``network`` is a sentence about the network between the hosts, or about a network problem.
    """

    groups: Mapping[tuple[Check, ...], Sequence[str]]
    network: str = ""
    has_network: bool = True

    @property
    def has_passed(self) -> bool:
        """Whether no check found a problem."""
        problems = (check.problem for checks in self.groups for check in checks)
        return self.has_network and not any(problems)


def checks_of(report: HostReport, ours: Mapping[str, Any], request: ProbeRequest) -> list[Check]:
    """Return the results of all checks of a host; ``ours`` are the facts about this machine."""
    reached = Check(name="reached", text="no" if report.problem else "yes", problem=report.problem)
    if report.facts is None:
        return [reached]
    return [reached, *_installation(report.facts, ours, request), *_resources(report)]


def _installation(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], request: ProbeRequest
) -> list[Check]:
    """Check that the host has the same software as this machine, at the same paths."""
    copy = "install the same on every host, or copy it: --synchronise-python-venv yes"
    pairs = [
        ("Python", theirs["python"], ours["python"], copy),
        ("MPI", theirs["mpirun"], ours["mpirun"], f"expected {request.mpirun} there; {copy}"),
        ("poprun-py", theirs["poprun"], ours["poprun"], f"expected in {request.root}; {copy}"),
        *((n, theirs["packages"].get(n, ""), ours["packages"][n], copy) for n in ours["packages"]),
    ]
    checks = [_compare(name, there, here, fix) for name, there, here, fix in pairs if there or here]
    share = "put it on a shared file system, or copy its folder: --sync DIR"
    if request.program:
        state = theirs["program"]
        unusable = Problem(f"{request.program} is {state} there", share)
        problem = None if state == "ok" else unusable
        checks.append(Check(name="program", text=state, problem=problem))
    missing = Problem(f"the working folder {request.folder} is missing there", share)
    folder = ("ok", None) if theirs["folder"] else ("missing", missing)
    return [*checks, Check(name="folder", text=folder[0], problem=folder[1])]


def _compare(name: str, there: str, here: str, fix: str) -> Check:
    short = there.rpartition(" ")[2] if name == "MPI" else there
    if there == here:
        return Check(name=name, text=short)
    text = f"{name} is {there or 'missing'} there and {here or 'none'} here"
    return Check(name=name, text=short or "missing", problem=Problem(text, fix))


def _resources(report: HostReport) -> list[Check]:
    """Check the network, clock, memory and limits of a host; problems do not prevent a launch."""
    facts = report.facts or {}
    interface = next((i for i in report.interfaces if i.carries_traffic), None)
    off = report.clock_seconds

    def judge(name: str, text: str, is_good: bool, problem: str, fix: str) -> Check:
        return Check(
            name=name,
            text=text,
            problem=None if is_good else Problem(problem, fix),
            is_vital=False,
        )

    memory, shm, files = facts.get("memory"), facts.get("shm"), facts.get("files")
    checks = [
        judge("network", interface.name if interface else "none", interface is not None,
              "no network but loopback is up", "check: ip address"),
        judge("clock", "ok" if off <= _MAX_CLOCK_SECONDS else f"{off:.1f} s off",
              off <= _MAX_CLOCK_SECONDS, f"its clock is {off:.1f} s off", "run an NTP client"),
        judge("free memory", _size(memory), memory is None or memory >= _MIN_MEMORY,
              f"only {_size(memory)} of memory are free", "end other programs there"),
        judge("/dev/shm", _size(shm), shm is not None and shm >= _MIN_SHM,
              f"/dev/shm has {_size(shm)} free", "enlarge it: mount -o remount,size=1G /dev/shm"),
        judge("open files", "unlimited" if files is None else str(files),
              files is None or files >= _MIN_FILES, f"at most {files} open files",
              "raise the limit: ulimit -n 65536, or nofile in /etc/security/limits.conf"),
    ]  # fmt: skip
    back = facts.get("called_back")
    if back is not None:
        checks.append(
            judge(CALLS_BACK, "yes" if back else "no", back,
                  "it cannot open a connection to this machine",
                  "open the firewall, or choose the network: --host-subnet")
        )  # fmt: skip
    return checks


def _size(count: int | None) -> str:
    # Memory sizes are rounded to whole units. Hosts with slightly different sizes then have equal
    # results, and --check shows these hosts as one group.
    return "unknown" if count is None else bytes_text(count, decimals=0)


def raise_first_problem(
    reports: Mapping[str, HostReport],
    ours: Mapping[str, Any],
    request: ProbeRequest,
    *,
    also: Sequence[str] = (),
) -> None:
    """Raise an error if a host fails a vital check, or one of the checks named in ``also``.

    Raises:
        StartError: A host has a problem. The message describes the first problem found and names
            all hosts that have this problem.
    """
    problems: dict[Problem, list[str]] = {}
    for name, report in reports.items():
        for check in checks_of(report, ours, request):
            if check.problem is not None and (check.is_vital or check.name in also):
                problems.setdefault(check.problem, []).append(name)
                break
    for problem, names in problems.items():
        more = len(problems) - 1
        others = f" ({more} other problem{'s' * (more > 1)}: --check lists all)" if more else ""
        raise StartError(f"host {compress(names)}: {problem}{others}")


def all_problems(
    reports: Mapping[str, HostReport], ours: Mapping[str, Any], request: ProbeRequest
) -> str:
    """Return one sentence for each problem of each host."""
    problems: dict[Problem, list[str]] = {}
    for name, report in reports.items():
        for check in checks_of(report, ours, request):
            if check.problem is not None:
                problems.setdefault(check.problem, []).append(name)
    return ". ".join(f"Host {compress(names)}: {text}" for text, names in problems.items())


def grouped_checks(
    reports: Mapping[str, HostReport], ours: Mapping[str, Any], request: ProbeRequest
) -> dict[tuple[Check, ...], list[str]]:
    """Return a mapping of check results to the names of the hosts with exactly these results."""
    groups: dict[tuple[Check, ...], list[str]] = {}
    for name, report in reports.items():
        groups.setdefault(tuple(checks_of(report, ours, request)), []).append(name)
    return groups
