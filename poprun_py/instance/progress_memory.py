"""Memory that a program shares with its wrapper, for steps, collectives, times and stop requests.

The program writes its steps, its collectives and its time per activity (popdist_py/heartbeat.py and
popdist_py/activities/ledger.py). The wrapper reads the program's values, and writes the number of
the stopRequested() call that is to stop the program. The shared memory is a file without a name, so
that no file is left after a crash.
"""

import mmap
import os
import time

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from typing import Any

# Indices of the 8-byte words of the shared memory that popdist_py/heartbeat.py uses.
_STEP, _POLLS, _PROPOSED, _AGREED, _BEGUN, _CALLS, _RESUMED, _DOING = range(8)
_DEBUGGED, _TERMINAL = 8, 9
# The value of the word _DOING of a program whose steps are counted automatically.
_AUTOMATIC = 4
# The value of the word _BEGUN if the program will count training steps.
_WILL_STEP = 2
# The values of _ACTIVITY during a wait for other instances and during work on a checkpoint.
_WAITING, _SAVING = 6, 8
# Indices of the words that popdist_py/activities/ledger.py writes: the time when counting began,
# the time when the nanoseconds of an activity were last updated, the current activity, the numbers
# of samples, of timed steps and of all steps, and the nanoseconds of each activity.
_LEDGER_BEGAN, _SINCE, _ACTIVITY, _SAMPLES, _TIMED_STEPS, _STEPS = range(10, 16)
_NANOSECONDS, _NUM_ACTIVITIES = 16, 10
# Indices of two words about the last collective operation. The first word contains the number of
# the collective, its kind (7 bits), and a bit that tells whether it is running. The second word is
# the time when the collective began.
_CALL, _CALL_BEGAN = 26, 27
# The index of the word with the number of steps that were taken back (popdist_py/heartbeat.py).
_FIRST_ROW = 29
# The index of the word for the id of a process whose main thread ended with an exception.
_FAILED = 28
# The index of a word whose first byte is 1 if the program has started MPI itself, by importing
# mpi4py.MPI (popdist_py/start_hook/popdist_mpi_sockets.py).
_FLAGS = 30
# The index of the word that is 1 if the program trained a model separately from the other instances
# (popdist_py/start_hook/popdist_separate_models.py).
_SEPARATE = 31
# A ring buffer contains a row of six words for each of the last 4096 steps: the step's number, the
# time when it ended, its duration (_UNTIMED if not known), its duration without waiting for other
# instances, its number of samples, and its loss (_UNKNOWN_BITS if not known).
_ROWS, _RING, _ROW_WORDS = 32, 4096, 6
# Two rows after the ring buffer contain the ends of the first and of the last step. A row contains
# the end of the step, and the nanoseconds of each activity that were counted until then.
_FIRST_END, _LAST_END, _ALL_WORDS = 24608, 24619, 24630
_TAKEN, _OWN, _LOSS = 2, 3, 5
_UNTIMED, _UNKNOWN_BITS = -1, 0x7FF8_7374_6570_6C6F
# A ledger contains the durations of at most 255 steps. For the last ten steps, the ledger also
# contains the durations without waiting for other instances.
_LAST_STEPS, _OWN_STEPS = 255, 10
# After writing a word of the shared memory, the wrapper waits 1 ms. After 1 ms, the program sees
# the new word, and the wrapper sees everything that the program wrote before seeing the new word.
_SETTLE_SECONDS = 0.001


def unnamed_file(title: str) -> int:
    """Return the descriptor of a new file that vanishes when the last process closes it.

    Raises:
        OSError: The file cannot be created.
    """
    try:
        return os.memfd_create(title)
    except OSError:
        # Hardened systems (memfd_noexec=2) forbid files in memory, which may contain programs.
        import tempfile

        return os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


class ProgressMemory:
    """The memory that the wrapper shares with its program."""

    def __init__(self) -> None:
        self._file = unnamed_file("poprun-heartbeat")
        os.ftruncate(self._file, 8 * _ALL_WORDS)
        self._words = memoryview(mmap.mmap(self._file, 8 * _ALL_WORDS)).cast("q")
        self._has_counted = False

    def close(self) -> None:
        """Close the file of the memory."""
        os.close(self._file)

    def variables(self) -> dict[str, str]:
        """Return the environment variable that tells the program where the memory is."""
        return {"POPDIST_HEARTBEAT": f"/proc/{os.getpid()}/fd/{self._file}"}

    def progress(self) -> "list[int] | None":
        """Return the progress of the program; None before the program begins to report it.

        The progress is four numbers: the training steps so far, the other calls since the last
        step, the step where the program resumed, and the code of its current operation.
        """
        words = self._words
        progress = [words[_STEP], words[_CALLS], words[_RESUMED], words[_DOING]]
        self._has_counted = self._has_counted or bool(words[_BEGUN]) or any(progress)
        return progress if self._has_counted else None

    def counts_steps(self) -> bool:
        """Return whether the program counts steps, or will count them because it has a model."""
        progress = self.progress()
        return progress is not None and (self.has_model() or any(progress))

    def has_model(self) -> bool:
        """Return whether the program has made a PopTorch model."""
        return self._words[_BEGUN] == _WILL_STEP

    def is_automatic(self) -> bool:
        """Return whether the program's steps are counted without calls of the program."""
        return self._words[_DOING] == _AUTOMATIC

    def last_collective(self) -> "list[float]":
        """Return the last collective that the program began; zeros before the first collective.

        Returns:
            The number of the collective, counted from 1; the index of its kind in
            ``popdist_py.environment.COLLECTIVES``; 1 if it is still running, else 0; and the
            seconds since it began.
        """
        word, began = self._words[_CALL], self._words[_CALL_BEGAN]
        seconds = (time.monotonic_ns() - began) / 1e9 if began else 0.0
        return [word >> 8, word >> 1 & 127, word & 1, seconds]

    def trained_alone(self) -> bool:
        """Return whether the program trained with torch but called no collective of the library."""
        return self._words[_SEPARATE] == 1 and not self._words[_CALL]

    def has_started_mpi(self) -> bool:
        """Return whether the program has started MPI, which cannot start again under this wrapper.

        The program writes this word only in a job with checkpoints in memory.
        """
        return self._words[_FLAGS : _FLAGS + 1].tobytes()[0] == 1

    def waits(self) -> bool:
        """Return whether the program waits for other instances in a collective of the library.

        If steps are counted automatically, waiting in a collective of torch does not count. Its
        bytes may still be on their way, which a program's steps do not show.
        """
        is_waiting = self._words[_ACTIVITY] == _WAITING
        return is_waiting and (not self.is_automatic() or bool(self._words[_CALL] & 1))

    def saves(self) -> bool:
        """Return whether the program saves or loads a checkpoint of the library."""
        return self._words[_ACTIVITY] == _SAVING

    def failed_process(self) -> int:
        """Return the id of a process whose main thread ended with an exception; 0 if none."""
        return self._words[_FAILED]

    def ledger(self) -> "dict[str, Any] | None":
        """Return the program's time per activity; None before the program begins to record it.

        Returns:
            A dictionary. ``now``, ``began`` (the beginning of counting) and ``since`` (the
            beginning of the current ``activity``) are times of ``time.monotonic_ns``.
            ``nanoseconds`` contains the time of each activity until now. ``samples`` is the number
            of samples, and ``timed`` is the number of steps whose time is known. ``steps`` contains
            the durations of the last steps in nanoseconds, the oldest step first. ``own`` contains
            the durations of the last ten steps in nanoseconds, without waiting for other instances.
            ``loss`` is the loss of the last step; None if it is not known. ``joined`` tells whether
            the program has called ``init()``. ``until_first`` and ``until_last`` contain the
            nanoseconds of each activity until the ends of the first and of the last step; empty
            before the first step.
        """
        words = self._words
        began = words[_LEDGER_BEGAN]
        if not began:
            return None
        since, activity = words[_SINCE], words[_ACTIVITY]
        spent = words[_NANOSECONDS : _NANOSECONDS + _NUM_ACTIVITIES].tolist()
        now = time.monotonic_ns()
        # The program may write words while the wrapper reads them. All time belongs to some
        # activity, so the time that is missing in the sum is added to the current activity.
        spent[activity if 0 <= activity < _NUM_ACTIVITIES else 0] += now - began - sum(spent)
        timed = words[_TIMED_STEPS]
        rows = self.steps(max(words[_FIRST_ROW], words[_STEPS] - _LAST_STEPS))["rows"]
        timed_rows = [row for row in rows if row[_TAKEN] != _UNTIMED]
        return {
            "now": now,
            "began": began,
            "activity": activity,
            "since": since,
            "nanoseconds": spent,
            "samples": words[_SAMPLES],
            "timed": timed,
            "steps": [row[_TAKEN] for row in timed_rows],
            "own": [row[_OWN] for row in timed_rows[-_OWN_STEPS:]],
            "loss": rows[-1][_LOSS] if rows else None,
            "joined": bool(words[_BEGUN]),
            "until_first": self._spent_until(_FIRST_END) if words[_STEPS] else [],
            "until_last": self._spent_until(_LAST_END) if words[_STEPS] else [],
        }

    def _spent_until(self, row: int) -> list[int]:
        """Return the nanoseconds of each activity until the end of a step, from the step's row."""
        end, *spent = self._words[row : row + 1 + _NUM_ACTIVITIES].tolist()
        # A step ends in the program's own code, whose time since the last activity is not counted
        # in the row.
        spent[0] += max(0, end - self._words[_LEDGER_BEGAN] - sum(spent))
        return spent

    def steps(self, since: int) -> "dict[str, Any]":
        """Return the steps that the program made after its first ``since`` steps.

        Returns:
            A dictionary. ``made`` is the number of steps that the program has made so far. ``lost``
            is the number of requested steps that are no longer in the ring buffer. ``rows``
            contains one row per step, from the oldest to the newest step. A row contains the number
            of the step, its end as a time of ``time.monotonic_ns``, its duration in nanoseconds,
            its duration without waiting for other instances (negative if not known), its number of
            samples, and its loss (None if not known).
        """
        made = self._words[_STEPS]
        if made <= since:
            return {"made": made, "lost": 0, "rows": []}
        copied = memoryview(self._words.tobytes())
        words, numbers = copied.cast("q"), copied.cast("d")
        # While the rows were copied, the program may have overwritten the oldest rows.
        first = max(since, self._words[_STEPS] - _RING + 1)
        rows = []
        for step in range(first, made):
            begin = _ROWS + step % _RING * _ROW_WORDS
            loss = begin + _LOSS
            is_known = words[loss] != _UNKNOWN_BITS
            rows.append([*words[begin:loss].tolist(), numbers[loss] if is_known else None])
        return {"made": made, "lost": first - since if rows else made - since, "rows": rows}

    def polls(self) -> int:
        """Return how often the program has called stopRequested()."""
        return self._words[_POLLS]

    def propose_stop(self, proposal: int) -> None:
        """Make the program wait in its call of stopRequested() with the number ``proposal``."""
        self._words[_PROPOSED] = proposal
        time.sleep(_SETTLE_SECONDS)

    def agree_stop(self, proposal: int) -> None:
        """Let the program stop at the proposed call of stopRequested()."""
        self._words[_AGREED] = proposal

    def leave_debugger(self, call: int) -> None:
        """Let the program continue after its call of breakpoint() with the number ``call``."""
        self._words[_DEBUGGED] = max(call, self._words[_DEBUGGED])

    def lend_terminal(self, number: int) -> None:
        """Tell the program that its debugger may use /dev/pts/N, where ``number`` is N + 1.

        A ``number`` of 0 makes the debugger wait. A negative ``number`` means that a terminal could
        not be made; ``-number`` is the ``errno``.
        """
        self._words[_TERMINAL] = number
