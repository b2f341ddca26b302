"""The heartbeat of this instance, and whether the launcher asks it to stop.

A few numbers in memory that is shared with the launcher's wrapper on this host: a step costs an
addition and two stores. Without the launcher the same calls count in private memory. Standard
library only; nothing here saves or ends a training.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import operator
import os
import time
from pathlib import Path
from typing import BinaryIO, SupportsFloat

from popdist_py import activities, environment
from popdist_py.activities.shared_words import map_words
from popdist_py.environment import BETWEEN_CALLS, RESUME_EXIT_CODE

__all__ = [
    "RESUME_EXIT_CODE",
    "begin",
    "call",
    "enter",
    "expect",
    "resume",
    "step",
    "steps",
    "stopRequested",
]

# The words of the shared memory, each of 8 bytes; the same as in
# poprun_py/instance/progress_memory.py. The program alone writes _STEP, _POLLS and those from
# _BEGUN on, the wrapper the others.
_STEP, _POLLS, _PROPOSED, _AGREED, _BEGUN, _CALLS, _RESUMED, _DOING = range(8)
_DEBUGGED, _TERMINAL = 8, 9
_NUM_WORDS = 10
# Of _BEGUN.
_JOINED, _WILL_STEP = 1, 2
_WAIT_SECONDS = 0.0005

_words: memoryview | None = None
_stacks_file: BinaryIO | None = None
_has_stepped = False


def begin() -> None:
    """Tell the launcher that steps may be counted from now on; ``init()`` calls this."""
    words = _words or _open()
    words[_BEGUN] = max(_JOINED, words[_BEGUN])
    activities.begin()
    _answer_with_stacks()


def expect() -> None:
    """Tell the launcher that steps or calls will follow, from now on; a model calls this."""
    (_words or _open())[_BEGUN] = _WILL_STEP


def step(samples: int = 0, loss: SupportsFloat | None = None) -> None:
    """Tell the launcher that one more training step is done; takes about two microseconds.

    ``popdist_py.poptorch`` calls this itself, once for each call of a training model.

    Args:
        samples: that this instance trained on in the step, for the samples per second that the
            launcher shows.
        loss: of the step on this instance: a number, or a tensor or array of one element. It may
            be NaN or infinite.

    Raises:
        TypeError: ``loss`` is not one number; nothing was counted.
    """
    number = None if loss is None else _one_number(loss)
    words = _words or _open()
    # In this order: whoever reads in between sees the calls of no step but the last.
    words[_CALLS] = 0
    words[_STEP] = done = words[_STEP] + 1
    words[_DOING] = BETWEEN_CALLS
    activities.step_done(samples, number, done)
    if not _has_stepped:
        _note_first_step()


def _one_number(loss: SupportsFloat) -> float:
    """Return a loss as a number.

    Raises:
        TypeError: it is not one.
    """
    if type(loss) is float:
        return loss
    try:
        if not isinstance(loss, str | bytes | bytearray):
            # float() of a tensor with a graph warns.
            return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    shown = repr(loss)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise TypeError(
        f"loss={shown}: expected one number, or a tensor of one element, such as losses.mean()"
    )


def call() -> None:
    """Tell the launcher that one more call is done that trains nothing, such as of a validation.

    ``popdist_py.poptorch`` calls this itself, once for each call of an inference model.
    """
    words = _words or _open()
    words[_CALLS] += 1
    words[_DOING] = BETWEEN_CALLS


def enter(activity: int) -> None:
    """Tell the launcher what begins now: a call ends it, and so does ``BETWEEN_CALLS``.

    Args:
        activity: ``TRAINING``, ``INFERENCE``, ``COMPILING`` or ``BETWEEN_CALLS`` of
            ``popdist_py.environment``.
    """
    (_words or _open())[_DOING] = activity


def resume(step: int) -> None:
    """Count on from ``step``, the number of training steps that a loaded checkpoint holds.

    ``TrainingCheckpoints.resume()`` calls this itself.

    Raises:
        TypeError: ``step`` is no whole number.
        ValueError: ``step`` is negative.
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: the number of training steps done is expected") from None
    if step < 0:
        raise ValueError(f"step={step}: the number of training steps done is expected")
    words = _words or _open()
    words[_RESUMED] = step
    words[_CALLS] = 0
    words[_STEP] = step


def steps() -> int:
    """Return how many training steps are done, with those before the checkpoint resumed from."""
    return int((_words or _open())[_STEP])


def stopRequested() -> bool:
    """Tell whether the job was asked to stop, at the same call on every instance.

    Ask once per step: when the answer is yes, save a checkpoint and end with
    ``sys.exit(popdist_py.RESUME_EXIT_CODE)``. The launcher asks on SIGTERM and SIGUSR1. It agrees
    with all instances on a call that none of them has reached; an instance that gets there before
    the agreement is complete waits in this function for it.
    """
    words = _words or _open()
    words[_POLLS] = polls = words[_POLLS] + 1
    while 0 < (proposed := words[_PROPOSED]) <= polls:
        if words[_AGREED] == proposed:
            return True
        time.sleep(_WAIT_SECONDS)
    return False


def calls_debugged() -> int:
    """Return the call of breakpoint(), counted from 1, whose debugger was left last."""
    return int((_words or _open())[_DEBUGGED])


def lent_terminal() -> int:
    """Return N + 1 if the debugger may use /dev/pts/N; 0 while it has to wait.

    A negative number says why there is none, as in ``errno``.
    """
    return int((_words or _open())[_TERMINAL])


def _note_first_step() -> None:
    """By now a program that uses torch.distributed has begun to."""
    global _has_stepped
    _has_stepped = True
    from popdist_py.activities import torch_waits

    torch_waits.watch()


def _answer_with_stacks() -> None:
    """Let the launcher's signals write the stacks of all threads, and ask whether Python runs.

    In a Python that the wrapper itself started, this was done before the program began, and the
    variable was removed. This function serves other Pythons, such as one behind a shell script.
    """
    global _stacks_file
    signal_number, _, path = os.environ.pop(environment.STACKS, "").partition(":")
    if path:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            _stacks_file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (for the handler)
            faulthandler.register(
                int(signal_number), file=_stacks_file, all_threads=True, chain=False
            )
            _answer_when_python_runs(int(signal_number) - 1, _stacks_file)


def _answer_when_python_runs(number: int, file: BinaryIO) -> None:
    """Let a signal write a NUL once the main thread is in Python, and not in a call of C."""
    import signal  # takes longer than all else here, which most programs need

    def answer(*_: object) -> None:
        os.write(file.fileno(), b"\0")

    signal.signal(number, answer)
    signal.siginterrupt(number, False)
    # The interpreter forgets its handlers when it ends: the signal would end the process.
    atexit.register(signal.signal, number, signal.SIG_IGN)


def _open() -> memoryview:
    """Count in the memory that the launcher's wrapper made, or in private memory without one."""
    global _words
    _words = map_words(_NUM_WORDS)
    return _words
