"""What is wrong with a host, decided from its report and this machine's own.

Pure: reports in, checks out. probe_hosts.py asks the hosts; planning/views shows the checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poprun_py.errors import StartError
from poprun_py.machines.host_list import compress
from poprun_py.machines.host_report import HostReport, Request
from poprun_py.machines.remote_shell import Problem

_MIB, _GIB = 1 << 20, 1 << 30
_MIN_MEMORY, _MIN_SHM, _MIN_FILES = 512 * _MIB, 64 * _MIB, 1024
_MAX_CLOCK_SECONDS = 1.0
# The name of the check that a host can connect to the launcher: every instance has to.
CALLS_BACK = "calls back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing checked on one host, with the problem if there is one.

    ``is_vital`` tells what a launch needs from what only ``--check`` reports.
    """

    name: str
    text: str
    problem: Problem | None = None
    is_vital: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HostChecks:
    """What ``--check`` found: the checks of each group of equal hosts, and the network.

    ``network`` is the sentence about the traffic between several hosts, or what is wrong there.
    """

    groups: Mapping[tuple[Check, ...], Sequence[str]]
    network: str = ""
    has_network: bool = True

    @property
    def is_well(self) -> bool:
        """Whether a launch could start on these hosts."""
        problems = (check.problem for checks in self.groups for check in checks)
        return self.has_network and not any(problems)


def checks_of(report: HostReport, ours: Mapping[str, Any], request: Request) -> list[Check]:
    """Return everything that is checked on a host.

    Args:
        report: the host's report.
        ours: the facts of this machine's own report.
        request: what both were asked.
    """
    reached = Check(name="reached", text="no" if report.problem else "yes", problem=report.problem)
    if report.facts is None:
        return [reached]
    return [reached, *_environment(report.facts, ours, request), *_condition(report)]


def _environment(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], request: Request
) -> list[Check]:
    """Check that the host has what this machine has, at the same place and in the same version."""
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
    """Compare a version there with the one here."""
    short = there.rpartition(" ")[2] if name == "MPI" else there
    if there == here:
        return Check(name=name, text=short)
    text = f"{name} is {there or 'missing'} there and {here or 'none'} here"
    return Check(name=name, text=short or "missing", problem=Problem(text, fix))


def _condition(report: HostReport) -> list[Check]:
    """Check what a host has enough of; a launch may still be tried without."""
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
              f"only {_size(memory)} of memory are free", "end what else runs there"),
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
    if count is None:
        return "unknown"
    return f"{count / _GIB:.0f} GiB" if count >= 10 * _GIB else f"{count / _MIB:.0f} MiB"


def require(
    reports: Mapping[str, HostReport],
    ours: Mapping[str, Any],
    request: Request,
    *,
    also: Sequence[str] = (),
) -> None:
    """Raise an error if a host fails a vital check, or one of the checks named in ``also``.

    Raises:
        StartError: the first problem, with the names of all hosts that have the same one.
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


def doubts(reports: Mapping[str, HostReport], ours: Mapping[str, Any], request: Request) -> str:
    """Return sentences with every problem of every host; empty if there are no problems."""
    problems: dict[Problem, list[str]] = {}
    for name, report in reports.items():
        for check in checks_of(report, ours, request):
            if check.problem is not None:
                problems.setdefault(check.problem, []).append(name)
    return ". ".join(f"Host {compress(names)}: {text}" for text, names in problems.items())


def grouped_checks(
    reports: Mapping[str, HostReport], ours: Mapping[str, Any], request: Request
) -> dict[tuple[Check, ...], list[str]]:
    """Return the names of the hosts by their checks: equal hosts are one group."""
    groups: dict[tuple[Check, ...], list[str]] = {}
    for name, report in reports.items():
        groups.setdefault(tuple(checks_of(report, ours, request)), []).append(name)
    return groups
