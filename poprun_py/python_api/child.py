"""The launcher's process as its starter sees it: started with an order, signalled, waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from poprun_py.errors import start_errors
from poprun_py.python_api.channel import Channel
from poprun_py.python_api.order import Order
from poprun_py.running.supervise.caught_signals import HANGUP_ONCE, INTERRUPT_ONCE
from poprun_py.running.supervise.private_folder import remove_folder_of

# A descriptor; None for this process's own, or one of subprocess's constants.
Stream = int | None
_MAIN = str(Path(__file__).with_name("launcher_process.py"))
_KEPT_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, INTERRUPT_ONCE, HANGUP_ONCE)


class Child:
    """A launcher's process.

    Args:
        order: what it launches.
        streams: its standard input, output and error.
        is_in_front: whether it shares our terminal's keys, Ctrl-C among them.

    Raises:
        StartError: it cannot be started.
    """

    def __init__(
        self, order: Order, streams: tuple[Stream, Stream, Stream], *, is_in_front: bool
    ) -> None:
        self.channel, theirs = Channel.pair()
        stdin, stdout, stderr = streams
        # What comes before it can take a signal waits until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_BACK)
        try:
            with start_errors("the launcher's process cannot be started"):
                self._process = subprocess.Popen(
                    [sys.executable, "-P", _MAIN, str(theirs.fileno())],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    process_group=None if is_in_front else 0,
                )
        except BaseException:
            self.channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.channel.send("order", order)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def pipes(self) -> dict[str, IO[bytes]]:
        """Its ``stdout`` and ``stderr``, where these are pipes to us."""
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        return {name: pipe for name, pipe in pipes.items() if pipe is not None}

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns 0, or what killed it as a negative number."""
        with contextlib.suppress(ChildProcessError):  # collected already, by whom it was signalled
            # Until it is collected, no other process can have its number.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                remove_folder_of(self.pid)
        self.channel.close()
        return self._process.wait()
