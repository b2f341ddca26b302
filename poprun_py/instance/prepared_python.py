"""A Python process that has imported the program's packages, and forks the program of a restart.

The process starts like the program itself, with the same command. Before Python runs the script,
the diagnostics hook imports the installed packages that the script imports, and waits
(diagnostics_hook/poprun_prepared_start.py). For each restart, the process forks twice, so that the
wrapper adopts the new process as its child. In the new process, the hook returns, and Python runs
the script as in any other start.
"""

import os
import select
import sys

from poprun_py.instance import process_control, program_environment
from poprun_py.instance.quick_imports import dumps, signal, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The variable with the descriptor of the socket on which the process waits for requests.
_REQUESTS = "POPRUN_PREPARED"
# The variables, besides the library's, that may differ between two attempts. The process does not
# import the library, so variables of the library do not matter before the fork.
_CHANGING = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_OF_LIBRARY = "POPDIST_"
# The process has the standard input of the program from its start.
_STDIN = ("POPRUN_STDIN", "POPRUN_STDIN_READER")
# In this time, a busy machine forks the process, and the wrapper adopts the new one.
_FORK_SECONDS = 10.0
_INT_BYTES = 4  # the size of a file descriptor in a message of a Unix socket


def may_prepare(command: "list[str]", environ: "Mapping[str, str]") -> bool:
    """Return whether a restart may follow whose program a prepared process could fork."""
    restarts, most = (
        environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    has_restarts = restarts.isdecimal() and most.isdecimal() and int(restarts) < int(most)
    return has_restarts and program_environment.is_python(command)


class PreparedPython:
    """A process that has imported packages, and its connection to this process.

    Args:
        command: The words of the program's command.
        become: A function that makes a forked child a process of the program's kind: it takes the
            parent's process id and the descriptors of the standard output and error.
    """

    def __init__(self, command: "list[str]", become: "Callable[[int, int, int], None]") -> None:
        self._environ = dict(os.environ)
        self._is_ready = False
        self._connection, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Text that a package prints during its import would be lost, so a process that has printed
        # text does not become a program.
        self._printed, output = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()  # 0 after the process has ended
        if self.pid == 0:
            try:
                become(parent, output, output)
                os.set_inheritable(requests.fileno(), True)
                environ = _without_library(os.environ)
                # torch would import the library, whose back end the start hook registers later.
                more = {_REQUESTS: str(requests.fileno()), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
                os.execvpe(command[0], command, {**environ, **more})
            finally:
                os._exit(1)
        requests.close()
        os.close(output)

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
        """End the process; a second call has no effect."""
        if self._printed >= 0:
            self._connection.close()
            os.close(self._printed)
            self._printed = -1
            if self.pid:
                process_control.signal_process(self.pid, signal.SIGKILL)

    def _is_usable(self) -> bool:
        """Return whether the process waits for requests, and a request would give the program."""
        if not self.pid or self._printed < 0:
            return False
        poll = select.poll()
        poll.register(self._printed, select.POLLIN)
        has_printed = bool(poll.poll(0))
        try:
            self._connection.setblocking(False)
            self._is_ready = self._is_ready or self._connection.recv(32) == b"ready"
        except OSError:
            return False
        return self._is_ready and not has_printed and _fixed(os.environ) == _fixed(self._environ)


def _fixed(environ: "Mapping[str, str]") -> "dict[str, str]":
    return {
        name: value for name, value in _without_library(environ).items() if name not in _CHANGING
    }


def _without_library(environ: "Mapping[str, str]") -> "dict[str, str]":
    return {name: value for name, value in environ.items() if not name.startswith(_OF_LIBRARY)}
