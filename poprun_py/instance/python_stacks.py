"""Asks a program and its descendants for their Python stacks, and whether they run Python.

The wrapper sends a signal to the program. In the program, diagnostics_hook/sitecustomize.py handles
the signal, and writes the answer to a file that both processes have open.
"""

import os
import time

from poprun_py import process_info
from poprun_py.instance import process_control
from poprun_py.instance.program_environment import STACKS_SIGNAL

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# The signal that makes a process write a NUL as soon as its main thread runs Python code.
_ASK_SIGNAL, _ANSWER = STACKS_SIGNAL - 1, b"\0"
_MAX_ANSWERS = 16
# The wrapper waits at most 1.5 s for the stacks of one process, and at most 2.5 s for all
# processes. The stacks of a process are complete if no bytes arrive for 0.1 s, because a process on
# a busy host may pause for a moment while it writes its stacks.
_ANSWER_SECONDS, _ALL_SECONDS, _QUIET_SECONDS = 1.5, 2.5, 0.1
_MAX_TEXT = 1 << 16
# The stacks of all processes are sent in one frame, where a character takes up to six bytes.
_MAX_TEXTS = 1 << 17


class PythonStacks:
    """Asks a program for its Python stacks, and whether its main thread runs Python code.

    The program writes its answers to the open file ``file``.
    ``program_environment.stacks_variables`` tells the program the path of the file.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        # The last process that was asked whether it runs Python, the time of the question, and the
        # offset in the file at which the answer of the process is expected.
        self._asked, self._asked_at, self._answer_offset = 0, 0.0, 0
        self._has_run_python = False

    def has_left_python(self, program: int) -> bool:
        """Return whether the program's interpreter is shutting down and runs no more Python code.

        While an interpreter shuts down, its handler of ``_ASK_SIGNAL`` is missing. A program that
        is not Python never had a handler of ``_ASK_SIGNAL``.
        """
        state, handles = process_info.state_and_handler(program, _ASK_SIGNAL)
        self._has_run_python = self._has_run_python or handles
        return self._has_run_python and not handles and state not in "TtZX"

    def seconds_outside_python(self, pids: "Sequence[int]", *, ask: bool) -> float:
        """Return for how many seconds a process has not answered ``_ASK_SIGNAL``; 0 if it has.

        If ``ask`` and no process still has to answer, ask a process of ``pids`` that is running,
        handles ``_ASK_SIGNAL`` and does not block it. In a C program, the signal would interrupt a
        sleep. The result for a process that blocks the signal is 0, because it cannot be asked.
        """
        now, size = time.monotonic(), os.fstat(self._file).st_size
        written = os.pread(self._file, size - self._answer_offset, self._answer_offset)
        is_waiting = self._asked in pids and _ANSWER not in written
        if is_waiting and not process_info.blocks_signal(self._asked, _ASK_SIGNAL):
            return now - self._asked_at
        self._asked = 0
        if ask:
            for pid in pids:
                if _can_answer(pid) and process_control.signal_process(pid, _ASK_SIGNAL):
                    self._asked, self._asked_at, self._answer_offset = pid, now, size
                    break
        return 0.0

    def stacks(self, program: int) -> "list[dict[str, Any]]":
        """Return the Python stacks of the program and its descendants, one entry per process.

        Only processes that handle ``STACKS_SIGNAL`` get it: the signal would end other processes.
        """
        answers: list[dict[str, Any]] = []
        left, deadline = _MAX_TEXTS, time.monotonic() + _ALL_SECONDS
        for pid in [program, *process_info.descendants(program)][:_MAX_ANSWERS]:
            state, handles = process_info.state_and_handler(pid, STACKS_SIGNAL)
            can_answer = handles and state not in "TtZX"
            text = self._stacks_of(pid, deadline)[:left] if can_answer else ""
            left -= len(text)
            if text or pid == program:
                answers.append({"pid": pid, "state": state, "text": text})
        return answers

    def _stacks_of(self, pid: int, deadline: float) -> str:
        start = os.fstat(self._file).st_size
        if not process_control.signal_process(pid, STACKS_SIGNAL):
            return ""
        size, quiet_since = start, time.monotonic()
        limit = min(quiet_since + _ANSWER_SECONDS, deadline)
        while time.monotonic() < limit:
            time.sleep(0.005)
            now = os.fstat(self._file).st_size
            if now != size:
                size, quiet_since = now, time.monotonic()
            elif size != start and time.monotonic() - quiet_since > _QUIET_SECONDS:
                break
        written = os.pread(self._file, _MAX_TEXT, start).replace(_ANSWER, b"")
        return written.decode(errors="replace")


def _can_answer(pid: int) -> bool:
    """Return whether a process is running, handles ``_ASK_SIGNAL`` and does not block it."""
    is_running = process_info.state_and_handler(pid, _ASK_SIGNAL) == ("R", True)
    return is_running and not process_info.blocks_signal(pid, _ASK_SIGNAL)
