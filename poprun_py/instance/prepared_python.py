"""A Python process that has imported the program's packages, and forks the program of a restart.

The program of the first attempt forks this process, the spare, as soon as it has imported the
installed packages that its script imports first (diagnostics_hook/poprun_prepared_start.py). The
spare is forked twice, so that the wrapper adopts the spare as its child. For each restart, the
spare forks the new program in the same way. In the new program, the hook returns, and Python runs
the script as in any other start.

A wrapper that has run no program can make a spare ahead. A process with the program's command then
imports the packages, forks the spare, and ends before it runs the script.
"""

import os
import sys

from poprun_py.instance import process_control, program_environment, progress_memory
from poprun_py.instance.quick_imports import dumps, signal, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Mapping

# The variable with the wrapper's process id, and with two descriptors: of the socket for requests,
# and of the file for the output of imports. A fourth number asks for a spare without a program.
_REQUESTS = "POPRUN_PREPARED"
# The variables, besides the library's, that may differ between two attempts, because imports do not
# read them. The spare does not import the library, so variables of the library do not matter before
# the fork. A program has the CPUs of its wrapper, whatever CPUs the spare has.
_CHANGING = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "POPRUN_CPUS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ACCELERATE_USE_CPU"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("GLOO_SOCKET_IFNAME", "POPLAR_TARGET_OPTIONS"),
)
_OF_LIBRARY = "POPDIST_"
# The spare has the standard input of the first program.
_STDIN = ("POPRUN_STDIN", "POPRUN_STDIN_READER")
# In this time, a busy machine forks the program, and the wrapper adopts it.
_FORK_SECONDS = 10.0
_MOST_OUTPUT = 1 << 20  # bytes of the output of imports
_INT_BYTES = 4  # the size of a file descriptor in a message of a Unix socket


def may_prepare(command: "list[str]", environ: "Mapping[str, str]") -> bool:
    """Return whether a restart may follow whose program a spare could fork."""
    restarts, most = (
        environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    has_restarts = restarts.isdecimal() and most.isdecimal() and int(restarts) < int(most)
    return has_restarts and runs_hook(command)


def runs_hook(command: "list[str]") -> bool:
    """Return whether a command starts Python with the hook that forks spares, as far as known."""
    return program_environment.is_python(command) and not _skips_hook(command)


def _skips_hook(command: "list[str]") -> bool:
    """Return whether an option of Python makes it ignore PYTHONPATH or sitecustomize."""
    for word in command[1:]:
        if not word.startswith("-") or word[1:2] in ("", "c", "m", "-"):
            return False
        if word[1] not in "WX" and set(word[1:]) & {"I", "E", "S"}:
            return True
    return False


class PreparedPython:
    """The spare of a program, and the connection of this process to the spare.

    ``is_ahead`` tells whether the process that forks the spare ends before it runs the script.
    """

    def __init__(self, is_ahead: bool = False) -> None:
        self._is_ahead = is_ahead
        self._environ = dict(os.environ)
        self._connection, self._requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        self._imports_output = progress_memory.unnamed_file("poprun-imports")
        self._pid = -1  # -1 before the program has told the process id, 0 without a spare
        self._is_refused = False

    @classmethod
    def adopt(cls, pid: int, environ: dict[str, str], descriptor: int) -> "PreparedPython":
        """Return the spare of a killed wrapper, which this process has adopted.

        ``descriptor`` is the killed wrapper's end of the connection.
        """
        adopted = cls()
        adopted.close_requests()
        adopted.program_ended()
        adopted._connection.close()
        adopted._connection = socket.socket(fileno=descriptor)
        adopted._connection.setblocking(False)
        try:
            while adopted._connection.recv(32):
                pass  # the killed wrapper has not read these answers
        except OSError:
            pass
        adopted._environ, adopted._pid = environ, pid
        return adopted

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the first program."""
        return self._environ

    @property
    def descriptor(self) -> int:
        """The descriptor of the connection to the spare."""
        return self._connection.fileno()

    @property
    def is_awaited(self) -> bool:
        """Whether the program may still tell the process id of the spare."""
        return self._pid < 0

    def offer(self, wrapper: int) -> None:
        """In the child that executes the program's command, let that process fork the spare."""
        descriptors = self._requests.fileno(), self._imports_output
        for each in descriptors:
            os.set_inheritable(each, True)
        numbers = (wrapper, *descriptors, *((1,) if self._is_ahead else ()))
        os.environ[_REQUESTS] = ":".join(map(str, numbers))

    def close_requests(self) -> None:
        """In the wrapper, close the spare's end of the connection."""
        self._requests.close()

    @property
    def pid(self) -> int:
        """The process id of the spare; 0 if there is none."""
        if self._pid < 0:
            try:
                message = self._connection.recv(32)
            except OSError:  # the program still imports packages
                return 0
            self._pid = int(message or 0)
            self._is_refused = message == b"0"
        return self._pid

    def program_ended(self) -> bytes:
        """Return the output of imports if the program has ended during its imports."""
        if self._imports_output < 0:
            return b""
        has_imported = self.pid > 0 or self._is_refused
        text = b"" if has_imported else os.pread(self._imports_output, _MOST_OUTPUT, 0)
        os.close(self._imports_output)
        self._imports_output = -1
        return text

    @property
    def is_impossible(self) -> bool:
        """Whether the program has told that it cannot fork a spare."""
        return self.pid == 0 and self._is_refused

    def fork_program(self, out: int, err: int) -> int:
        """Fork the program, whose output goes to the descriptors ``out`` and ``err``.

        Returns:
            The process id of the program, which is a child of this process; 0 if the program must
            be started in the usual way.
        """
        if not self._is_usable():
            self.end()
            return 0
        go_read, go_write = os.pipe()
        environ = {name: value for name, value in os.environ.items() if name not in _STDIN}
        request = dumps([os.getpid(), environ]).encode()
        descriptors = b"".join(
            each.to_bytes(_INT_BYTES, sys.byteorder) for each in (out, err, go_read)
        )
        pid = 0
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
            self._connection.sendmsg([request], [rights])
            self._connection.settimeout(_FORK_SECONDS)
            pid = int(self._connection.recv(32) or 0)
            if pid:
                os.write(go_write, b"\0")
        except (OSError, ValueError):
            pass  # without the byte in the pipe, the new process ends
        finally:
            os.close(go_read)
            os.close(go_write)
        if not pid:
            self.end()
        return pid

    def end(self) -> None:
        """End the spare; a second call has no effect."""
        pid = self.pid
        self._connection.close()
        self._pid = 0
        if pid:
            process_control.signal_process(pid, signal.SIGKILL)
            try:  # noqa: SIM105 (importing contextlib would take longer than this module)
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass  # the wrapper has not adopted the spare yet, or has collected it

    def ended(self) -> None:
        """Record that the wrapper has collected the spare, which has ended."""
        self._pid = 0

    def _is_usable(self) -> bool:
        """Return whether the spare exists, and a request would give the program."""
        before, now = self._environ, os.environ
        is_same = _fixed(now) == _fixed(before) and _reads_stdin(now) == _reads_stdin(before)
        return bool(self.pid) and is_same


def _reads_stdin(environ: "Mapping[str, str]") -> bool:
    path, reader = (environ.get(name, "") for name in _STDIN)
    return bool(path) and environ.get("RANK") == reader


def _fixed(environ: "Mapping[str, str]") -> "dict[str, str]":
    return {
        name: value for name, value in _without_library(environ).items() if name not in _CHANGING
    }


def _without_library(environ: "Mapping[str, str]") -> "dict[str, str]":
    return {name: value for name, value in environ.items() if not name.startswith(_OF_LIBRARY)}
