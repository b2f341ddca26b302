"""The program of a launcher process: ``python -P launcher_process.py DESCRIPTOR``.

The program receives the request for a job from the descriptor, runs the job, and sends messages
about the job and its result. Python runs this file by its path, because a module in the user's
folder could hide the package.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":
    # Collecting garbage before the job starts is useless: all objects live until the job ends.
    gc.disable()
    _ROOT = str(Path(__file__).parents[2])
    if _ROOT not in sys.path:
        sys.path.insert(0, _ROOT)

from poprun_py.errors import LaunchError, StartError, TimeLimitError
from poprun_py.instance.job_folders import JobFolder
from poprun_py.launching.launch import Request, launch
from poprun_py.python_api.messages import Attempt, Channel, JobRequest
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import Cause, LaunchResult
from poprun_py.running.supervise.signal_pipe import ENDING, HANGUP_ONCE, ONCE
from poprun_py.terminal import Console

_ENDING_SIGNALS = (*ENDING, *ONCE)


def main() -> NoReturn:
    """Run the requested job, and send its result to the calling program."""
    channel = Channel.inherited(int(sys.argv[1]))
    folder: JobFolder | None = None
    try:
        _catch_signals()
        message = channel.receive()
        if message is None:
            os._exit(0)
        request: JobRequest = message[1]
        if request.folder is not None:
            folder = JobFolder.join(request.folder)
        channel.signal_end(HANGUP_ONCE)
        # If the calling program had closed its end before signal_end, the kernel sends no signal.
        if channel.is_closed:
            raise _Stopped(HANGUP_ONCE)
        kind, value = _last_message(request, channel)
    except _Stopped as stopped:
        kind, value = "result", stopped.result
    _ignore_signals()  # A signal after the job's end must not change the job's result.
    channel.send(kind, value)
    if folder is not None and channel.is_closed:
        folder.remove()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # os._exit skips the interpreter's own clean-up, which is slow.
    os._exit(0)


# --- the job ------------------------------------------------------------------------------


def _last_message(request: JobRequest, channel: Channel) -> tuple[str, object]:
    """Run a job to its end, and return the kind and the value of the last message."""
    try:
        return "result", _run(request, channel)
    except LaunchError as error:
        return "error", error
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return "error", StartError(what)
    except Exception as error:
        return "error", StartError(f"the launcher failed: {type(error).__name__}: {error}")


def _run(request: JobRequest, channel: Channel) -> LaunchResult:
    to_launch = Request(
        request.job,
        environ=request.environ,
        output_folder=request.folder if request.keeps_output else None,
    )
    is_verbose = to_launch.config.verbosity >= 1
    result = launch(
        to_launch,
        _Console(request.listeners, channel, is_verbose=is_verbose),
        on_plan=lambda _: gc.enable(),
        on_attempt=lambda attempt: channel.send("attempt", _attempt(attempt)),
    )
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances of the job were ended", result)
    return result


def _attempt(job: Job) -> Attempt:
    folder = job.files.output_dir
    return Attempt(
        run_id=job.watchers.run_id,
        num_instances=job.num_instances,
        folder=None if folder is None else str(Path(folder).absolute()),
    )


class _Console(Console):
    """A console that sends the requested kinds of lines to the program, and prints other lines."""

    def __init__(self, listeners: frozenset[str], channel: Channel, *, is_verbose: bool) -> None:
        super().__init__(is_verbose=is_verbose, prints_bindings=False)
        self._channel = channel
        for kind in listeners:  # Each kind of line is named like a method of Console.
            setattr(self, kind, partial(channel.send, kind))

    def waiting(self, seconds: float, reason: str) -> None:
        self._channel.send("waiting", reason)
        super().waiting(seconds, reason)


# --- signals before the programs run ------------------------------------------------------


class _Stopped(KeyboardInterrupt):
    """Raised when a signal asks the job to end before its programs run.

    ``signal`` is the signal for the record of the run, and ``result`` is the result of the job.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        received = self.signal = signal.Signals(ONCE.get(number, number))
        self.result = LaunchResult(
            exit_code=128 + received,
            reason=f"the launcher received {received.name} before the programs started",
            cause=Cause.SIGNAL,
        )


def _catch_signals() -> None:
    """Make signals that end a job raise _Stopped, and unblock these signals.

    The calling program has started this process with the signals blocked.
    """
    for number in _ENDING_SIGNALS:
        if number in ONCE or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    _ignore_signals()  # a second signal must not interrupt the clean-up
    raise _Stopped(number)


def _ignore_signals() -> None:
    # Set an empty handler, because with SIG_IGN Python would print an error for a signal that
    # arrived just before this call.
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)


if __name__ == "__main__":
    main()
