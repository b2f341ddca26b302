"""The heartbeat of this instance, and whether the launcher asks it to stop.

A few numbers in memory that is shared with the launcher's wrapper on this host: a step costs one
addition. Without the launcher the same calls count in private memory. Standard library only;
nothing here saves or ends a training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import time
from pathlib import Path
from typing import BinaryIO

from popdist_py import environment
from popdist_py.environment import RESUME_EXIT_CODE

__all__ = ["RESUME_EXIT_CODE", "begin", "step", "steps", "stopRequested"]

# The words of the shared memory, each of 8 bytes: poprun_py/instance/vitals.py has the same.
_STEP, _POLLS, _PROPOSED, _AGREED, _BEGUN = range(5)
_NUM_WORDS = 8
_WAIT_SECONDS = 0.0005

_words: memoryview | None = None
_stacks_file: BinaryIO | None = None


def begin() -> None:
    """Tell the launcher that steps will be counted from now on; ``init()`` calls this."""
    words = _words or _open()
    words[_BEGUN] = 1
    _answer_with_stacks()


def step() -> None:
    """Tell the launcher that one more step is done; takes a fraction of a microsecond.

    Training with ``popdist_py.poptorch`` calls this itself, once for each optimiser step.
    """
    words = _words or _open()
    words[_STEP] += 1


def steps() -> int:
    """Return how many steps were counted in this process."""
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


def _answer_with_stacks() -> None:
    """Let the launcher's signal write the stacks of all threads.

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


def _open() -> memoryview:
    """Map the memory that the launcher's wrapper made, or private memory without one."""
    global _words
    memory = mmap.mmap(-1, 8 * _NUM_WORDS)
    path = os.environ.get(environment.HEARTBEAT)
    if path:
        # With a wrapper of another version or host, the instance runs without being watched.
        with contextlib.suppress(OSError, ValueError), Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 8 * _NUM_WORDS)
    _words = memoryview(memory).cast("q")
    return _words
