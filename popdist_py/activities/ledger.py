"""The ledger: what the program does now, and for how long it did what.

Every nanosecond since counting began belongs to one activity: inside another one, the inner one's
time is not the outer's, so the shares add up to the whole. The numbers lie in memory that is shared
with the launcher's wrapper, which reads them from outside; without the launcher in private memory.
Only one thread of the program's own process is counted: other threads and processes add nothing.
It is the main thread, or else the thread that called ``init()`` or that makes the training steps.

Nothing here reads the numbers: that is the wrapper's progress_memory.py.
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

__all__ = [
    "COMPILING",
    "COMPUTING",
    "LOADING",
    "NAMES",
    "OTHER",
    "REDUCING",
    "SAVING",
    "TRANSFERRING",
    "UPDATING",
    "VALIDATING",
    "WAITING",
    "Listener",
    "awaiting_background",
    "begin",
    "count_as_waiting",
    "doing",
    "listen",
    "step_done",
    "waited",
]

# OTHER is the program's own code; WAITING is for other instances.
(
    OTHER, COMPILING, COMPUTING, LOADING, TRANSFERRING,
    REDUCING, WAITING, UPDATING, SAVING, VALIDATING,
) = range(10)  # fmt: skip
_ALL: Final = frozenset(range(10))
NAMES: Final = (
    "other", "compiling", "computing", "loading", "transferring",
    "reducing", "waiting", "updating", "saving", "validating",
)  # fmt: skip

# The words after those of the heartbeat; poprun_py/instance/progress_memory.py reads the same.
# _BEGAN and _SINCE are time.monotonic_ns(): when counting began, and up to when the nanoseconds of
# the activities tell of all time.
# _STEPS counts all steps of this memory, _TIMED_STEPS those whose beginning is known.
_BEGAN, _SINCE, _ACTIVITY, _SAMPLES, _TIMED_STEPS, _STEPS = range(10, 16)
_NANOSECONDS: Final = 16  # one word for each activity
# The last collective that was begun: from the lowest bit on, whether it goes on (1), which of
# environment.COLLECTIVES it is (7), and its number, counted from 1; and when it was begun.
_CALL, _CALL_BEGAN = 26, 27
_NUMBER_SHIFT, _CALL_BITS = 8, 0xFF
_CALLS: Final = {name: code << 1 for code, name in enumerate(COLLECTIVES) if name}
# The last steps, in a ring: of each the number of steps done by then, when it ended, its
# nanoseconds, those without waiting for others, its samples, and the bits of its loss.
_ROWS: Final = 32
_RING: Final = 4096
_ROW: Final = struct.Struct("=5qd")
_ROW_WORDS: Final = _ROW.size // 8
_NUM_WORDS: Final = _ROWS + _RING * _ROW_WORDS
# Stands for the outer activity where an activity begins in a thread that is not counted.
_NOT_COUNTED: Final = -1
# The nanoseconds of a step whose beginning nobody knows.
_UNTIMED: Final = -1
# The bits of a loss that nobody knows: of a NaN that no computation makes.
_UNKNOWN_BITS: Final = 0x7FF8_7374_6570_6C6F
(_UNKNOWN_LOSS,) = struct.unpack("=d", struct.pack("=q", _UNKNOWN_BITS))

_WAITING, _COMPILING = _NANOSECONDS + WAITING, _NANOSECONDS + COMPILING
_COMPUTING = _NANOSECONDS + COMPUTING
_SAVING, _VALIDATING = _NANOSECONDS + SAVING, _NANOSECONDS + VALIDATING


class Listener(Protocol):
    """Is told of every activity, of any thread, and takes its time from the program.

    Moments are of ``time.monotonic_ns()``.
    """

    def begun(self, activity: int, name: str, begin: int, /) -> Any:
        """An activity begins; what is returned is told at its end."""

    def ended(self, activity: int, name: str, begin: int, end: int, begun: Any, /) -> None:
        """An activity has ended; ``begun`` is None if its begin was not told."""

    def step(self, begin: int, end: int, /) -> None:
        """A step has ended in which nothing computed that the ledger knows of."""


_words: memoryview | None = None
_owner = 0  # the thread that counts
_waited_beside = 0  # nanoseconds that other threads have waited for other instances
_is_program = True  # and not a process that the program forked
_num_calls = 0  # collectives begun
_listener: Listener | None = None
# As of the last step: when it ended (0: there was none), and the time spent beside steps, waiting,
# and computing until then.
_last_step = (0, 0, 0, 0)


def begin() -> None:
    """Start counting, in the calling thread; ``init()`` calls this."""
    if _words is None:
        _open()
    _count_here()


class doing:
    """What the block does, for the launcher's views; takes less than a microsecond.

    Args:
        activity: one of this module's.
        name: says more, to a listener.
        call: of REDUCING, the collective that this is; by default ``name``, if it is one's.

    Raises:
        ValueError: there is no such activity.
    """

    __slots__ = ("_activity", "_began", "_call", "_name", "_outer", "_told")

    def __init__(self, activity: int, name: str = "", call: str = "") -> None:
        if activity not in _ALL:
            raise ValueError(
                f"doing({activity!r}): expected an activity of popdist_py.activities, such as "
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
        # Of calls in several threads the one that began last is told of.
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
    """The block waits for collectives beside the program: reduces, or waits as they wait."""

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
            # Such a wait may have begun before the block.
            waited = min(_waited_beside - self._waited_before, words[_SINCE] - self._began)
            words[_NANOSECONDS + REDUCING] -= waited
            words[_NANOSECONDS + WAITING] += waited


def step_done(samples: int = 0, loss: float | None = None, number: int | None = None) -> None:
    """Note that a training step has ended, which took the time since the one before it.

    Compiling, validating and saving in between are not of the step.

    Args:
        samples: that this instance trained on in it; 0 where nobody knows.
        loss: of the step; None where nobody knows.
        number: of steps done by now; by default those noted here.
    """
    global _last_step
    words = _words or _open()
    now = time.monotonic_ns()
    if get_ident() != _owner:
        _count_here()
    began, beside_before, waited_before, computed_before = _last_step
    beside = words[_COMPILING] + words[_SAVING] + words[_VALIDATING]
    waited, computed = words[_WAITING], words[_COMPUTING]
    _last_step = (now, beside, waited, computed)
    words[_SAMPLES] += samples
    steps = words[_STEPS]
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
        loss = math.nan  # of whatever bits it is
    _ROW.pack_into(
        words,
        8 * (_ROWS + steps % _RING * _ROW_WORDS),
        steps + 1 if number is None else number,
        now,
        taken,
        own,
        samples,
        loss,
    )
    # After the row: whoever reads in between sees whole rows only.
    words[_STEPS] = steps + 1


def waited() -> int:
    """Return for how many nanoseconds this instance has waited for others."""
    return int((_words or _open())[_WAITING])


def count_as_waiting(nanoseconds: int) -> None:
    """Note that so much of the last time of what goes on now was waiting for others."""
    words = _words or _open()
    if nanoseconds > 0 and get_ident() == _owner:
        words[_NANOSECONDS + words[_ACTIVITY]] -= nanoseconds
        words[_WAITING] += nanoseconds


def listen(listener: Listener | None) -> None:
    """Tell ``listener`` of every activity from now on; None ends that."""
    global _listener
    _listener = listener


def _open() -> memoryview:
    """Begin to count, in the memory of the launcher if this is the program's own process."""
    global _words, _owner
    _words = words = map_words(_NUM_WORDS) if _is_own_process() else _private_words()
    _owner = main_thread().ident or 0
    words[_ACTIVITY] = OTHER
    if not words[_BEGAN]:
        words[_SINCE] = now = time.monotonic_ns()
        words[_BEGAN] = now
    return words


def _count_here() -> None:
    """Count this thread from now on, unless the counted thread is inside an activity."""
    global _owner
    if _words is not None and _words[_ACTIVITY] == OTHER:
        _owner = get_ident()


def _is_own_process() -> bool:
    """Tell whether this is no process that the program made, such as one that loads data."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return _is_program and (multiprocessing is None or multiprocessing.parent_process() is None)


def _private_words() -> memoryview:
    return memoryview(bytearray(8 * _NUM_WORDS)).cast("q")


def _forget() -> None:
    """In a process that the program forked: what it does is not the program's."""
    global _words, _is_program, _listener
    _words, _listener, _is_program = None, None, False


os.register_at_fork(after_in_child=_forget)
