"""What a wrapper knows of its program from outside: steps, collectives and stacks.

Standard library only and cheap to import. The memory that the program counts its steps in and the
file that takes its stacks have no name in any file system: nothing can be left behind.
"""

import mmap
import os
import sys
import time

from poprun_py import process_info
from poprun_py.instance import process_control
from poprun_py.instance.quick_imports import signal

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

# The words of the memory shared with popdist_py/heartbeat.py, each of 8 bytes.
_STEP, _POLLS, _PROPOSED, _AGREED, _BEGUN, _CALLS, _RESUMED, _DOING = range(8)
_DEBUGGED, _TERMINAL = 8, 9
_NUM_WORDS = 10
# _WILL_STEP is a value of _BEGUN: steps will follow. The others are values of _ACTIVITY: the
# program waits for other instances; it saves or loads a checkpoint.
_WILL_STEP, _WAITING, _SAVING = 2, 6, 8
# Those of popdist_py/activities/ledger.py: when counting began, up to when it tells of all time,
# what goes on, the samples, the steps timed and all steps; the nanoseconds of each activity; a row
# for each of the last steps: its number, when it ended, how long it took (_UNTIMED: nobody knows),
# and how long without waiting for others, its samples, its loss (of these bits: nobody knows).
_LEDGER_BEGAN, _SINCE, _ACTIVITY, _SAMPLES, _TIMED_STEPS, _STEPS = range(10, 16)
_NANOSECONDS, _NUM_ACTIVITIES = 16, 10
# The last collective: whether it goes on (1 bit), which one (7), its number; when it was begun.
_CALL, _CALL_BEGAN = 26, 27
# Set by diagnostics_hook/sitecustomize.py: the process whose main thread ended with an exception.
_FAILED = 28
# The program trained a model of its own: popdist_py/start_hook/popdist_separate_models.py says so.
_SEPARATE = 31
_ROWS, _RING, _ROW_WORDS = 32, 4096, 6
_ALL_WORDS = 24608
_TAKEN, _OWN, _LOSS = 2, 3, 5
_UNTIMED, _UNKNOWN_BITS = -1, 0x7FF8_7374_6570_6C6F
# Of the last steps: how many are read for a look, and how many of them without their waiting.
_LAST_STEPS, _OWN_STEPS = 255, 10
# After a store of ours, by then every earlier store of the program can be seen.
_SETTLE_SECONDS = 0.001
# A signal that neither programs nor their libraries use.
STACKS_SIGNAL = signal.SIGRTMAX - 3
# The one before it is answered by a NUL, once Python runs in the main thread.
_ASK_SIGNAL, _ANSWER = STACKS_SIGNAL - 1, b"\0"
_MAX_PROCESSES = 16
# Time for one process, and for all before the launcher gives up. A loaded host may pause a process
# that writes its stacks.
_ANSWER_SECONDS, _ALL_SECONDS, _QUIET_SECONDS = 1.5, 2.5, 0.1
_MAX_TEXT = 1 << 16
# The text of all processes comes in one frame, where a character takes up to six bytes.
_MAX_TEXTS = 1 << 17
_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "diagnostics_hook")


class ProgressMemory:
    """Memory and file shared with one program."""

    def __init__(self) -> None:
        self._heartbeat = _file_without_a_name("poprun-heartbeat")
        os.ftruncate(self._heartbeat, 8 * _ALL_WORDS)
        memory = memoryview(mmap.mmap(self._heartbeat, 8 * _ALL_WORDS))
        self._words, self._numbers = memory.cast("q"), memory.cast("d")
        self._counts = False  # whether the program was ever seen to count
        self._stacks = _file_without_a_name("poprun-stacks")
        # Who was asked whether Python runs, when, and where in the file the answer may be.
        self._asked, self._asked_at, self._answer_at = 0, 0.0, 0
        self._has_run_python = False

    def variables(self, program: "Sequence[str]", environ: "Mapping[str, str]") -> dict[str, str]:
        """Return the variables that tell the program where memory and file are."""
        files = f"/proc/{os.getpid()}/fd"
        variables = {
            "POPDIST_HEARTBEAT": f"{files}/{self._heartbeat}",
            "POPDIST_STACKS": f"{int(STACKS_SIGNAL)}:{files}/{self._stacks}",
        }
        if _is_python(program):
            rest = environ.get("PYTHONPATH")
            variables["PYTHONPATH"] = f"{_HOOK}{os.pathsep}{rest}" if rest else _HOOK
        return variables

    def progress(self) -> "list[int] | None":
        """Return how far the program is, or None before it began to count.

        Returns:
            Training steps done, other calls since the last of them, the step that was resumed
            from, and what goes on now.
        """
        words = self._words
        progress = [words[_STEP], words[_CALLS], words[_RESUMED], words[_DOING]]
        self._counts = self._counts or bool(words[_BEGUN]) or any(progress)
        return progress if self._counts else None

    def counts_steps(self) -> bool:
        """Tell whether the program counts steps, or will: it has a model, or has made one."""
        progress = self.progress()
        return progress is not None and (self._words[_BEGUN] == _WILL_STEP or any(progress))

    def call(self) -> "list[float]":
        """Return the last collective that the program began, all 0 before the first.

        Returns:
            Its number, counted from 1; which of ``COLLECTIVES`` of ``popdist_py.environment`` it
            is; whether it goes on, 1 or 0; and the seconds since it was begun.
        """
        word, began = self._words[_CALL], self._words[_CALL_BEGAN]
        seconds = (time.monotonic_ns() - began) / 1e9 if began else 0.0
        return [word >> 8, word >> 1 & 127, word & 1, seconds]

    def trained_alone(self) -> bool:
        """Tell whether the program trained with torch, and called no collective of the library."""
        return self._words[_SEPARATE] == 1 and not self._words[_CALL]

    def waits(self) -> bool:
        """Tell whether the program waits for other instances in a collective of the library."""
        return self._words[_ACTIVITY] == _WAITING

    def saves(self) -> bool:
        """Tell whether the program saves a checkpoint of the library, or loads one."""
        return self._words[_ACTIVITY] == _SAVING

    def failed_process(self) -> int:
        """Return the process whose main thread ended with an exception, or 0."""
        return self._words[_FAILED]

    def has_left_python(self, program: int) -> bool:
        """Tell whether the interpreter of the program shuts down, and runs no more Python.

        It then no longer handles the signal that asks whether Python runs. Programs that are not
        Python never handled it.
        """
        letter, catches = process_info.state_and_handler(program, _ASK_SIGNAL)
        self._has_run_python = self._has_run_python or catches
        return self._has_run_python and not catches and letter not in "TtZX"

    def away_seconds(self, pids: "Sequence[int]", *, ask: bool) -> float:
        """Return for how long at least the program's main thread has run no Python.

        Args:
            pids: the program and its descendants; the first one that runs and answers is asked: a
                signal would end the sleep of a program in C.
            ask: whether to ask, if there is no question open.
        """
        now, size = time.monotonic(), os.fstat(self._stacks).st_size
        written = os.pread(self._stacks, size - self._answer_at, self._answer_at)
        if self._asked in pids and _ANSWER not in written:
            return now - self._asked_at
        self._asked = 0
        if ask:
            for pid in pids:
                runs = process_info.state_and_handler(pid, _ASK_SIGNAL) == ("R", True)
                if runs and process_control.signal_process(pid, _ASK_SIGNAL):
                    self._asked, self._asked_at, self._answer_at = pid, now, size
                    break
        return 0.0

    def ledger(self) -> "dict[str, Any] | None":
        """Return where the program's time went, or None before it began to count.

        Returns:
            ``now``, on the clock of ``time.monotonic_ns``, and ``began``; the ``activity`` that
            goes on, and ``since`` when; the ``nanoseconds`` of each one until now; the
            ``samples``; the number of steps ``timed``, and how long the last of them took, and
            the last ten without waiting for others, in nanoseconds, the oldest first: ``steps``,
            ``own``; the ``loss`` of the last step, None if nobody knows.
        """
        words = self._words
        began = words[_LEDGER_BEGAN]
        if not began:
            return None
        since, activity = words[_SINCE], words[_ACTIVITY]
        spent = words[_NANOSECONDS : _NANOSECONDS + _NUM_ACTIVITIES].tolist()
        now = time.monotonic_ns()
        # Whatever the program wrote meanwhile, all of its time is some activity's.
        spent[activity if 0 <= activity < _NUM_ACTIVITIES else 0] += now - began - sum(spent)
        timed, made = words[_TIMED_STEPS], words[_STEPS]
        rows = [_row(step) for step in range(max(0, made - _LAST_STEPS), made)]
        last = [row for row in rows if words[row + _TAKEN] != _UNTIMED]
        return {
            "now": now,
            "began": began,
            "activity": activity,
            "since": since,
            "nanoseconds": spent,
            "samples": words[_SAMPLES],
            "timed": timed,
            "steps": [words[row + _TAKEN] for row in last],
            "own": [words[row + _OWN] for row in last[-_OWN_STEPS:]],
            "loss": self._loss(self._words, self._numbers, rows[-1]) if rows else None,
        }

    def steps(self, since: int) -> "dict[str, Any]":
        """Return the steps that the program made after the first ``since`` of them.

        The ring keeps the last ones only: those before are ``lost``.

        Returns:
            ``made``, how many there are now, and ``lost``; ``rows``, the oldest first: of each step
            its number, when it ended on the clock of ``time.monotonic_ns``, its nanoseconds and
            those without waiting for others, negative if nobody knows, its samples, and its loss,
            None if nobody knows.
        """
        made = self._words[_STEPS]
        if made <= since:
            return {"made": made, "lost": 0, "rows": []}
        copied = memoryview(self._words.tobytes())
        words, numbers = copied.cast("q"), copied.cast("d")
        # While it was copied the program may have gone on, over the oldest rows.
        first = max(since, self._words[_STEPS] - _RING + 1)
        rows = []
        for row in map(_row, range(first, made)):
            rows.append([*words[row : row + _LOSS].tolist(), self._loss(words, numbers, row)])
        return {"made": made, "lost": first - since if rows else made - since, "rows": rows}

    @staticmethod
    def _loss(words: "memoryview[int]", numbers: "memoryview[float]", row: int) -> "float | None":
        """Return the loss that a row tells."""
        place = row + _LOSS
        return None if words[place] == _UNKNOWN_BITS else numbers[place]

    def polls(self) -> int:
        """Return how often the program asked whether to stop."""
        return self._words[_POLLS]

    def propose(self, proposal: int) -> int:
        """Make the program wait at the given question; returns how many it has asked by now."""
        if proposal:
            self._words[_PROPOSED] = proposal
            time.sleep(_SETTLE_SECONDS)
        return self._words[_POLLS]

    def agree(self, proposal: int) -> None:
        """Let the program stop at the proposed question."""
        self._words[_AGREED] = proposal

    def debugged(self, call: int) -> None:
        """Let the program go on from this call of breakpoint()."""
        self._words[_DEBUGGED] = max(call, self._words[_DEBUGGED])

    def lend_terminal(self, number: int) -> None:
        """Tell the program that its debugger may use /dev/pts/N: N + 1.

        0 has it wait; a negative number of ``errno`` says that there is none.
        """
        self._words[_TERMINAL] = number

    def stacks(self, program: int) -> "list[dict[str, Any]]":
        """Return the Python stacks of the program and its descendants, one entry per process.

        Only a process that catches the signal gets it: the signal would end any other.
        """
        answers: list[dict[str, Any]] = []
        left, deadline = _MAX_TEXTS, time.monotonic() + _ALL_SECONDS
        for pid in [program, *process_info.descendants(program)][:_MAX_PROCESSES]:
            state, catches = process_info.state_and_handler(pid, STACKS_SIGNAL)
            can_answer = catches and state not in "TtZX"
            text = self._ask(pid, deadline)[:left] if can_answer else ""
            left -= len(text)
            if text or pid == program:
                answers.append({"pid": pid, "state": state, "text": text})
        return answers

    def _ask(self, pid: int, deadline: float) -> str:
        """Signal one process and return what it wrote."""
        start = os.fstat(self._stacks).st_size
        if not process_control.signal_process(pid, STACKS_SIGNAL):
            return ""
        size, quiet_since = start, time.monotonic()
        limit = min(quiet_since + _ANSWER_SECONDS, deadline)
        while time.monotonic() < limit:
            time.sleep(0.005)
            now = os.fstat(self._stacks).st_size
            if now != size:
                size, quiet_since = now, time.monotonic()
            elif size != start and time.monotonic() - quiet_since > _QUIET_SECONDS:
                break
        written = os.pread(self._stacks, _MAX_TEXT, start).replace(_ANSWER, b"")
        return written.decode(errors="replace")


def _file_without_a_name(title: str) -> int:
    """Return the descriptor of a new file that is gone with the last process that has it.

    Raises:
        OSError: there can be none.
    """
    try:
        return os.memfd_create(title)
    except OSError:
        # Hardened systems refuse files in memory, which may hold a program: vm.memfd_noexec=2.
        import tempfile

        return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _row(step: int) -> int:
    """Return where the row of a step begins, in words."""
    return _ROWS + step % _RING * _ROW_WORDS


def _is_python(program: "Sequence[str]") -> bool:
    """Tell whether the program is a Python interpreter, by its name."""
    name = os.path.basename(program[0])
    return program[0] == sys.executable or name.startswith(("python", "pypy"))
