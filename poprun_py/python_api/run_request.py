"""Running a requested job in a launcher process, and sending messages to the calling program."""

from __future__ import annotations

import gc
import signal
from functools import partial
from pathlib import Path

from poprun_py.errors import LaunchError, StartError, TimeLimitError
from poprun_py.launching.launch import Request, launch
from poprun_py.python_api.messages import Attempt, Channel, JobRequest
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import Cause, LaunchResult
from poprun_py.terminal import Console


def run_request(request: JobRequest, channel: Channel) -> tuple[str, object]:
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


def stopped_result(number: signal.Signals) -> LaunchResult:
    """Return the result of a job that a signal ended before its programs ran."""
    return LaunchResult(
        exit_code=128 + number,
        reason=f"{number.name} received before the programs ran",
        cause=Cause.SIGNAL,
    )


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
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


def _attempt(job: Job) -> Attempt:
    folder = job.files.output_dir
    return Attempt(
        run_id=job.watchers.run_id,
        num_instances=job.num_instances,
        folder=None if folder is None else str(Path(folder).absolute()),
    )


class _Console(Console):
    """A console that sends the requested kinds of lines to the program, and prints the rest."""

    def __init__(self, listeners: frozenset[str], channel: Channel, *, is_verbose: bool) -> None:
        super().__init__(is_verbose=is_verbose, prints_bindings=False)
        self._channel = channel
        for kind in listeners:  # The kinds are named like the methods of Console.
            setattr(self, kind, partial(channel.send, kind))

    def waiting(self, seconds: float, reason: str) -> None:
        self._channel.send("waiting", reason)
        super().waiting(seconds, reason)
