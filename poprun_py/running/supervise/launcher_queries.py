"""Queries to running launchers, for the stacks, the status and the emulated IPUs of a job.

A launcher's socket is in a folder that only the launcher's user can enter. A user therefore finds
only the user's own jobs, and root finds all jobs. Other users can make folders with the same names
in /tmp. This module ignores a folder whose owner is not the launcher's user, and replaces control
characters in the strings of an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from poprun_py import process_info
from poprun_py.display.formatting import printable, read_json
from poprun_py.errors import StartError, shown_word
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.launcher_folder import ANY_FOLDER, SOCKET_NAME, folder_prefix

if TYPE_CHECKING:
    from poprun_py.running.supervise.connection import Peer
    from poprun_py.running.supervise.job_description import Job

_ANSWER_SECONDS = 10.0
# The time-out, in seconds, of a question for the emulated IPUs of a job. A running launcher answers
# at once, but a launcher that is stopped (Ctrl-Z) does not answer.
_HOLDINGS_SECONDS = 1.0
_STATUS_SECONDS = 5.0
# The launcher asks a new host before it answers, and may copy folders to the host.
_ADD_HOST_SECONDS = 120.0
# The maximum number of frames in an answer. A frame has at most 1 MiB, and the status of 4,096
# instances takes 3 MiB.
_MOST_FRAMES = 64
_EXPECTED = (
    "expected the process id of a running poprun-py on this host, or of one of its instances, or "
    "the name or folder of a run"
)
# The most names of running jobs in an error message, and the most launchers asked at one time.
_MOST_NAMES, _MOST_THREADS = 8, 16
# A number with more digits than this is the name of a run, not a process id.
_MOST_DIGITS = 20
# The value of the argument ``job`` that selects the job that was started last.
NEWEST = "newest"


# Every launch imports this module, and the definition of a data class would take longer.
class LauncherAnswer(NamedTuple):
    """The answer of one launcher to a query for the status of its job.

    ``pid`` is the process id of the launcher, and ``path`` is the path of its socket. ``status`` is
    None if the launcher does not answer; ``problem`` then tells why.
    """

    pid: int
    path: Path
    status: dict[str, Any] | None
    problem: str = ""


def ask_stacks(job: str) -> str:
    """Return the stacks of a running job.

    Args:
        job: The process id of the job's launcher or of one of its instances; the name of the run,
            or the folder of the run.

    Raises:
        StartError: The job is not found, or its launcher does not answer.
    """
    option = f"--stacks {shown_word(job)}"
    for path in sockets_of_process(job) or [_answer_of_run(job, option).path]:
        try:
            answer = _answer(path, "stacks", _ANSWER_SECONDS)
        except (OSError, ValueError) as error:
            raise StartError(f"{option}: the launcher does not answer ({error})") from None
        if answer is not None:
            return printable(answer, keep="\n\t")
    raise StartError(f"{option}: the job has just ended")


def add_host(job: str, host: str) -> str:
    """Add a host to a running job, and return the name by which the job knows the host.

    Args:
        job: The process id of the job's launcher or of one of its instances; the name of the run,
            or the folder of the run.
        host: The host, as ``--host`` takes it.

    Raises:
        StartError: The job is not found, its launcher does not answer, or the job cannot use the
            host.
    """
    option = f"--add-host {shown_word(job)}"
    for path in sockets_of_process(job) or [_answer_of_run(job, option).path]:
        try:
            answer = _answer(path, {"add_host": host}, _ADD_HOST_SECONDS)
            if answer is None:
                continue
            reply = _printable_value(answer) if answer else {}
        except (OSError, ValueError) as error:
            raise StartError(f"{option}: the launcher does not answer ({error})") from None
        known = reply if isinstance(reply, dict) else {}
        if problem := known.get("problem"):
            raise StartError(f"{option}: {problem}")
        if name := known.get("host"):
            return str(name)
        raise StartError(f"{option}: the launcher of the job has a version that cannot add hosts")
    raise StartError(f"{option}: the job has just ended")


def ask_status(job: str) -> tuple[dict[str, Any], list[int]]:
    """Return the status of a job and, for ``NEWEST``, the process ids of older launchers.

    Args:
        job: The process id of the job's launcher or of one of its instances; the name of the run,
            or the folder of the run; or ``NEWEST``.

    Raises:
        StartError: The job is not found, or its launcher does not answer.
    """
    if job == NEWEST:
        return _newest_status()
    option = f"--status={shown_word(job)}"
    paths = sockets_of_process(job)
    if not paths and (status := _answer_of_run(job, option).status):
        return status, []
    for path in paths:
        try:
            if status := _status(path):
                return status, []
        except StartError as error:
            raise StartError(f"{option}: {error}") from None
    raise StartError(f"{option}: the job has just ended")


def _newest_status() -> tuple[dict[str, Any], list[int]]:
    found = sorted(_sockets(), key=lambda each: _age(each[1]))
    for number, (_, path) in enumerate(found):
        try:
            status = _status(path)
        except StartError as error:
            raise StartError(f"--status: {error}") from None
        if status is not None:
            return status, sorted(pid for pid, _ in found[number + 1 :])
    raise StartError(
        "--status: none of your jobs runs on this host. The command poprun-py jobs lists all jobs"
    )


def _answer_of_run(name: str, option: str) -> LauncherAnswer:
    """Return the answer of the launcher that executes the run ``name``.

    Raises:
        StartError: There is no such run, there are several, or launchers do not answer.
    """
    answers = all_answers()
    found = [each for each in answers if each.status and is_of_run(each.status["run_id"], name)]
    if len(found) == 1:
        return found[0]
    if found:
        pids = ", ".join(str(each.pid) for each in found)
        raise StartError(
            f"{option}: {len(found)} jobs have this name. Give the process id of one of their "
            f"launchers: {pids}"
        )
    # A process id names one launcher, so a launcher that does not answer is another one.
    is_pid = name.isdigit()
    problem = next((each.problem for each in reversed(answers) if each.problem), "")
    if problem and not is_pid:
        raise StartError(f"{option}: no job of this name answers; {problem}")
    no_job = "no job of yours" if is_pid else "no such job of yours runs on this host"
    raise StartError(f"{option}: {no_job}; {_EXPECTED}; {_running_text(answers)}")


def is_of_run(run_id: str, name: str) -> bool:
    """Return whether ``name`` is the name of a run, or a path to the folder of the run."""
    return run_id in (name, Path(name).resolve().name)


def _running_text(answers: Sequence[LauncherAnswer]) -> str:
    """Return a text that lists the running jobs, as ``NAME (PID)``."""
    names = [f"{each.status['run_id']} ({each.pid})" for each in answers if each.status]
    if not names:
        return "none of your jobs runs on this host"
    more = len(names) - _MOST_NAMES
    return f"running: {', '.join(names[:_MOST_NAMES])}" + (f" and {more} more" if more > 0 else "")


def all_answers() -> list[LauncherAnswer]:
    """Return the status of every running job of this user, sorted by the launcher's process id.

    All launchers are asked at the same time, because a launcher may take seconds to answer.
    """
    from concurrent.futures import ThreadPoolExecutor

    sockets = _sockets()
    with ThreadPoolExecutor(max(1, min(len(sockets), _MOST_THREADS))) as pool:
        answers = pool.map(lambda each: _launcher_answer(*each), sockets)
        return [each for each in answers if each is not None]


def _launcher_answer(pid: int, path: Path) -> LauncherAnswer | None:
    """Return the answer of a launcher; None if its job has just ended."""
    try:
        status = _status(path)
    except StartError as error:
        return LauncherAnswer(pid, path, None, str(error))
    return None if status is None else LauncherAnswer(pid, path, status)


def launcher_status(pid: int) -> dict[str, Any] | None:
    """Return the status of the job of launcher ``pid``; None if the launcher gives no answer."""
    for _, path in _sockets(pid):
        with contextlib.suppress(StartError):
            if status := _status(path):
                return status
    return None


def _status(path: Path) -> dict[str, Any] | None:
    """Return the status in a launcher's answer; None if the job has just ended.

    Raises:
        StartError: The launcher does not answer.
    """
    from poprun_py.running.watch.job_view import JobView  # launches do not need this module

    pid = _launcher_of(path)
    if process_info.state_letter(pid) in "Tt":
        raise StartError(
            f"launcher {pid} is stopped (Ctrl-Z): to continue it, type fg in its terminal, or kill "
            f"-CONT {pid}"
        )
    try:
        answer = _answer(path, "status", _STATUS_SECONDS)
        if not answer:
            return None
        status: dict[str, Any] = _printable_value(answer)
        JobView.from_json(status)
    except (OSError, ValueError) as error:
        raise StartError(f"launcher {pid} does not answer ({error})") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        raise StartError(
            f"launcher {pid} does not answer in the format of this version: use the version of "
            "poprun-py that started the job"
        ) from None
    return status


def _launcher_of(path: Path) -> int:
    """Return the process id in the name of a socket's folder; 0 for other folder names."""
    pid = path.parent.name.split("-")[1]
    return int(pid) if pid.isdigit() else 0


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def holdings(job: Job, peers: Mapping[int, Peer]) -> dict[str, Any]:
    """Return the emulated IPUs of a job, and the programs that hold the IPUs."""
    running = [peer for peer in peers.values() if peer.started and peer.program_end is None]
    return {
        "partition": job.watchers.partition,
        "num_ipus": sum(map(len, job.watchers.ipus)),
        "instances": [
            {
                "index": peer.index,
                "host": peer.host,
                "pid": peer.started["pid"],
                "ipus": list(job.watchers.ipus[peer.index]) if job.watchers.ipus else [],
            }
            for peer in sorted(running, key=lambda peer: peer.index)
        ],
    }


def running_jobs() -> dict[int, dict[str, Any] | None]:
    """Return the emulated IPUs of every running job, and the programs that hold the IPUs.

    The keys are the launchers' process ids. A value is None if the launcher does not answer.
    """
    found: dict[int, dict[str, Any] | None] = {}
    for pid, path in _sockets():
        try:
            answer = _answer(path, "holdings", _HOLDINGS_SECONDS)
            if answer:
                found[pid] = _printable_value(answer)
        except (OSError, ValueError):
            found[pid] = None
    return found


def _answer(path: Path, want: str | Mapping[str, str], seconds: float) -> str | None:
    """Return the answer of a launcher; None if the launcher ended without an answer.

    Raises:
        ValueError: The answer is too long, or is not text.
    """
    reader, payloads = control_protocol.Reader(), []
    # These errors mean that the launcher was killed, or ended before it answered.
    with (
        contextlib.suppress(ConnectionError, FileNotFoundError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel,
    ):
        channel.settimeout(seconds)
        channel.connect(str(path))
        channel.sendall(control_protocol.pack(control_protocol.INSPECT, json.dumps(want).encode()))
        while data := channel.recv(1 << 16):
            payloads += [payload for _, payload in reader.feed(data)]
            if len(payloads) > _MOST_FRAMES:
                raise ValueError("the answer is too long")
        return b"".join(payloads).decode() if payloads else None
    return None


def _printable_value(answer: str) -> Any:
    """Return the decoded JSON of an answer; control characters in strings are replaced."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return printable(value, keep="\n\t")
        if isinstance(value, list):
            return list(map(plain, value))
        if isinstance(value, dict):
            return {plain(name): plain(each) for name, each in value.items()}
        return value

    try:
        return plain(read_json(answer))
    except RecursionError:
        raise ValueError("the answer nests too deeply") from None


def _is_launchers(path: Path) -> bool:
    """Tell whether a socket's folder belongs to the user of the launcher in the folder's name."""
    pid = _launcher_of(path)
    try:
        owner = path.parent.stat().st_uid
    except OSError:
        return False
    if not pid or os.geteuid() not in (0, owner):
        return False
    # ``process_info.owner`` returns None for a process that has ended or is hidden.
    return process_info.owner(pid) in (owner, None)


def _sockets(pid: int | None = None) -> list[tuple[int, Path]]:
    """Return the process id and the socket of every launcher, sorted by process id.

    With ``pid``, the result contains only sockets of launchers with this process id.
    """
    pids = [each for each, _ in process_info.all_stats()] if pid is None else [pid]
    name = ANY_FOLDER if pid is None else f"{folder_prefix(pid)}*"
    found = []
    for folder in set().union(*map(_temporary_folders, pids)):
        # Folders of other users may not be readable.
        with contextlib.suppress(OSError):
            paths = filter(_is_launchers, folder.glob(f"{name}/{SOCKET_NAME}"))
            found += [(_launcher_of(path), path) for path in paths]
    return sorted(found)


def sockets_of_process(job: str) -> list[Path]:
    """Return the sockets of the launcher whose process is ``job`` or an ancestor of it.

    The result is empty if ``job`` is not a process id, or if the process belongs to no job.
    """
    pid = int(job) if job.isascii() and job.isdigit() and len(job) < _MOST_DIGITS else 0
    for current in [pid, *process_info.ancestors(pid)] if pid else []:
        if found := _sockets(current):
            return [path for _, path in found]
    return []


def _temporary_folders(pid: int) -> set[Path]:
    """Return the folders that may contain the temporary folder of launcher ``pid``."""
    import tempfile

    theirs = process_info.variable(pid, "TMPDIR")
    own = {Path(tempfile.gettempdir()), Path("/tmp")}
    return own | ({Path(theirs)} if theirs.startswith("/") else set())
