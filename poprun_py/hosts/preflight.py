"""Looks at every host before a launch: one question to each in parallel, then cells, red or not.

``ask`` is the only part that starts processes; what is wrong is decided by pure functions of the
answers. The hardware in the answers is what placement is planned for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from poprun_py.errors import StartError
from poprun_py.hosts import host_probe
from poprun_py.hosts.host_list import Host, compress
from poprun_py.hosts.network_choice import Interface
from poprun_py.hosts.remote_shell import Problem, Shell, explain, read_back, scratch_file

__all__ = ["Answer", "Cell", "ask", "cached", "cells", "check_table", "question", "require"]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("mpi4py", "torch", "numpy")
# One host that hangs must not hold the launch for longer than a user waits for a message.
_ANSWER_SECONDS = 10.0
_AT_ONCE = 128
_MIB, _GIB = 1 << 20, 1 << 30
_MIN_MEMORY, _MIN_SHM, _MIN_FILES = 512 * _MIB, 64 * _MIB, 1024
_MAX_CLOCK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one host said, or why it said nothing.

    ``clock_seconds`` is how far its clock is off at least: an answer takes time to arrive.
    """

    host: Host
    report: Mapping[str, Any] | None = None
    problem: Problem | None = None
    clock_seconds: float = 0.0

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The host's IPv4 addresses."""
        return tuple(Interface(*entry) for entry in (self.report or {}).get("networks", ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One thing checked on one host; red where there is a problem.

    ``is_vital`` tells what a launch cannot do without from what only ``--check`` complains about.
    """

    name: str
    text: str
    problem: Problem | None = None
    is_vital: bool = True


def question(
    program: Sequence[str], mpirun: str, call_back: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Return what every host is asked; the keys are described in host_probe.py."""
    script = program[1] if len(program) > 1 and program[0] == sys.executable else ""
    named = script or (program[0] if program and "/" in program[0] else "")
    return {
        "root": str(_ROOT),
        "program": str(Path(named).absolute()) if named and not named.startswith("-") else "",
        "folder": str(Path.cwd()),
        "mpirun": mpirun,
        "call_back": list(call_back) if call_back else None,
        "packages": list(_PACKAGES),
    }


# --- asking -----------------------------------------------------------------------------------


def ask(
    hosts: Sequence[Host],
    shell: Shell,
    asked: Mapping[str, Any],
    *,
    limit_seconds: float = _ANSWER_SECONDS,
) -> dict[str, Answer]:
    """Ask every host at the same time and return the answers by host name."""
    answers = {host.name: _answer_here(host, asked) for host in hosts if host.is_local}
    others = [host for host in hosts if not host.is_local]
    for start in range(0, len(others), _AT_ONCE):
        answers |= _ask_batch(others[start : start + _AT_ONCE], shell, asked, limit_seconds)
    for answer in answers.values():
        _remember(answer)
    return {host.name: answers[host.name] for host in hosts}


def _answer_here(host: Host, asked: Mapping[str, Any]) -> Answer:
    return Answer(host=host, report=host_probe.report({**asked, "call_back": None}))


def _ask_batch(
    hosts: Sequence[Host], shell: Shell, asked: Mapping[str, Any], limit_seconds: float
) -> dict[str, Answer]:
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    text = f"{source}\nmain(json.loads({json.dumps(json.dumps(asked))}))\n".encode()
    with contextlib.ExitStack() as stack:
        started = []
        for host in hosts:
            command = shell.command(host.name, (sys.executable, "-I", "-"))
            out, err = stack.enter_context(scratch_file()), stack.enter_context(scratch_file())
            process = _start(command, text, out, err)
            stack.callback(_end, process)
            started.append((_Asked(host, time.time(), out, err), process))
        deadline = time.monotonic() + limit_seconds
        return {asked.host.name: _collect(asked, p, deadline) for asked, p in started}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A host that was asked: when, and the files that take what is said."""

    host: Host
    begun: float
    out: IO[bytes]
    err: IO[bytes]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


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
    # Small enough for the pipe, so that this never waits for a host. Nothing of it may be left in a
    # buffer: who has ended already would be complained of when that is flushed.
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), text)
    process.stdin.close()
    process.stdin = None
    return process


def _collect(asked: _Asked, process: subprocess.Popen[bytes], deadline: float) -> Answer:
    host = asked.host
    try:
        process.wait(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return Answer(host=host, problem=explain(host.name, "timed out", "ssh"))
    ended = time.time()
    out, err = read_back(asked.out), read_back(asked.err)
    line = next(
        (
            text
            for text in out.decode(errors="replace").splitlines()
            if text.startswith(host_probe.MARK)
        ),
        "",
    )
    if not line:
        return Answer(host=host, problem=_no_report(host.name, process.returncode, err))
    try:
        report = json.loads(line.removeprefix(host_probe.MARK))
    except ValueError:
        return Answer(host=host, problem=explain(host.name, "a damaged answer", sys.executable))
    off = max(0.0, report["time"] - ended, asked.begun - report["time"])
    return Answer(host=host, report=report, clock_seconds=off)


def _no_report(host: str, code: int, stderr: bytes) -> Problem:
    """Say why a host gave no report: ssh itself, or no such Python there."""
    said = stderr.decode(errors="replace")
    no_python = re.search(r"No such file|not found|Permission denied.*python", said)
    # With 255 it is ssh that failed, and the file that it misses is its own.
    if code in (126, 127) or (no_python and code != 255):
        return Problem(
            f"{sys.executable} does not run there",
            "install the same environment at the same path, or copy it: --synchronise-python-venv "
            "yes",
        )
    if code == 255 or "srun:" in said:
        return explain(host, said, "ssh")
    return explain(host, said, sys.executable)


# --- remembered answers -----------------------------------------------------------------------


def _cache_file(host: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poprun-py" / "hosts" / f"{host}.json"


def _remember(answer: Answer) -> None:
    """Keep a report, so that a dry run can plan for the host without contacting it."""
    if answer.report is None or answer.host.is_local:
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache_file(answer.host.name)
        temporary = path.with_suffix(f".{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(answer.report), encoding="utf-8")
        temporary.replace(path)


def cached(hosts: Iterable[Host]) -> dict[str, Answer]:
    """Return what is remembered of hosts from an earlier look at them."""
    known = {}
    for host in hosts:
        # Without a home nothing is remembered; what another version wrote may look otherwise.
        with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
            report = json.loads(_cache_file(host.name).read_text(encoding="utf-8"))
            if isinstance(report, dict):
                answer = Answer(host=host, report=report)
                if all(interface.subnet for interface in answer.interfaces):
                    known[host.name] = answer
    return known


# --- deciding ---------------------------------------------------------------------------------


def cells(answer: Answer, ours: Mapping[str, Any], asked: Mapping[str, Any]) -> list[Cell]:
    """Return everything that was checked on a host, compared with this machine's own report."""
    reach = Cell(name="reached", text="no" if answer.problem else "yes", problem=answer.problem)
    if answer.report is None:
        return [reach]
    return [reach, *_environment(answer.report, ours, asked), *_condition(answer)]


def _environment(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[Cell]:
    """Check that the host has what this machine has, at the same place and in the same version."""
    copy = "install the same on every host, or copy it: --synchronise-python-venv yes"
    pairs = [
        ("Python", theirs["python"], ours["python"], copy),
        ("MPI", theirs["mpirun"], ours["mpirun"], f"expected {asked['mpirun']} there; {copy}"),
        ("poprun-py", theirs["poprun"], ours["poprun"], f"expected in {asked['root']}; {copy}"),
        *((n, theirs["packages"].get(n, ""), ours["packages"][n], copy) for n in ours["packages"]),
    ]
    found = [
        _same(name, given, wanted, fix) for name, given, wanted, fix in pairs if wanted or given
    ]
    share = "put it on a shared file system, or copy its folder: --sync DIR"
    if asked["program"]:
        state = theirs["program"]
        text = f"{asked['program']} is {state} there"
        found.append(
            Cell(
                name="program", text=state, problem=None if state == "ok" else Problem(text, share)
            )
        )
    text = "ok" if theirs["folder"] else "missing"
    missing = Problem(f"the working folder {asked['folder']} is missing there", share)
    return [
        *found,
        Cell(name="folder", text=text, problem=None if theirs["folder"] else missing),
    ]


def _same(name: str, given: str, wanted: str, fix: str) -> Cell:
    short = given.rpartition(" ")[2] if name == "MPI" else given
    if given == wanted:
        return Cell(name=name, text=short)
    here = wanted or "none"
    text = f"{name} is {given or 'missing'} there and {here} here"
    return Cell(name=name, text=short or "missing", problem=Problem(text, fix))


def _condition(answer: Answer) -> list[Cell]:
    """Check what a host has enough of; a launch may still be tried without."""
    report = answer.report or {}
    interface = next((i for i in answer.interfaces if i.carries_traffic), None)
    off = answer.clock_seconds

    def judge(name: str, text: str, is_good: bool, problem: str, fix: str) -> Cell:
        return Cell(
            name=name,
            text=text,
            problem=None if is_good else Problem(problem, fix),
            is_vital=False,
        )

    memory, shm, files = report.get("memory"), report.get("shm"), report.get("files")
    found = [
        judge("network", interface.name if interface else "none", interface is not None,
              "no IPv4 network but loopback is up", "check: ip address"),
        judge("clock", "ok" if off <= _MAX_CLOCK_SECONDS else f"{off:.1f} s off",
              off <= _MAX_CLOCK_SECONDS, f"its clock is {off:.1f} s off", "run an NTP client"),
        judge("free memory", _size(memory), memory is None or memory >= _MIN_MEMORY,
              f"only {_size(memory)} of memory are free", "end what else runs there"),
        judge("/dev/shm", _size(shm), shm is not None and shm >= _MIN_SHM,
              f"/dev/shm has {_size(shm)} free", "enlarge it: mount -o remount,size=1G /dev/shm"),
        judge("open files", "unlimited" if files is None else str(files),
              files is None or files >= _MIN_FILES, f"at most {files} open files",
              "raise the limit: ulimit -Hn 65536"),
    ]  # fmt: skip
    back = report.get("called_back")
    if back is not None:
        found.append(
            judge("calls back", "yes" if back else "no", back,
                  "it cannot open a connection to this machine",
                  "open the firewall, or choose the network: --host-subnet")
        )  # fmt: skip
    return found


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / _GIB:.0f} GiB" if count >= 10 * _GIB else f"{count / _MIB:.0f} MiB"


def require(
    answers: Mapping[str, Answer], ours: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Refuse a launch for which a host lacks something vital.

    Raises:
        StartError: the first problem, with the names of all hosts that have the same one.
    """
    problems: dict[Problem, list[str]] = {}
    for name, answer in answers.items():
        for cell in cells(answer, ours, asked):
            if cell.problem is not None and cell.is_vital:
                problems.setdefault(cell.problem, []).append(name)
                break
    for problem, names in problems.items():
        more = len(problems) - 1
        others = f" ({more} other problem{'s' * (more > 1)}: --check lists all)" if more else ""
        raise StartError(f"host {compress(names)}: {problem}{others}")


# --- showing ----------------------------------------------------------------------------------


def check_table(
    answers: Mapping[str, Answer],
    ours: Mapping[str, Any],
    asked: Mapping[str, Any],
    *,
    mark: Callable[[str], str] = str,
) -> tuple[str, bool]:
    """Return the table of ``--check`` with a fix for every red cell, and whether all is well.

    Hosts whose columns are equal share one column.

    Args:
        answers: what the hosts said.
        ours: this machine's own report.
        asked: the question.
        mark: colours a red cell.
    """
    columns: dict[tuple[Cell, ...], list[str]] = {}
    for name, answer in answers.items():
        columns.setdefault(tuple(cells(answer, ours, asked)), []).append(name)
    rows = list(dict.fromkeys(cell.name for column in columns for cell in column))
    lines = _grid(rows, columns, mark)
    fixes = [
        f"{compress(names)}: {cell.problem}"
        for column, names in columns.items()
        for cell in column
        if cell.problem
    ]
    return "\n".join([*lines, *(["", *fixes] if fixes else [])]), not fixes


def _grid(
    rows: Sequence[str], columns: Mapping[tuple[Cell, ...], list[str]], mark: Callable[[str], str]
) -> list[str]:
    """Return the lines of a table: one row a check, one column a group of equal hosts."""
    lines = ["", *rows]
    width = max(map(len, lines))
    lines = [line.ljust(width) for line in lines]
    for column, names in columns.items():
        by_name = {cell.name: cell for cell in column}
        found = [by_name.get(row, Cell(name=row, text="?")) for row in rows]
        title = compress(names)
        width = max([len(title), *(len(cell.text) for cell in found)])
        lines[0] += f"    {title.ljust(width)}"
        for number, cell in enumerate(found, start=1):
            text = cell.text.ljust(width)
            lines[number] += "  ! " + mark(text) if cell.problem else "    " + text
    return [line.rstrip() for line in lines]
