"""The exceptions of the launcher and the exit codes that they cause.

The command ``poprun-py`` prints the message of an exception and exits with its exit code. The
Python API raises the exception in the calling program.

    LaunchError                1    an error that stops a launch
    |-- UsageError             2    a wrong option, file or combination: nothing was started
    |-- StartError             3    the launch could not start (host, ssh, MPI, program missing)
    |-- JobFailedError              the job failed; the command exits with the job's exit code
    `-- TimeLimitError       124    the job ran into a time limit or hung

Each message is one line that names the given value, the accepted values and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

# Advice for a user who has reached the limit of processes; threads count as processes.
PROCESSES_ADVICE = (
    "raise the limit of processes (ulimit -u, or pids.max of the control group), or start fewer "
    "instances"
)

# The packages that parts of the launcher need (requirements-launcher.txt): the name of each module,
# the part of the launcher that imports the module, and the names of its packages for pip.
_PARTS = {
    "click": ("the command line", "click"),
    "cloudpickle": ("a job that calls a Python function", "cloudpickle"),
    "falcon": ("the server of a pod", "falcon waitress"),
    "jinja2": ("an HTML page", "jinja2"),
    "prometheus_client": ("the server of --metrics-port", "prometheus-client"),
    "rich": ("a table", "rich"),
    "urllib3": ("the client of a pod's server", "urllib3"),
    "waitress": ("the server of a pod", "falcon waitress"),
}


class LaunchError(Exception):
    """An error that stops a launch; ``exit_code`` is the exit code of the command."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: one traceback, without frames of the library."""
        from poprun_py.display.user_traceback import traceback_lines

        return traceback_lines(self)


class UsageError(LaunchError):
    """An option, file or combination of values is wrong. Nothing was started."""

    exit_code = 2


class StartError(LaunchError):
    """The launch could not start, because a host, ssh, MPI or the program is missing."""

    exit_code = 3


class JobFailedError(LaunchError):
    """The job failed; ``result`` is its LaunchResult, ``exit_code`` is the job's exit code."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result
        self.exit_code: int = getattr(result, "exit_code", LaunchError.exit_code)


class TimeLimitError(LaunchError):
    """The job ran into a time limit, or hung; ``result`` is its LaunchResult."""

    exit_code = 124

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class UnwritableError(Exception):
    """Standard output cannot be written."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Return ``; did you mean X?`` with the accepted word that is most similar to ``word``.

    The returned text is empty if no accepted word is similar. The comparison ignores letter case,
    and treats hyphens like underscores.
    """
    spelled = {_folded(each): each for each in accepted}
    close = difflib.get_close_matches(_folded(word), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]}?" if close else ""


def missing_package_text(module: str) -> str:
    """Return a message that names a missing package, its purpose and the command to install it.

    The returned text is empty if the launcher does not import ``module`` from a package.
    """
    if module not in _PARTS:
        return ""
    part, packages = _PARTS[module]
    return f"{part} needs the package {module}, which is not installed: pip install {packages}"


def shortened(text: str) -> str:
    """Return a value of the user as messages show it: at most 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown_word(word: str) -> str:
    """Return a word of the user for messages; in quotes if it is empty or not printable."""
    return shortened(word if word and word.isprintable() else repr(word))


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


@contextlib.contextmanager
def start_errors(problem: str) -> Iterator[None]:
    """Convert an OSError of the ``with`` block into a StartError that begins with ``problem``."""
    try:
        yield
    except OSError as error:
        raise StartError(explain_os_error(error, problem)) from error


def explain_os_error(error: OSError, problem: str) -> str:
    """Return ``problem`` with the operating system's reason, and advice if a limit was reached."""
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno == errno.EMFILE:
        # The launcher has already raised its soft limit of open files to the hard limit.
        return (
            f"{problem} ({said}): raise the hard limit of open files (ulimit -n N as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    if error.errno == errno.EAGAIN:
        return f"{problem} ({said}): {PROCESSES_ADVICE}"
    if error.errno == errno.ENFILE:
        return f"{problem} ({said}): raise the limit of the whole machine (sysctl fs.file-max)"
    return f"{problem} ({said})"
