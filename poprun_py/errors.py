"""The exceptions of the launcher and their exit codes. Only the command line prints and exits.

    LaunchError                1    anything that stops a launch
    |-- UsageError             2    a wrong option, file or combination: nothing was started
    |-- StartError             3    the launch could not start (host, ssh, MPI, program missing)
    |-- JobFailedError         its  the job ended with another exit code than 0
    `-- TimeLimitError       124    the job ran into a time limit or hung

The message is one line that names the given value, the accepted values and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

# Threads are counted as well.
PROCESSES_ADVICE = (
    "raise the limit of processes (ulimit -u, or pids.max of the control group), or start fewer "
    "instances"
)


class LaunchError(Exception):
    """An error that stops a launch; ``exit_code`` is the exit code of the command."""

    exit_code = 1


class UsageError(LaunchError):
    """An option, file or combination of values is wrong. Nothing was started."""

    exit_code = 2


class StartError(LaunchError):
    """The launch could not start, because a host, ssh, MPI or the program is missing."""

    exit_code = 3


class JobFailedError(LaunchError):
    """The job did not end well; ``result`` is how it ended, ``exit_code`` that of the job."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result
        self.exit_code: int = getattr(result, "exit_code", LaunchError.exit_code)


class TimeLimitError(LaunchError):
    """The job ran into a time limit, or hung; ``result`` is how it ended."""

    exit_code = 124

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the accepted word most like ``word``, or nothing.

    Letter case, hyphens and underscores make no difference.
    """
    spelled = {_folded(each): each for each in accepted}
    close = difflib.get_close_matches(_folded(word), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]}?" if close else ""


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


@contextlib.contextmanager
def start_errors(problem: str) -> Iterator[None]:
    """Turn what the system refuses in the block into an error of the start.

    Raises:
        StartError: It refused something.
    """
    try:
        yield
    except OSError as error:
        raise StartError(explain_os_error(error, problem)) from error


def explain_os_error(error: OSError, problem: str) -> str:
    """Return ``problem`` with the system's reason, and what to do where that is known."""
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno == errno.EMFILE:
        # The soft limit is the hard one already.
        return (
            f"{problem} ({said}): raise the hard limit of open files (ulimit -n N as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    if error.errno == errno.EAGAIN:
        return f"{problem} ({said}): {PROCESSES_ADVICE}"
    if error.errno == errno.ENFILE:
        return f"{problem} ({said}): raise the limit of the whole machine (sysctl fs.file-max)"
    return f"{problem} ({said})"
