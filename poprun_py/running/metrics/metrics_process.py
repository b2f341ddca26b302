"""A child process that receives JSON documents, one per line, and never delays the launcher.

The child process ends when its pipe is closed, so it also ends when the launcher is killed. Before
the child process ends, it prints its problems, one sentence per line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from poprun_py.errors import StartError, explain_os_error

_ROOT: Final = Path(__file__).resolve().parents[3]
# The code that the child process runs. The code appends the folder of the launcher's packages to
# the end of sys.path, so that other modules in that folder do not hide the standard library.
# Python's option -P keeps the working folder out of sys.path.
_START: Final = (
    "import importlib, sys; sys.path.append(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main()"
)
# The size in bytes of the pipe to the child process, which holds some hundred documents while the
# process is busy. This size is the kernel's limit for unprivileged processes.
_PIPE_BYTES: Final = 1 << 20
# The seconds from the end of the job until the user is told to wait for the child process, and
# until the child process is killed.
_SAID_SECONDS, _END_SECONDS = 2.0, 30.0
_READ_BYTES: Final = 1 << 16


class MetricsProcess:
    """A child process that receives JSON documents, and serves or writes them.

    Args:
        module: The name of a module whose function ``main`` reads documents from standard input.
        what: The name of the process in messages, such as ``the metrics for TensorBoard``.

    Raises:
        StartError: The process cannot be started.
    """

    def __init__(
        self,
        module: str,
        what: str,
        first: Mapping[str, Any],
        *,
        environ: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._what = what
        self._rest = memoryview(b"")  # the part of a document that is still to be sent
        self._num_sent = self._num_dropped = 0
        self._is_open = True
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", _START, str(_ROOT), module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(environ),
                pass_fds=tuple(pass_fds),
                umask=0o077,
                # Ctrl-C and Ctrl-Z must not reach the child process, because the launcher sends the
                # last metrics after Ctrl-C.
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(explain_os_error(error, f"{what} cannot start")) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.send(first)

    def send(self, document: Mapping[str, Any] | str) -> bool:
        """Send a document, or drop it if the process is too slow; return whether it was sent.

        A document given as text must be JSON without line breaks.
        """
        self._num_sent += 1
        self._write()
        if self._rest or not self._is_open:
            self._num_dropped += 1
            return False
        if not isinstance(document, str):
            document = json.dumps(document, separators=(",", ":"))
        self._rest = memoryview(document.encode() + b"\n")
        self._write()
        return True

    def continue_sending(self) -> None:
        """Send more of the last document, if it did not fit into the pipe."""
        if self._rest:
            self._write()

    def finish(self, tell: Callable[[str], None]) -> list[str]:
        """Wait until the process has ended; return sentences that describe its problems.

        The function ``tell`` tells the user to wait for the process.
        """
        began, said, was_told = time.monotonic(), b"", False
        is_killed = True  # set to False if the process ends in time
        try:
            while (seconds := time.monotonic() - began) < _END_SECONDS:
                self._write()
                if not self._rest:
                    self._close_input()
                if seconds > _SAID_SECONDS and not was_told:
                    was_told = True
                    tell(f"waiting for {self._what}, {_END_SECONDS:.0f} s at most")
                ready, _, _ = select.select([self._output], [], [], 0.05)
                if ready:
                    data = os.read(self._output, _READ_BYTES)
                    said += data
                    if not data:
                        is_killed = False
                        break
        except KeyboardInterrupt:  # the job has ended, and the user does not want to wait
            pass
        return [*said.decode(errors="replace").splitlines(), *self._end(is_killed)]

    def close(self) -> None:
        """Kill the process if it has not ended."""
        if self._process.returncode is None:
            self._end(True)

    def _end(self, is_killed: bool) -> list[str]:
        """Close the pipe, wait for the process or kill it, and return sentences about problems."""
        self._close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not is_killed:
                self._process.wait(1)
        if self._process.poll() is None:
            is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        troubles = []
        if is_killed:
            troubles.append(f"{self._what} did not end in time: the last metrics may be missing")
        elif self._process.returncode:
            troubles.append(f"{self._what} ended early, with exit code {self._process.returncode}")
        elif self._num_dropped:
            missing = f"{self._num_dropped} of {self._num_sent} documents were left out"
            troubles.append(f"{self._what} took too long: {missing}")
        return troubles

    def _write(self) -> None:
        while self._rest and self._is_open:
            try:
                written = os.write(self._input, self._rest)
            except BlockingIOError:
                return
            except OSError:  # the process has ended
                self._close_input()
                return
            self._rest = self._rest[written:]

    def _close_input(self) -> None:
        self._rest = memoryview(b"")
        if self._is_open:
            self._is_open = False
            assert self._process.stdin is not None
            self._process.stdin.close()
