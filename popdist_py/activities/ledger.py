"""The ledger, which counts the time that a program spends in each activity.

Every nanosecond since the start of counting belongs to exactly one activity, so the times of all
activities add up to the whole time. The time of a nested activity is not counted for the enclosing
activity. The counters are in memory that this process shares with its wrapper, a process of the
launcher. Without the launcher, the counters are in private memory. The ledger counts the time of
only one thread of the program's own process. The counted thread is the main thread, unless another
thread calls ``init()`` or makes the training steps.

This module writes the counters, and the wrapper's module ``progress_memory.py`` reads them.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from threading import get_ident, main_thread
from types import TracebackType
from typing import Any, Final, Protocol

from popdist_py.activities.shared_words import map_words
from popdist_py.environment import COLLECTIVES

# OTHER is the program's own code. WAITING means waiting for other instances.
(
    OTHER, COMPILING, COMPUTING, LOADING, TRANSFERRING,
    REDUCING, WAITING, UPDATING, SAVING, VALIDATING,
) = range(10)  # fmt: skip
_ALL: Final = frozenset(range(10))
NAMES: Final = (
    "other", "compiling", "computing", "loading", "transferring",
    "reducing", "waiting", "updating", "saving", "validating",
)  # fmt: skip

# The indices of the ledger's words of 8 bytes in the shared memory. The heartbeat uses the words
# before the ledger's words. The module poprun_py/instance/progress_memory.py contains the same
# indices. The word _BEGAN is the time.monotonic_ns() when counting began. The word _SINCE is the
# time up to which the times of all activities have been counted. The word _STEPS counts all steps.
# The word _TIMED_STEPS counts the steps with a known begin.
_BEGAN, _SINCE, _ACTIVITY, _SAMPLES, _TIMED_STEPS, _STEPS = range(10, 16)
_NANOSECONDS: Final = 16  # the time of activity 0; each activity has one word
# The word _CALL describes the last collective that has begun. The lowest bit of _CALL is set while
# the collective is running. The next 7 bits contain the index of the collective in
# environment.COLLECTIVES. The higher bits of _CALL contain the number of the call, counted from 1.
# The word _CALL_BEGAN contains the time when the last collective began.
_CALL, _CALL_BEGAN = 26, 27
# The word _FIRST_ROW contains the number of steps that were counted automatically and then taken
# back. Their rows do not count for the speed of the program.
_FIRST_ROW = 29
_NUMBER_SHIFT, _CALL_BITS = 8, 0xFF
_CALLS: Final = {name: code << 1 for code, name in enumerate(COLLECTIVES) if name}
# A ring buffer in the shared memory stores the last training steps, one row for each step. The
# fields of a row are the number of steps done, the end time of the step, its duration, its duration
# without waits for other instances, its samples, and its loss as a float. All times in the ring
# buffer are in nanoseconds.
_ROWS: Final = 32
_RING: Final = 4096
_ROW: Final = struct.Struct("=5qd")
_ROW_WORDS: Final = _ROW.size // 8
# After the ring buffer, two rows contain the ledger at the ends of the first and of the last step.
# A row contains the end of the step, and the nanoseconds of each activity counted until then.
_FIRST_END: Final = _ROWS + _RING * _ROW_WORDS
_END_WORDS: Final = 1 + len(NAMES)
_LAST_END: Final = _FIRST_END + _END_WORDS
_NUM_WORDS: Final = _LAST_END + _END_WORDS
# The value of ``doing._outer`` in a thread whose time is not counted.
_NOT_COUNTED: Final = -1
# The duration that is stored for a step with an unknown begin.
_UNTIMED: Final = -1
# The bits that stand for an unknown loss: a NaN that computations do not produce.
_UNKNOWN_BITS: Final = 0x7FF8_7374_6570_6C6F
(_UNKNOWN_LOSS,) = struct.unpack("=d", struct.pack("=q", _UNKNOWN_BITS))

_WAITING, _COMPILING = _NANOSECONDS + WAITING, _NANOSECONDS + COMPILING
_OTHER, _COMPUTING = _NANOSECONDS + OTHER, _NANOSECONDS + COMPUTING
_SAVING, _VALIDATING = _NANOSECONDS + SAVING, _NANOSECONDS + VALIDATING


class Listener(Protocol):
    """An object whose methods are called for every activity of every thread.

    The methods must be fast, because the program waits until they return. All times are values of
    ``time.monotonic_ns()``.
    """

    def begun(self, activity: int, name: str, begin: int, /) -> Any:
        """Handle the beginning of an activity. The result is later passed to ``ended``."""

    def ended(self, activity: int, name: str, begin: int, end: int, begun: Any, /) -> None:
        """Handle the end of an activity.

        Args:
            activity: A constant of the ledger, such as ``LOADING``.
            name: The description of the activity.
            begin: The time when the activity began.
            end: The time when the activity ended.
            begun: The value that the method ``begun`` has returned for this activity; None if
                ``begun`` was not called for it.
        """

    def step(self, begin: int, end: int, /) -> None:
        """Handle the end of a training step in which no block of COMPUTING was counted."""


_words: memoryview | None = None
_owner = 0  # The id of the counted thread.
_waited_beside = 0  # The nanoseconds that uncounted threads have waited for other instances.
_is_program = True  # Whether this process is the program itself, not a fork of it.
_num_calls = 0  # The number of collectives that have begun.
_listener: Listener | None = None
# The nanoseconds of the program's own code that were counted as COMPUTING afterwards.
_computed_by_own_code = 0
# The first number is the time when the last step ended (0 before the first step). The other three
# numbers are nanoseconds that were counted up to the end of the last step: outside steps
# (compiling, saving and validating), waiting, and computing.
_last_step = (0, 0, 0, 0)


def begin() -> None:
    """Start counting the time of the calling thread. ``init()`` calls this function."""
    if _words is None:
        _open()
    _count_here()


class doing:
    """A context manager that counts the time of its block for an activity.

    The context manager itself takes less than a microsecond.

    Args:
        activity: A constant of this module, such as ``LOADING``.
        name: A description for the listener.
        call: The name of the collective, for the activity REDUCING. If ``call`` is empty and
            ``name`` is the name of a collective, ``call`` defaults to ``name``.

    Raises:
        ValueError: ``activity`` is not a constant for an activity.
    """

    __slots__ = ("_activity", "_began", "_call", "_name", "_outer", "_told")

    def __init__(self, activity: int, name: str = "", call: str = "") -> None:
        if activity not in _ALL:
            raise ValueError(
                f"doing({activity!r}): expected a constant of popdist_py.activities, such as "
                "activities.LOADING"
            )
        self._activity = activity
        self._name = name
        self._call = _CALLS.get(call or name, 0) if activity == REDUCING else 0

    def __enter__(self) -> None:
        global _num_calls
        words = _words or _open()
        self._began = now = time.monotonic_ns()
        if get_ident() == _owner:
            self._outer = outer = words[_ACTIVITY]
            words[_NANOSECONDS + outer] += now - words[_SINCE]
            words[_ACTIVITY] = self._activity
            words[_SINCE] = now
        else:
            self._outer = _NOT_COUNTED
        if self._call:
            _num_calls += 1
            self._call = _num_calls << _NUMBER_SHIFT | self._call & _CALL_BITS | 1
            words[_CALL_BEGAN] = now
            words[_CALL] = self._call
        told = None if _listener is None else _listener.begun(self._activity, self._name, now)
        self._told = told

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _waited_beside
        words = _words or _open()
        # If several threads make collective calls, the word _CALL describes the call that began
        # last.
        if self._call and words[_CALL] == self._call:
            words[_CALL] = self._call - 1
        now = time.monotonic_ns()
        if self._outer != _NOT_COUNTED:
            words[_NANOSECONDS + self._activity] += now - words[_SINCE]
            words[_ACTIVITY] = self._outer
            words[_SINCE] = now
        elif self._activity == WAITING:
            _waited_beside += now - self._began
        if _listener is not None:
            _listener.ended(self._activity, self._name, self._began, now, self._told)


class awaiting_background(doing):
    """A context manager for a block that waits for collectives of the background thread.

    The time in which the background thread waits for other instances is counted as WAITING. The
    rest of the block's time is counted as REDUCING.
    """

    __slots__ = ("_waited_before",)

    def __init__(self) -> None:
        super().__init__(REDUCING)

    def __enter__(self) -> None:
        self._waited_before = _waited_beside
        super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, trace)
        words = _words or _open()
        if self._outer != _NOT_COUNTED:
            # The background thread may have begun to wait before this block, so its wait may be
            # longer than the block.
            waited = min(_waited_beside - self._waited_before, words[_SINCE] - self._began)
            words[_NANOSECONDS + REDUCING] -= waited
            words[_NANOSECONDS + WAITING] += waited


def step_done(samples: int = 0, loss: float | None = None, number: int | None = None) -> None:
    """Count a training step, which began at the end of the previous step and ends now.

    The time spent on compiling, validating and saving is not part of the step's duration.

    Args:
        samples: The number of samples that this instance has trained on in the step, or 0 if
            unknown.
        loss: The loss of the step, or None if unknown.
        number: The number of steps that the program has done so far. The default is the number of
            calls of this function.
    """
    global _last_step
    words = _words or _open()
    now = time.monotonic_ns()
    if get_ident() != _owner:
        _count_here()
    began, beside_before, waited_before, computed_before = _last_step
    _last_step = _, beside, waited, computed = now, *_counted_beside(words)
    words[_SAMPLES] += samples
    taken = own = _UNTIMED
    if began:
        taken = max(0, now - began - (beside - beside_before))
        own = max(0, taken - (waited - waited_before))
        words[_TIMED_STEPS] += 1
        if _listener is not None and computed == computed_before:
            _listener.step(now - taken, now)
    if loss is None:
        loss = _UNKNOWN_LOSS
    elif loss != loss:
        loss = math.nan  # this NaN differs from the bits of an unknown loss
    steps = words[_STEPS]
    _write_end(words, _LAST_END, now)
    if steps == words[_FIRST_ROW]:
        _write_end(words, _FIRST_END, now)
    number = steps + 1 if number is None else number
    _write_row(words, number, now, taken, own, samples, loss)


def begin_step() -> int:
    """Let the next training step begin now, and return the time.

    If no step is counted yet, the caller may count a first step that ends now, afterwards.
    """
    global _last_step
    words = _words or _open()
    if get_ident() != _owner:
        _count_here()
    now = time.monotonic_ns()
    _last_step = now, *_counted_beside(words)
    if words[_STEPS] == words[_FIRST_ROW]:
        _write_end(words, _FIRST_END, now)
    return now


def add_first_step(number: int, ended: int) -> None:
    """Count a first training step, which ended when ``begin_step`` returned ``ended``."""
    words = _words or _open()
    words[_LAST_END : _LAST_END + _END_WORDS] = words[_FIRST_END : _FIRST_END + _END_WORDS]
    _write_row(words, number, ended, _UNTIMED, _UNTIMED, 0, _UNKNOWN_LOSS)


def forget_steps() -> None:
    """Take back all training steps; the next step has an unknown begin, like a first step."""
    global _last_step
    words = _words or _open()
    _last_step = (0, 0, 0, 0)
    words[_TIMED_STEPS] = 0
    words[_FIRST_ROW] = words[_STEPS]


def _counted_beside(words: memoryview) -> tuple[int, int, int]:
    """Return the nanoseconds counted outside steps, as waiting, and in blocks of COMPUTING."""
    beside = words[_COMPILING] + words[_SAVING] + words[_VALIDATING]
    return beside, words[_WAITING], words[_COMPUTING] - _computed_by_own_code


def _write_end(words: memoryview, place: int, ended: int) -> None:
    """Write the times of all activities at the end of a step, to one of the last two rows."""
    spent = words[_NANOSECONDS : _NANOSECONDS + len(NAMES)]
    words[place + 1 : place + _END_WORDS] = spent
    words[place] = ended


def _write_row(
    words: memoryview, number: int, ended: int, taken: int, own: int, samples: int, loss: float
) -> None:
    """Write the row of a step into the ring buffer."""
    steps = words[_STEPS]
    offset = 8 * (_ROWS + steps % _RING * _ROW_WORDS)
    _ROW.pack_into(words, offset, number, ended, taken, own, samples, loss)
    # The step counter is written after the row, so that the wrapper reads only complete rows.
    words[_STEPS] = steps + 1


def waited() -> int:
    """Return the nanoseconds that this instance has waited for other instances."""
    return int((_words or _open())[_WAITING])


def count_as_waiting(nanoseconds: int) -> None:
    """Move ``nanoseconds`` from the time of the current activity to the time spent waiting."""
    words = _words or _open()
    if nanoseconds > 0 and get_ident() == _owner:
        words[_NANOSECONDS + words[_ACTIVITY]] -= nanoseconds
        words[_WAITING] += nanoseconds


def own_time() -> int:
    """Return the nanoseconds counted as OTHER until now; -1 if this thread's time is not OTHER."""
    words = _words or _open()
    if words[_ACTIVITY] != OTHER or get_ident() != _owner:
        return -1
    return int(words[_OTHER]) + time.monotonic_ns() - int(words[_SINCE])


def count_own_as(activity: int, since: int) -> None:
    """Move the time of OTHER after an ``own_time`` of ``since`` to ``activity``.

    So a block that has ended is counted without its nested activities. If ``since`` is -1, the
    function does nothing.
    """
    global _computed_by_own_code
    until = own_time()
    if 0 <= since < until:
        words = _words or _open()
        words[_OTHER] -= until - since
        words[_NANOSECONDS + activity] += until - since
        if activity == COMPUTING:
            _computed_by_own_code += until - since


def listen(listener: Listener | None) -> None:
    """Call ``listener`` for every activity from now on; None removes the current listener."""
    global _listener
    _listener = listener


def _open() -> memoryview:
    """Start counting. Only the program's own process uses shared memory for the counters."""
    global _words, _owner
    _words = words = map_words(_NUM_WORDS) if _is_own_process() else _private_words()
    _owner = main_thread().ident or 0
    words[_ACTIVITY] = OTHER
    if not words[_BEGAN]:
        words[_SINCE] = now = time.monotonic_ns()
        words[_BEGAN] = now
    return words


def _count_here() -> None:
    """Count this thread's time from now on, unless the counted thread is in an activity."""
    global _owner
    if _words is not None and _words[_ACTIVITY] == OTHER:
        _owner = get_ident()


def _is_own_process() -> bool:
    """Tell whether this is the program's process, not a child such as a loader's worker."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return _is_program and (multiprocessing is None or multiprocessing.parent_process() is None)


def _private_words() -> memoryview:
    return memoryview(bytearray(8 * _NUM_WORDS)).cast("q")


def _forget() -> None:
    """Stop counting in a forked child process. Only the program's own process is counted."""
    global _words, _is_program, _listener
    _words, _listener, _is_program = None, None, False


os.register_at_fork(after_in_child=_forget)
