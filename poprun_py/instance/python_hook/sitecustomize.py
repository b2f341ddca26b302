"""Runs when Python starts in an instance: a signal makes it write the stacks of all its threads.

Another makes it write a NUL as soon as its main thread runs Python, and not a call of C.
Fatal signals show a Python stack too, and a program that used torch.distributed ends without being
aborted by torch's own threads. Needs nothing of the program, and leaves no trace in it: the
folder goes from ``sys.path`` and PYTHONPATH again, and the user's own ``sitecustomize`` is run.
"""

import atexit
import os
import sys

# The threads of gloo's process groups, as torch names them; they live until the process ends.
_GLOO = "pt_gloo_runloop"
_IDLE_LOOKS, _LOOK_SECONDS, _MOST_LOOKS = 2, 0.001, 1000


def _answer_with_stacks() -> None:
    """Register the handler, which runs in C and needs neither the interpreter nor its lock."""
    number, _, path = os.environ.pop("POPDIST_STACKS", "").partition(":")
    if not path:
        return
    import faulthandler

    try:
        if not faulthandler.is_enabled():
            faulthandler.enable()
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open for the handler)
        faulthandler.register(int(number), file=file, all_threads=True, chain=False)
        _answer_when_python_runs(int(number) - 1, file.fileno())
    except (OSError, ValueError, RuntimeError, AttributeError):
        return
    # The handler holds the descriptor only: the file must live as long as the process.
    sys._poprun_stacks_file = file  # type: ignore[attr-defined]


def _answer_when_python_runs(number: int, file: int) -> None:
    """Let a signal write a NUL once the main thread is in Python."""
    try:
        # Without the enums of signal, which take longer.
        import _signal as signal  # type: ignore[import-not-found]
    except ImportError:
        import signal

    signal.signal(number, lambda *_: os.write(file, b"\0") and None)
    signal.siginterrupt(number, False)
    # The interpreter forgets its handlers when it ends: the signal would end the process.
    atexit.register(signal.signal, number, signal.SIG_IGN)


def _step_aside() -> None:
    """Remove this folder from the paths, then run the user's ``sitecustomize`` if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    rest = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e != here]
    if any(rest):
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if "sitecustomize" not in sys.modules and ours is not None:
            sys.modules["sitecustomize"] = ours


def _let_gloo_finish() -> None:
    """Wait, for a second at most, until gloo's threads sleep: they may yet free a last tensor.

    That needs Python's lock. Python ends a thread that asks for it while the interpreter goes, and
    C++ takes that for an error ("terminate called without an active exception"): SIGABRT after a
    training that went well. Sleeping lets go of the lock; a thread with work left is not asleep.
    """
    if "torch" not in sys.modules:
        return
    import time

    idle = looks = 0
    while idle < _IDLE_LOOKS and looks < _MOST_LOOKS:
        states = _states_of_threads(_GLOO)
        if not states:
            return
        time.sleep(_LOOK_SECONDS)
        idle = idle + 1 if states == {"S"} else 0
        looks += 1


def _states_of_threads(name: str) -> set[str]:
    """Return the kernel's letters for the states of this process's threads of that name."""
    states = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue  # it has just ended
        if head.partition("(")[2] == name:
            states.add(rest.split()[0])
    return states


_answer_with_stacks()
_step_aside()
atexit.register(_let_gloo_finish)
