"""Asks every host before a launch: one request to each in parallel, and remembers the reports.

The only module that starts processes to look at other hosts. What is wrong with one is decided in
host_checks.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from popdist_py.atomic_file import write_whole
from poprun_py.errors import StartError
from poprun_py.machines import host_probe
from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.machines.host_report import HostReport, Request
from poprun_py.machines.remote_shell import Problem, Shell, explain, read_back, scratch_file

# One host that hangs must not hold the launch for longer than a user waits for a message.
_REPORT_SECONDS = 10.0
# Agreeing on keys takes ssh 0.07 s of CPU time, and this machine may have a single core for all.
_SECONDS_OF_SSH = 0.1
_AT_ONCE = 128


def request_reports(
    hosts: Sequence[Host],
    shell: Shell,
    request: Request,
    *,
    limit_seconds: float = _REPORT_SECONDS,
) -> dict[str, HostReport]:
    """Ask every host at the same time and return the reports by host name."""
    reports = {host.name: own_report(request, host) for host in hosts if host.is_local}
    others = [host for host in hosts if not host.is_local]
    for start in range(0, len(others), _AT_ONCE):
        reports |= _request_batch(others[start : start + _AT_ONCE], shell, request, limit_seconds)
    for report in reports.values():
        _remember(report)
    return {host.name: reports[host.name] for host in hosts}


def own_report(request: Request, host: Host = LOCALHOST) -> HostReport:
    """Return this machine's own report; it does not call itself back."""
    facts = host_probe.report(replace(request, call_back=None, leases=False).to_json())
    return HostReport(host=host, facts={**facts, "files": host_probe.open_files(hard=True)})


def _request_batch(
    hosts: Sequence[Host], shell: Shell, request: Request, limit_seconds: float
) -> dict[str, HostReport]:
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    text = f"{source}\nmain(json.loads({json.dumps(json.dumps(request.to_json()))}))\n".encode()
    with contextlib.ExitStack() as stack:
        pending = []
        for host in hosts:
            command = shell.command(host.name, (sys.executable, "-I", "-"))
            out, err = stack.enter_context(scratch_file()), stack.enter_context(scratch_file())
            process = _start(command, text, out, err)
            stack.callback(_end, process)
            pending.append(_Pending(host, time.time(), out, err, process))
        deadline = time.monotonic() + limit_seconds + _SECONDS_OF_SSH * len(hosts)
        return {one.host.name: _collect(one, deadline) for one in pending}


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request under way: since when, and the files that take what its process writes."""

    host: Host
    begun: float
    out: IO[bytes]
    err: IO[bytes]
    process: subprocess.Popen[bytes]


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
    # The text fits into the pipe, so that this never waits for a host. It is not buffered: flushing
    # a buffer would fail for a process that has ended already.
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), text)
    process.stdin.close()
    process.stdin = None
    return process


def _collect(pending: _Pending, deadline: float) -> HostReport:
    """Wait for a host's report until ``deadline``."""
    host, process = pending.host, pending.process
    try:
        process.wait(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return HostReport(host=host, problem=explain(host.name, "timed out", "ssh"))
    ended = time.time()
    out, err = read_back(pending.out), read_back(pending.err)
    line = next(
        (
            text
            for text in out.decode(errors="replace").splitlines()
            if text.startswith(host_probe.MARK)
        ),
        "",
    )
    if not line:
        problem = _no_report(host.name, process.returncode, err)
        return HostReport(host=host, problem=problem)
    try:
        facts = json.loads(line.removeprefix(host_probe.MARK))
        sent = float(facts["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        problem = explain(host.name, "a damaged answer", sys.executable)
        return HostReport(host=host, problem=problem)
    off = max(0.0, sent - ended, pending.begun - sent)
    return HostReport(host=host, facts=facts, clock_seconds=off)


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


# --- remembered reports -----------------------------------------------------------------------


def _cache_file(host: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poprun-py" / "hosts" / f"{host}.json"


def _remember(report: HostReport) -> None:
    """Keep a report, so that a dry run can plan for the host without contacting it."""
    if report.facts is None or report.host.is_local:
        return
    with contextlib.suppress(OSError, RuntimeError):
        # Jobs are gone by then.
        facts = {**report.facts, "leases": []}
        path = _cache_file(report.host.name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(facts))


def remembered_reports(hosts: Iterable[Host]) -> dict[str, HostReport]:
    """Return what is remembered of hosts from an earlier look at them."""
    reports = {}
    for host in hosts:
        # Without a home nothing is remembered; what another version wrote may look otherwise.
        with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
            facts = json.loads(_cache_file(host.name).read_text(encoding="utf-8"))
            if isinstance(facts, dict):
                report = HostReport(host=host, facts=facts)
                if all(interface.subnet for interface in report.interfaces):
                    reports[host.name] = report
    return reports
