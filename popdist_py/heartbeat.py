"""The heartbeat, which shows an instance's progress to the launcher, and stop requests.

The heartbeat consists of a few integers in memory that this process shares with the launcher's
wrapper on this host. Counting a step takes one addition and a few stores. Without the launcher, the
heartbeat uses private memory. This module imports only the standard library. After a stop request,
the program itself must save a checkpoint and end.

The steps of torch's optimizers are counted automatically (``count_automatically``) until the
program counts a step itself or makes a PopTorch model.
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
from popdist_py.environment import AUTOMATIC, BETWEEN_CALLS, RESUME_EXIT_CODE

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

# The indices of the integers in the shared memory. poprun_py/instance/progress_memory.py contains
# the same indices. The wrapper writes the integers at _PROPOSED, _AGREED, _DEBUGGED and _TERMINAL,
# and the program writes the others.
_STEP, _POLLS, _PROPOSED, _AGREED, _BEGUN, _CALLS, _RESUMED, _DOING = range(8)
_DEBUGGED, _TERMINAL = 8, 9
_NUM_WORDS = 10
# The possible values of the integer at the index _BEGUN.
_JOINED, _WILL_STEP = 1, 2
_WAIT_SECONDS = 0.0005

_words: memoryview | None = None
_stacks_file: BinaryIO | None = None
_has_stepped = False
# Whether steps are counted only when the program asks for it, because it has counted a step itself,
# has a PopTorch model, or is a forked child process.
_is_explicit = False
_has_model = False
# The number of steps that were counted automatically since the start or the last resume.
_num_automatic = 0
# The time when torch's optimizer stepped first: None before this step, 0 once it is counted. It is
# counted with the second one, because most programs that count their steps themselves do so between
# the two. The launcher then never sees a step that is taken back.
_first_ended: int | None = None
# Whether stopRequested() has returned True.
_is_stopping = False


def begin() -> None:
    """Tell the launcher that this program may count steps. ``init()`` calls this function."""
    words = _words or _open()
    words[_BEGUN] = max(_JOINED, words[_BEGUN])
    activities.begin()
    _answer_with_stacks()


def expect() -> None:
    """Tell the launcher that training steps or model calls will follow.

    The constructor of a PopTorch model calls this function, which ends automatic counting.
    """
    global _has_model
    words = _words or _open()
    _has_model = True
    if not _is_explicit:
        _end_automatic_counting(words)
    words[_BEGUN] = _WILL_STEP


def step(samples: int = 0, loss: SupportsFloat | None = None) -> None:
    """Count one more training step for the launcher.

    ``popdist_py.poptorch`` calls this function once for each call of a training model. The first
    call ends automatic counting, and takes back the steps that were counted automatically. This
    function takes about two microseconds.

    Args:
        samples: The number of samples that this instance has trained on in the step. The launcher
            uses this number to show samples per second.
        loss: The loss of the step on this instance: a number, or a tensor or array of one element.
            The loss may be NaN or infinite.

    Raises:
        TypeError: ``loss`` is not one number. In this case, the step is not counted.
    """
    number = None if loss is None else _one_number(loss)
    words = _words or _open()
    if not _is_explicit:
        _end_automatic_counting(words)
    # The number of model calls since the last step is set to 0 before the step is counted. The
    # launcher therefore never reads a new step together with calls that belong to an earlier step.
    words[_CALLS] = 0
    words[_STEP] = done = words[_STEP] + 1
    words[_DOING] = BETWEEN_CALLS
    activities.step_done(samples, number, done)
    if not _has_stepped:
        watch_torch_waits()


def count_automatically() -> bool:
    """Count a step of torch's optimizer; return whether steps are still counted automatically.

    The package ``torch_loops`` calls this function after each step of the program's optimizer.
    """
    global _first_ended
    if _is_explicit:
        return False
    words = _words or _open()
    if _first_ended is None:
        _first_ended = activities.begin_step()
        atexit.register(_count_first_step)
        return True
    if _first_ended:
        _count_first_step()
    activities.step_done(number=_next_automatic_step(words))
    return True


def _count_first_step() -> None:
    """Count the optimizer's first step now, unless it is counted or taken back."""
    global _first_ended
    if _first_ended and not _is_explicit:
        number = _next_automatic_step(_words or _open())
        activities.add_first_step(number, _first_ended)
        _first_ended = 0


def _next_automatic_step(words: memoryview) -> int:
    """Set the counters to the next step, and return its number."""
    global _num_automatic
    _num_automatic += 1
    words[_CALLS] = 0
    words[_STEP] = done = int(words[_STEP]) + 1
    words[_DOING] = AUTOMATIC
    return done


def _end_automatic_counting(words: memoryview) -> None:
    """Take back the steps that were counted automatically, and count no more of them."""
    global _is_explicit, _num_automatic
    _is_explicit = True
    if _first_ended is not None:
        words[_STEP] -= _num_automatic
        words[_DOING] = BETWEEN_CALLS
        activities.forget_steps()
        _num_automatic = 0


def _count_nothing_in_child() -> None:
    """Count no steps automatically in a forked child process, such as a loader's worker."""
    global _is_explicit
    _is_explicit = True


os.register_at_fork(after_in_child=_count_nothing_in_child)


def has_model() -> bool:
    """Tell whether the program has made a PopTorch model, whose calls report their activities."""
    return _has_model


def _one_number(loss: SupportsFloat) -> float:
    """Return the loss of a step as a float.

    Raises:
        TypeError: The loss is not one number.
    """
    if type(loss) is float:
        return loss
    try:
        if not isinstance(loss, str | bytes | bytearray):
            # float() of a tensor that requires a gradient issues a warning, but item() does not.
            return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    shown = repr(loss)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise TypeError(
        f"loss={shown}: expected one number, or a tensor of one element, such as losses.mean()"
    )


def call() -> None:
    """Count one more model call that does not train, such as a call for validation.

    ``popdist_py.poptorch`` calls this function once for each call of an inference model.
    """
    words = _words or _open()
    words[_CALLS] += 1
    words[_DOING] = BETWEEN_CALLS


def enter(activity: int) -> None:
    """Tell the launcher which activity begins now.

    The activity ends when ``step`` or ``call`` is called, or when another activity begins.

    Args:
        activity: ``TRAINING``, ``INFERENCE``, ``COMPILING`` or ``BETWEEN_CALLS`` of
            ``popdist_py.environment``.
    """
    (_words or _open())[_DOING] = activity


def resume(step: int) -> None:
    """Continue counting from ``step``, the number of training steps in a loaded checkpoint.

    ``TrainingCheckpoints.resume()`` calls this function.

    Raises:
        TypeError: ``step`` is not an integer.
        ValueError: ``step`` is negative.
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: expected the number of training steps done") from None
    if step < 0:
        raise ValueError(f"step={step}: expected the number of training steps done")
    global _num_automatic
    words = _words or _open()
    _num_automatic = 0
    words[_RESUMED] = step
    words[_CALLS] = 0
    words[_STEP] = step


def steps() -> int:
    """Return the number of training steps done, including the steps before a loaded checkpoint."""
    return int((_words or _open())[_STEP])


def stopRequested() -> bool:
    """Tell whether the job was asked to stop, with the same answer on every instance.

    Call this function once per step. If it returns true, save a checkpoint and end the program with
    ``sys.exit(popdist_py.RESUME_EXIT_CODE)``. The launcher requests a stop when it receives SIGTERM
    or SIGUSR1. After a request, the instances agree on the number of a later call of this function.
    The call with this number returns true on every instance. If it begins before all instances have
    agreed, it waits for the agreement.
    """
    global _is_stopping
    words = _words or _open()
    words[_POLLS] = polls = words[_POLLS] + 1
    while 0 < (proposed := words[_PROPOSED]) <= polls:
        if words[_AGREED] == proposed:
            _is_stopping = True
            return True
        time.sleep(_WAIT_SECONDS)
    return False


def is_stopping() -> bool:
    """Tell whether ``stopRequested`` has returned True."""
    return _is_stopping


def calls_debugged() -> int:
    """Return the number of the latest breakpoint() call that has ended, or 0 for none."""
    return int((_words or _open())[_DEBUGGED])


def lent_terminal() -> int:
    """Return the terminal that the debugger may use, as a number.

    The number N + 1 stands for the terminal /dev/pts/N. The number 0 means that the debugger must
    still wait for a terminal. A negative number means that no terminal can be made, and is the
    error's ``-errno``.
    """
    return int((_words or _open())[_TERMINAL])


def watch_torch_waits() -> None:
    """Start to count the time that the program waits in torch.distributed; later calls do nothing.

    This begins at the first step, because programs set up torch.distributed before it.
    """
    global _has_stepped
    if _has_stepped:
        return
    _has_stepped = True
    from popdist_py.activities import torch_waits

    torch_waits.watch()


def _answer_with_stacks() -> None:
    """Install the handlers of the two signals that the wrapper sends to examine a hung program.

    One handler writes the stacks of all threads. The other handler writes a NUL byte, to show that
    the main thread runs Python code. A Python that the wrapper itself starts installs these
    handlers before the program begins, and removes the environment variable. This function is for
    other Pythons, such as a Python that a shell script starts.
    """
    global _stacks_file
    signal_number, _, path = os.environ.pop(environment.STACKS, "").partition(":")
    if path:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            # The signal handler needs a file that stays open.
            _stacks_file = Path(path).open("ab", buffering=0)  # noqa: SIM115
            faulthandler.register(
                int(signal_number), file=_stacks_file, all_threads=True, chain=False
            )
            _answer_when_python_runs(int(signal_number) - 1, _stacks_file)


def _answer_when_python_runs(number: int, file: BinaryIO) -> None:
    """Make a signal write a NUL byte to ``file`` as soon as the main thread runs Python code."""
    import signal  # importing signal is slow, and most programs do not need it

    def answer(*_: object) -> None:
        os.write(file.fileno(), b"\0")

    signal.signal(number, answer)
    signal.siginterrupt(number, False)
    # Python removes its signal handlers at exit. The signal is then ignored, because by default it
    # would end the process.
    atexit.register(signal.signal, number, signal.SIG_IGN)


def _open() -> memoryview:
    """Map the memory shared with the wrapper, or private memory if there is no wrapper."""
    global _words
    _words = map_words(_NUM_WORDS)
    return _words
