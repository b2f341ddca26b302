"""What the command prints, and where it cannot: lines, warnings, errors, PopRun's log.

The only module that prints, also how a command ended that failed. An error of stdout or stderr is
an UnwritableError, unlike every other error of the system.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from poprun_py.command_name import command_name
from poprun_py.errors import LaunchError, StartError
from poprun_py.output.terminal_kind import can_erase, may_colour

__all__ = [
    "Terminal",
    "UnwritableError",
    "can_print",
    "exit_code_of",
    "flush_stdout",
    "open_closed_descriptors",
    "print_any_text",
    "print_error",
    "print_out",
    "print_problem",
    "print_warning",
    "wants_colour",
]


class UnwritableError(Exception):
    """Standard output or standard error cannot be written."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


def open_closed_descriptors() -> None:
    """Give a launcher that was started without stdout or stderr something to write to.

    Otherwise a socket or file that the launcher opens later would get descriptor 1 or 2.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def print_any_text() -> None:
    """Let stdout take every text: a file name need not be UTF-8, a locale may lack characters."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf_8 = sys.stdout.encoding.lower().replace("_", "-") == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf_8 else "backslashreplace")


@contextlib.contextmanager
def _own_write() -> Iterator[None]:
    """Distinguish a failed write of our own output from every other OSError.

    Raises:
        UnwritableError: standard output or standard error cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UnwritableError(error) from None


def print_out(text: str) -> None:
    """Print to standard output."""
    with _own_write():
        print(text)


def print_error(text: str) -> None:
    """Print to standard error, at once."""
    with _own_write():
        print(text, file=sys.stderr, flush=True)


def print_problem(text: str) -> None:
    """Print an error as one line; the exit code counts, also when nobody can read the line."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(f"{command_name()}: error: {' '.join(text.split())}", file=sys.stderr, flush=True)


class Terminal:
    """Takes what the launcher says while a job runs: warnings and PopRun's log go to stderr.

    Args:
        is_verbose: whether the log is written at all.
        prints_bindings: whether bindings go to stdout, below the topology; else they are logged.
    """

    def __init__(self, *, is_verbose: bool, prints_bindings: bool) -> None:
        self._is_verbose = is_verbose
        self._prints_bindings = prints_bindings

    def log(self, line: str) -> None:
        """Write a line of PopRun's log: ``HH:MM:SS.mmm PID POPRUN [I] message``."""
        if self._is_verbose:
            now = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            print_error(f"{clock}.{int(now * 1000) % 1000:03} {os.getpid()} POPRUN [I] {line}")

    def warn(self, sentence: str) -> None:
        """Write a warning."""
        print_warning(sentence)

    def binding(self, line: str) -> None:
        """Print or log what the kernel says of an instance's binding."""
        if self._prints_bindings:
            print_out(line)
            flush_stdout()
        else:
            self.log(line)

    def tell(self, sentence: str) -> None:
        """Write what became of something that the user asked for."""
        print_error(f"{command_name()}: {sentence}")

    @property
    def progress(self) -> Callable[[str], None] | None:
        """What rewrites one line of a terminal, an empty text clears it; None without one."""
        if not (sys.stderr.isatty() and can_erase(os.environ)):
            return None
        return _rewrite_line


def _rewrite_line(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1
    shown = f"{command_name()}: {text}"[:width] if text else ""
    with _own_write():
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)


def print_warning(sentence: str) -> None:
    """Print a warning as one line."""
    print_error(f"{command_name()}: warning: {sentence}")


def wants_colour() -> bool:
    """Tell whether standard output is a terminal whose user did not decline colours."""
    return sys.stdout.isatty() and may_colour(os.environ)


def can_print(text: str) -> bool:
    """Tell whether the encoding of standard output has all characters of ``text``."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def flush_stdout() -> None:
    """Write out what standard output still holds."""
    with _own_write():
        sys.stdout.flush()


def exit_code_of(command: Callable[[], int]) -> int:
    """Do what a command is for and return its exit code; what went wrong is one line."""
    try:
        code = command()
        flush_stdout()
        return code
    except LaunchError as error:
        print_problem(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except UnwritableError as error:
        # Nothing more can be printed: the interpreter's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error.reason, BrokenPipeError):
            # The reader of our output has gone, as after ``| head``: a message would reach nobody.
            return 141
        print_problem(f"standard output cannot be written: {error.reason.strerror}")
        return StartError.exit_code
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:
            print_problem("the working folder was deleted; change to one that exists")
        else:
            print_problem(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return StartError.exit_code
