"""The wrapper's side of the keyboard: what the program reads, and the terminal of its debugger.

Loaded only for a job whose launcher has a keyboard: standard library only. Nothing here decides who
has the keyboard: the launcher does.
"""

import errno
import os

from poprun_py.instance import control_protocol
from poprun_py.instance.program_input import ProgramPipe, ProgramTerminal, make_input
from poprun_py.instance.quick_imports import loads

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from poprun_py.instance.progress_memory import ProgressMemory

# What a program may ask for, and with how many numbers.
_NUM_NUMBERS = {"enter": 1, "leave": 1, "wait": 2}


class Keyboard:
    """What reaches one program from the keyboard, and what it asks of it.

    Args:
        setup: the launcher's wish: ``input`` for ``make_input`` if the program reads the keyboard
            from its start, whether there is a ``debugger``, and ``term``, the kind of terminal.
        memory: the memory that is shared with the program.
        send: sends a frame to the launcher.
    """

    def __init__(
        self,
        setup: "dict[str, Any]",
        memory: "ProgressMemory",
        send: "Callable[[bytes, Any], None]",
    ) -> None:
        self._memory = memory
        self._send = send
        self._term = setup.get("term", "")
        self._errno = 0  # why there is no terminal
        self._input: ProgramTerminal | ProgramPipe | None = None
        if "input" in setup:
            self._make_input(setup["input"])
        # Requests of the program: lines of text, a pipe's smallest unit.
        self._requests = self._ask = -1
        self._begun_request = b""
        if setup.get("debugger"):
            self._requests, self._ask = os.pipe()
            os.set_blocking(self._requests, False)

    def variables(self) -> dict[str, str]:
        """Return the variables that tell the program of its terminal and its debugger."""
        variables = {}
        if self._term and "TERM" not in os.environ:
            variables["TERM"] = self._term
        if self._ask >= 0:
            variables["POPDIST_DEBUGGER"] = f"/proc/{os.getpid()}/fd/{self._ask}"
        return variables

    def become_stdio(self, out: int, err: int) -> tuple[int, int]:
        """In the child: read the keyboard in a process group of its own, or nothing.

        Returns:
            What are to be stdout and stderr: ``out`` and ``err``, or terminals.
        """
        if self._input is not None:
            return self._input.become_stdio(out, err)
        os.setpgid(0, 0)
        # Open MPI 5 never tells instance 0 where its input ends.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return out, err

    def started(self) -> None:
        """In the wrapper: the program runs."""
        if self._input is not None:
            self._input.started()

    def ended(self) -> None:
        """The program has ended."""
        if self._input is not None:
            self._input.ended()

    @property
    def terminal(self) -> "ProgramTerminal | None":
        """The program's terminal, if it has one."""
        return self._input if isinstance(self._input, ProgramTerminal) else None

    @property
    def requests(self) -> int:
        """The descriptor on which the program's requests arrive; -1 for none."""
        return self._requests

    def read_requests(self) -> None:
        """Pass on what the program asks for."""
        data = self._begun_request + os.read(self._requests, 4096)
        *lines, self._begun_request = data.split(b"\n")
        for line in lines:
            what, *words = line.decode(errors="replace").split() or [""]
            try:
                numbers = [int(word) for word in words]
            except ValueError:
                continue  # not of the library: anybody in the instance may write into the pipe
            if len(numbers) != _NUM_NUMBERS.get(what):
                continue
            if what == "leave":
                self._memory.lend_terminal(0)
            self._send(control_protocol.DEBUGGER, [what, *numbers])

    def handle(self, kind: bytes, payload: bytes) -> None:
        """Do what a frame of the launcher says."""
        if kind == control_protocol.KEYS:
            self._type(payload)
        elif kind == control_protocol.WINDOW_SIZE and self.terminal is not None:
            self.terminal.resize(loads(payload))
        elif kind == control_protocol.NEW_TERMINAL:
            if self.terminal is None:
                self._make_input(loads(payload))
            number = self.terminal.number + 1 if self.terminal is not None else -self._errno
            self._memory.lend_terminal(number)
        elif kind == control_protocol.DEBUGGER_LEFT:
            self._memory.debugged(loads(payload))

    def on_time(self, now: float) -> None:
        """Do what is due."""
        if self._input is not None:
            self._input.on_time(now)

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        return self._input.next_deadline() if self._input is not None else float("inf")

    def _type(self, keys: bytes) -> None:
        if self._input is not None:
            self._input.type(keys)
        else:
            self._send(control_protocol.KEYS_READ, None)

    def _make_input(self, setup: "dict[str, Any]") -> None:
        try:
            self._input = make_input(setup, self._send)
        except OSError as error:
            self._errno = error.errno or errno.ENXIO
            # The program runs all the same, as one whose input has ended.
            os.write(2, f"poprun-py: warning: no terminal for the keyboard: {error}\n".encode())
