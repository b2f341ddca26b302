"""Python stacks of a running program, and whether its main thread runs Python.

The wrapper sends a signal to the program. In the program, diagnostics_hook/sitecustomize.py handles
the signal and writes the answer to a file that both processes have open. The wrapper imports this
module only when it needs the stacks.
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
_MAX_PROCESSES = 16
# Three durations in seconds: the wait for the stacks of one process, the wait for the stacks of all
# processes, and the time without new bytes after which a process's answer is considered complete.
# On a busy host, a process may pause for a moment while it writes its stacks.
_ANSWER_SECONDS, _ALL_SECONDS, _QUIET_SECONDS = 1.5, 2.5, 0.1
_MAX_TEXT = 1 << 16
# The greatest number of characters for the stacks of all processes. All stacks are sent in one
# frame, where a character takes up to six bytes.
_MAX_TEXTS = 1 << 17


class PythonStacks:
    """Asks one program for its stacks, and whether it runs Python.

    Args:
        file: The descriptor of the file to which the program writes.
            ``program_environment.stacks_variables`` tells the program its path.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        # Three values: the process that was last asked whether it runs Python, the time of that
        # question, and the offset in the file at which the answer is expected.
        self._asked, self._asked_at, self._answer_offset = 0, 0.0, 0
        self._has_run_python = False

    def has_left_python(self, program: int) -> bool:
        """Return whether the program's interpreter is shutting down and runs no more Python.

        An interpreter that shuts down has removed its handler of the signal that asks whether
        Python runs. A program that is not Python never had this handler.
        """
        state, handles = process_info.state_and_handler(program, _ASK_SIGNAL)
        self._has_run_python = self._has_run_python or handles
        return self._has_run_python and not handles and state not in "TtZX"

    def seconds_outside_python(self, pids: "Sequence[int]", *, ask: bool) -> float:
        """Return the least number of seconds since a process's main thread last ran Python code.

        Args:
            pids: The program and its descendants. Only a running process with the handler is asked,
                because the signal would interrupt the sleep of a program in C.
            ask: Whether to ask a process now, if no earlier question is unanswered.
        """
        now, size = time.monotonic(), os.fstat(self._file).st_size
        written = os.pread(self._file, size - self._answer_offset, self._answer_offset)
        if self._asked in pids and _ANSWER not in written:
            return now - self._asked_at
        self._asked = 0
        if ask:
            for pid in pids:
                is_running = process_info.state_and_handler(pid, _ASK_SIGNAL) == ("R", True)
                if is_running and process_control.signal_process(pid, _ASK_SIGNAL):
                    self._asked, self._asked_at, self._answer_offset = pid, now, size
                    break
        return 0.0

    def stacks(self, program: int) -> "list[dict[str, Any]]":
        """Return the Python stacks of the program and its descendants, one entry per process.

        The signal is sent only to processes that handle it, because it would end any other process.
        """
        answers: list[dict[str, Any]] = []
        left, deadline = _MAX_TEXTS, time.monotonic() + _ALL_SECONDS
        for pid in [program, *process_info.descendants(program)][:_MAX_PROCESSES]:
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
