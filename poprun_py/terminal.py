"""Printing to stdout and stderr for the commands, and the console that prints a launch's messages.

Results go to stdout; warnings, errors and the log go to stderr. Only this module prints. If stderr
cannot be written, its text is lost, but the job and its exit code do not change. If stdout cannot
be written, ``print_out`` raises UnwritableError, because the result of the command is lost. Inside
``with may_be_lost()``, the text for stdout is dropped instead of raising UnwritableError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, TextIO

from poprun_py.display.formatting import clock_text
from poprun_py.errors import LaunchError, StartError, UnwritableError, missing_package_text

# The name of the launcher command in the Poplar SDK.
SDK_NAME = "poprun"

_USUAL = "poprun-py"
_OF_PODS = "poprun-py-pod"
_OTHERS = (SDK_NAME, "gc-info", "gc-monitor", _OF_PODS)

Log = Callable[[str], None]


def command_name() -> str:
    """Return the name of the running command; for ``python -m poprun_py``, return ``poprun-py``."""
    called = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    if called == "pod_command.py":
        return _OF_PODS
    return called if called in _OTHERS else _USUAL


def can_erase(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal can erase and rewrite a line: not with TERM=dumb."""
    return environ.get("TERM") != "dumb"


def has_cursor(environ: Mapping[str, str]) -> bool:
    """Return whether TERM names a terminal that can move its cursor to any row."""
    return bool(environ.get("TERM")) and can_erase(environ)


def may_colour(environ: Mapping[str, str]) -> bool:
    """Return whether colours may be printed: not with NO_COLOR (no-color.org) or TERM=dumb."""
    return can_erase(environ) and not environ.get("NO_COLOR")


def prepare_streams() -> None:
    """Open /dev/null on closed standard descriptors, and make stdout accept every character.

    A command calls this function before it opens files or prints. If descriptor 1 or 2 stayed
    closed, a socket or file that the launcher opens later would get that descriptor, and printed
    text would go into the socket or file.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Printed text, such as a file name, may not be valid UTF-8.
        is_utf_8 = sys.stdout.encoding.lower().replace("_", "-") == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf_8 else "backslashreplace")


def exit_with(code: int) -> NoReturn:
    """Flush stdout and stderr, and end this process with ``code`` even if flushing fails."""
    # The command has done its work, so a later Ctrl-C must not change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # os._exit skips the finalisation of the interpreter, which is the slowest part of an exit.
    os._exit(code)


def print_out(text: str) -> None:
    """Print to standard output.

    Raises:
        UnwritableError: Standard output cannot be written.
    """
    with _unwritable_errors():
        print(text)


def flush_stdout() -> None:
    """Flush standard output.

    Raises:
        UnwritableError: Standard output cannot be written.
    """
    with _unwritable_errors():
        sys.stdout.flush()


@contextlib.contextmanager
def _unwritable_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnwritableError(error) from None


@contextlib.contextmanager
def may_be_lost() -> Iterator[None]:
    """Drop the text printed inside ``with`` if stdout cannot be written; continue the job."""
    try:
        yield
        flush_stdout()
    except UnwritableError as error:
        stream = sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            # The buffered text is dropped, because each later flush would fail again.
            sys.stdout = open(  # noqa: SIM115 (the descriptor must stay open)
                stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False
            )
        # A broken pipe needs no warning: the reader of the output has ended, as in ``| head``.
        if not isinstance(error.reason, BrokenPipeError):
            print_warning(f"standard output cannot be written: {error.reason.strerror}")


def print_error(text: str) -> None:
    """Print to standard error at once; the text is lost if standard error cannot be written.

    On a terminal, the launcher's messages in the text are wrapped at words.
    """
    columns = columns_of(sys.stderr) if can_erase(os.environ) else None
    _write_to_stderr(f"{wrapped_messages(text, columns)}\n")


def wrapped_messages(text: str, columns: int | None) -> str:
    """Return text whose lines with the command's name are wrapped at words to ``columns``.

    Other lines, such as the table or the traceback of a report, are not changed. If ``columns`` is
    None, no line is changed.
    """
    if columns is None or (text.isascii() and len(text) <= columns):
        return text
    from poprun_py.display.terminal_rows import wrapped

    name = f"{command_name()}: "
    lines = text.split("\n")
    return "\n".join(wrapped(each, columns) if each.startswith(name) else each for each in lines)


def columns_of(stream: TextIO | int | None) -> int | None:
    """Return the number of columns of the terminal of a stream or descriptor; None if unknown."""
    try:
        descriptor = stream if isinstance(stream, int) or stream is None else stream.fileno()
        columns = 0 if descriptor is None else os.get_terminal_size(descriptor).columns
    except (OSError, ValueError):
        return None
    return columns or None


def print_problem(text: str) -> None:
    """Print an error message to stderr as one line, after the name of the command."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    print_error(f"{command_name()}: error: {' '.join(text.split())}")


def can_rewrite_lines() -> bool:
    """Return whether standard error is a terminal whose rows can be rewritten."""
    return sys.stderr is not None and sys.stderr.isatty() and can_erase(os.environ)


def rewrite_line(line: str) -> None:
    """Replace the text in the terminal's current row; an empty ``line`` clears the row.

    A line that is wider than the terminal is cut. The cursor stays at the beginning of the row: if
    the terminal becomes narrower and wraps the row into several ones, the next call erases all of
    them.
    """
    # A character in the last column would move the cursor to the next row of some terminals.
    columns = (columns_of(sys.stderr) or shutil.get_terminal_size().columns) - 1
    if not line.isascii() or len(line) > columns:
        from poprun_py.display.terminal_rows import cut

        line = cut(line, columns)
    _write_to_stderr(f"\r\x1b[J{line}\r" if line else "\r\x1b[J")


def _write_to_stderr(text: str) -> None:
    # stderr may be a full disk, a closed pipe, a terminal that is gone, or a closed stream.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


class Console:
    """The console of a launch, which prints the launcher's messages.

    If ``is_verbose``, lines of the log are written to stderr; if not, they are dropped. If
    ``prints_bindings``, the instances' CPU bindings are printed to stdout, below the topology; if
    not, they are written to the log.
    """

    def __init__(self, *, is_verbose: bool, prints_bindings: bool) -> None:
        self._is_verbose = is_verbose
        self._prints_bindings = prints_bindings
        self._waiting_for = ""

    def log(self, line: str) -> None:
        """Write a line of the log, as ``HH:MM:SS.mmm PID POPRUN [I] message``."""
        if self._is_verbose:
            self._clear_row()
            print_error(f"{clock_text(time.time())} {os.getpid()} POPRUN [I] {line}")

    def warn(self, sentence: str) -> None:
        """Write a warning."""
        self._clear_row()
        print_warning(sentence)

    def binding(self, line: str) -> None:
        """Print or log the CPUs that the kernel reports for an instance."""
        if self._prints_bindings:
            with may_be_lost():
                print_out(line)
        else:
            self.log(line)

    def tell(self, sentence: str) -> None:
        """Print a message to stderr that is not a warning, such as the path of a written file."""
        self._clear_row()
        print_error(f"{command_name()}: {sentence}")

    def waiting(self, seconds: float, reason: str) -> None:
        """Show why, and for how many ``seconds``, the job waits; called repeatedly during the wait.

        On a terminal, each call of ``waiting`` rewrites the same line. In a file or pipe, a new
        line is written when the reason, such as "for IPUs: ...", changes. At the end of the wait,
        ``reason`` is empty.
        """
        if can_rewrite_lines():
            text = f"{command_name()}: waiting {seconds:.0f} s {reason}"
            rewrite_line(text if reason else "")
        elif reason and reason != self._waiting_for:
            self.tell(f"waiting {reason}")
        self._waiting_for = reason

    def _clear_row(self) -> None:
        """Clear the terminal's row that shows a wait, so that a message gets a row of its own."""
        if self._waiting_for and can_rewrite_lines():
            rewrite_line("")


def print_warning(sentence: str) -> None:
    """Print a warning as one line."""
    print_error(f"{command_name()}: warning: {sentence}")


def wants_colour() -> bool:
    """Return whether standard output is a terminal, and the user has not turned off colours."""
    return sys.stdout.isatty() and may_colour(os.environ)


def can_print(text: str) -> bool:
    """Return whether the encoding of standard output has all characters of ``text``."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. An error that the command raises is printed.

    LaunchError, UnwritableError, OSError, KeyboardInterrupt and ModuleNotFoundError for a package
    that is not installed are converted to exit codes.
    """
    try:
        code = command()
        flush_stdout()
        return code
    except LaunchError as error:
        print_problem(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        missing = missing_package_text(error.name or "")
        if not missing:
            raise
        print_problem(missing)
        return StartError.exit_code
    except UnwritableError as error:
        # Point stdout to /dev/null, so that the interpreter's flush at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error.reason, BrokenPipeError):
            # The reader of the output has ended, as in ``| head``, and needs no message.
            return 141
        print_problem(f"standard output cannot be written: {error.reason.strerror}")
        return StartError.exit_code
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:
            print_problem("the working folder was deleted; change to one that exists")
        else:
            print_problem(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return StartError.exit_code
