"""Runs when Python starts in an instance: a signal makes it write the stacks of all its threads.

Fatal signals show a Python stack too. Needs nothing of the program, and leaves no trace in it: the
folder goes from ``sys.path`` and PYTHONPATH again, and the user's own ``sitecustomize`` is run.
"""

import os
import sys


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
    except (OSError, ValueError, RuntimeError, AttributeError):
        return
    # The handler holds the descriptor only: the file must live as long as the process.
    sys._poprun_stacks_file = file  # type: ignore[attr-defined]


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


_answer_with_stacks()
_step_aside()
