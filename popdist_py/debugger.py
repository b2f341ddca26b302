"""The function ``breakpoint``, which opens pdb in one instance while the other instances wait.

pdb reads its commands from the launcher's keyboard. This module requests a terminal from the
launcher's wrapper through a pipe. The launcher's wrapper answers through memory that it shares with
this process. Without the launcher, pdb runs as usual. The instances do not communicate with each
other for this purpose.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
import time
from pathlib import Path
from typing import Any

from popdist_py import context, heartbeat
from popdist_py.environment import DEBUGGER

_WAIT_SECONDS = 0.01

_num_calls = 0


def breakpoint(instance: int = 0, *, header: str | None = None) -> None:
    """Open pdb in the caller's frame in one instance, while all other instances wait.

    Every instance has to call this function. The pdb command ``continue`` leaves the debugger. The
    launcher's hang time-out and time limit do not count the time in the debugger. If the launcher
    does not have a terminal, the function prints a message and returns.

    Args:
        instance: The index of the instance to debug.
        header: A line to print before the first prompt.

    Raises:
        ValueError: ``instance`` is not the index of an instance.
        WireError: The launcher's environment variables are incomplete.
    """
    global _num_calls
    job = context.environment()
    if instance not in range(job.num_instances):
        raise ValueError(
            f"breakpoint({instance!r}): expected the index of an instance, 0 to "
            f"{job.num_instances - 1}"
        )
    _num_calls += 1
    is_here = job.instance_index == instance
    if not context.is_launched():
        debugger: pdb.Pdb = pdb.Pdb()
    elif DEBUGGER not in os.environ:
        if is_here:
            _tell(
                "popdist_py.breakpoint() did not open the debugger, because poprun-py was not "
                "started from a terminal; start poprun-py from a terminal, without < or |"
            )
        return
    elif is_here:
        debugger = _Debugger(_num_calls)
        try:
            debugger.open()
        except OSError as error:
            _ask("leave", _num_calls)
            _tell(f"popdist_py.breakpoint() cannot open a terminal for the debugger: {error}")
            return
    else:
        _ask("wait", _num_calls, instance)
        _wait_for(_num_calls)
        return
    if header is not None:
        debugger.message(header)
    debugger.set_trace(sys._getframe(1))


def _tell(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{sentence}\n")


def _wait_for(call: int) -> None:
    """Wait until the user has left the debugger that breakpoint() call number ``call`` opened."""
    while heartbeat.calls_debugged() < call:
        time.sleep(_WAIT_SECONDS)


class _Debugger(pdb.Pdb):
    """A pdb that uses the launcher's keyboard from its first prompt until the program continues.

    Args:
        call: The number of the breakpoint() call.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self._terminal: _Terminal | None = None
        super().__init__()

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Read commands. If the keyboard was given back, request it again first."""
        self.open()
        super().interaction(*args, **kwargs)

    def set_continue(self) -> None:
        """Continue the program, and let the other instances continue too."""
        super().set_continue()
        self._leave()

    def set_quit(self) -> None:
        """End the program."""
        super().set_quit()
        self._leave()

    def open(self) -> None:
        """Wait until this process may use the launcher's keyboard.

        Raises:
            OSError: A terminal is not available.
        """
        if self._terminal is None:
            self._terminal = _Terminal(self._call)
            self.stdin, self.stdout = sys.stdin, sys.stdout

    def _leave(self) -> None:
        if self._terminal is not None:
            self._terminal.give_back()
            self._terminal = None
            self.stdin, self.stdout = sys.stdin, sys.stdout


class _Terminal:
    """Connects the standard input and output to the launcher's keyboard and screen.

    Args:
        call: The number of the breakpoint() call.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self._saved: tuple[int, int, Any, Any] | None = None
        _ask("enter", call)
        while not (number := heartbeat.lent_terminal()):
            time.sleep(_WAIT_SECONDS)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        path = f"/dev/pts/{number - 1}"
        if _is_terminal(0, path) and _is_terminal(1, path):
            return
        # input() supports line editing only if the file descriptors 0 and 1 are a terminal.
        sys.stdout.flush()
        self._saved = (os.dup(0), os.dup(1), sys.stdin, sys.stdout)
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
        os.dup2(terminal, 0)
        os.dup2(terminal, 1)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open while the debugger runs)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115

    def give_back(self) -> None:
        """Restore the standard input and output of the program."""
        if self._saved is not None:
            sys.stdout.flush()
            stdin, stdout, sys.stdin, sys.stdout = self._saved
            for saved, descriptor in ((stdin, 0), (stdout, 1)):
                os.dup2(saved, descriptor)
                os.close(saved)
        _ask("leave", self._call)
        # Wait until the number of the terminal in shared memory is 0 again. Otherwise the next
        # debugger could mistake the old number for an answer to its own request.
        while heartbeat.lent_terminal():
            time.sleep(_WAIT_SECONDS / 10)


def _is_terminal(descriptor: int, path: str) -> bool:
    try:
        return os.ttyname(descriptor) == path
    except OSError:
        return False


def _ask(what: str, *numbers: int) -> None:
    """Send a request with its numbers, such as ``enter 1``, to the wrapper of this instance."""
    with Path(os.environ[DEBUGGER]).open("w") as pipe:
        pipe.write(" ".join([what, *map(str, numbers)]) + "\n")
