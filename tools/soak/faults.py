"""The vocabulary of faults: ``fail_at(instance, step, how)``, and what one did to a real job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools.processes import survivors, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("fault_program.py")
# What a killed launcher leaves ends by itself.
_LEFT_SECONDS = 30.0


def fail_at(instance: int, step: int, how: str) -> dict[str, str]:
    """Return the variables that make one instance fail at a step; step 0 is before ``init()``."""
    return {"FAIL_AT": f"{instance}:{step}:{how}"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a job with two instances, and the expected end of the job."""

    title: str
    code: int
    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    named: int | None = None  # the instance that the report has to blame
    says: str = ""  # a pattern in the launcher's report
    send: tuple[int, ...] = ()  # signals that the launcher gets once all instances are ready
    before: tuple[str, ...] = ()  # what stands in front of the launcher
    program: tuple[str, ...] = (str(PROGRAM),)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was seen."""

    code: int | None  # None if the launcher did not return
    survivors: tuple[str, ...]  # their command lines
    stdout: str
    stderr: str
    report: dict  # of the last attempt


def measure(fault: Fault, folder: Path, *, limit: float = 60) -> Measured:
    """Do ``fault`` to a real job and see what follows."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    words = [
        *fault.before,
        sys.executable, "-m", "poprun_py", "--num-instances", "2", "--num-replicas", "2",
        "--output-dir", str(folder), *fault.options, *fault.program,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_MARK_OF_POPRUN": mark, **fault.env}
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    never = False
    try:
        wait_for_programs(folder, process, limit)
        for number in fault.send:
            process.send_signal(number)
            wait_until(lambda number=number: is_delivered(process.pid, number))
        try:
            stdout, stderr = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            never = True
            process.kill()
            stdout, stderr = process.communicate()
    finally:
        process.kill()
        process.wait()
    gone = signal.SIGKILL in fault.send or "launcher" in fault.env.get("FAIL_AT", "")
    left = survivors(f"TEST_MARK_OF_POPRUN={mark}")
    deadline = time.monotonic() + (_LEFT_SECONDS if gone else 0)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = survivors(f"TEST_MARK_OF_POPRUN={mark}")
    lines = tuple(map(command_line, left))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    path = folder / "latest" / "report.json"
    return Measured(
        code=None if never else process.returncode,
        survivors=lines,
        stdout=stdout.decode(),
        stderr=stderr.decode(),
        report=json.loads(path.read_text())["attempts"][-1] if path.exists() else {},
    )


def command_line(pid: int) -> str:
    """Return what a process was started with, and where it waits in the kernel."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"{words}({Path(f'/proc/{pid}/wchan').read_text()})"
    except OSError:
        return f"process {pid}, which ended then"


def is_delivered(pid: int, number: int) -> bool:
    """Tell whether a process has got a signal: a second one would be lost in it before."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    pending = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", status, re.MULTILINE)
    has_ended = "\nState:\tZ" in status
    return has_ended or not any(int(mask, 16) >> (number - 1) & 1 for mask in pending)


def wait_for_programs(folder: Path, process: subprocess.Popen, limit: float) -> None:
    """Wait until both programs have said that they are ready, or the job has ended."""
    deadline = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < deadline:
        files = list(folder.glob("latest/attempt-1/instance-*.stdout"))
        if len(files) == 2 and all(b"ready" in file.read_bytes() for file in files):
            return
        time.sleep(0.01)


def problems(fault: Fault, seen: Measured) -> list[str]:
    """Return the differences between the expected and the measured end of the job."""
    found = []
    if seen.code is None:
        return ["did not return"]
    if seen.code != fault.code:
        found.append(f"exit code {seen.code}")
    if seen.survivors:
        found.append(f"{len(seen.survivors)} processes left: {'; '.join(seen.survivors)}")
    blamed = re.search(r"poprun-py: instance (\d+) .*(?:failed first|hangs)", seen.stderr)
    if fault.named is not None and (blamed is None or int(blamed[1]) != fault.named):
        found.append(f"blamed {blamed[1] if blamed else 'nobody'}")
    if not re.search(fault.says, seen.stderr):
        found.append(f"did not say {fault.says!r}")
    return found


HANG = ("--hang-timeout", "1.5")

FAULTS = (
    Fault(title="exit code 3", code=3, env=fail_at(1, 5, "exit"), named=1, says="exit code 3"),
    Fault(title="exception", code=1, env=fail_at(1, 5, "exception"), named=1,
          says="ValueError: the loss is not a number"),
    Fault(title="exception in instance 0", code=1, env=fail_at(0, 5, "exception"), named=0),
    Fault(title="segmentation fault", code=139, env=fail_at(1, 5, "segv"), named=1,
          says="in segmentation_fault(.|\n)*SIGSEGV"),
    Fault(title="SIGKILL of an instance", code=137, env=fail_at(1, 5, "kill"), named=1,
          says="SIGKILL(.|\n)*killed from outside"),
    Fault(title="abort", code=134, env=fail_at(1, 5, "abort"), named=1, says="SIGABRT"),
    Fault(title="ends before init(), the other waits in it", code=9,
          env=fail_at(1, 0, "os_exit"), named=1),
    Fault(title="plain programs, one ends with 3", code=3,
          env={**fail_at(1, 5, "exit"), "PLAIN": "1"}, named=1),
    Fault(title="failure in a data-loader worker", code=1, env=fail_at(1, 3, "loader_worker"),
          named=1, says="cannot read sample 3"),
    Fault(title="memory is refused", code=1, env=fail_at(1, 5, "memory_error"), named=1,
          says="out of memory: an allocation failed"),
    Fault(title="an instance with child processes ends with 3", code=3,
          env={**fail_at(1, 5, "exit"), "CHILDREN": "1"}, named=1),
    Fault(title="the other ignores SIGTERM (--grace 1)", code=3, options=("--grace", "1"),
          env={**fail_at(1, 5, "exit"), "DEAF": "1"}, named=1),
    Fault(title="instances at different failures: the first counts", code=3, named=0,
          env={"FAIL_AT": "0:5:exit,1:900:exception", "PLAIN": "1"}),
    Fault(title="hidden instance fails", code=1, env=fail_at(1, 5, "exception"), named=1,
          options=("--only-output-from-instance", "0"), says="the loss is not a number"),
    Fault(title="time limit (--timeout 5)", code=124, options=("--timeout", "5"),
          says="the time limit of 5 s is over(.|\n)*program.py"),
    Fault(title="hang in Python", code=124, env=fail_at(1, 5, "hang"), options=HANG, named=1,
          says="time.sleep"),
    Fault(title="hang in C with the interpreter's lock", code=124,
          env=fail_at(1, 5, "hang_with_lock"), options=(*HANG, "--grace", "1"), named=1,
          says="hold_the_lock"),
    Fault(title="a stopped instance (SIGSTOP)", code=124, env=fail_at(1, 5, "freeze"),
          options=(*HANG, "--grace", "1"), named=1, says="the process is stopped"),
    Fault(title="Ctrl-C", code=130, send=(signal.SIGINT,)),
    Fault(title="Ctrl-C twice, the programs ignore SIGTERM", code=130, env={"DEAF": "1"},
          send=(signal.SIGINT, signal.SIGINT)),
    Fault(title="SIGTERM", code=143, send=(signal.SIGTERM,)),
    Fault(title="SIGHUP: the terminal is gone", code=129, send=(signal.SIGHUP,)),
    Fault(title="pre-empted: SIGTERM, programs ask stopRequested()", code=75,
          env={"POLITE": "1"}, send=(signal.SIGTERM,), says="stopped at a checkpoint"),
    Fault(title="pre-empted: SIGUSR1", code=75, env={"POLITE": "1"}, send=(signal.SIGUSR1,)),
    Fault(title="SIGKILL of the launcher", code=-9, send=(signal.SIGKILL,),
          env={"CHILDREN": "1"}),
    Fault(title="SIGKILL of mpirun", code=137, env={**fail_at(1, 5, "kill_mpirun"),
          "CHILDREN": "1"}, says="mpirun ended with signal SIGKILL"),
    Fault(title="SIGTERM of mpirun", code=143, env={**fail_at(1, 5, "term_mpirun"),
          "CHILDREN": "1"}, says="error: mpirun was ended by SIGTERM"),
    Fault(title="SIGKILL of the wrapper of an instance", code=137,
          env={**fail_at(1, 5, "kill_wrapper"), "CHILDREN": "1"}, named=1),
    Fault(title="SIGKILL of the shell that waits for the launcher", code=-9,
          send=(signal.SIGKILL,), env={"CHILDREN": "1"}, before=("sh", "-c", '"$@"; true', "sh")),
    Fault(title="no such program", code=3, program=("./no-such-program",),
          says="was not found|is not executable"),
)  # fmt: skip
