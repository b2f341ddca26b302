"""Counts the steps of torch's optimizers, so that the launcher sees the progress of any program.

Python imports this module at its start. To keep the start of Python fast, this module imports only
popdist_import_hook and modules that Python has already loaded. The library's package torch_loops is
imported at the first step of an optimizer. The package counts no steps of a program that counts
them itself or has a PopTorch model. Processes that the program starts, such as the workers of a
data loader, count nothing.
"""

import _thread
import os
import sys

import popdist_import_hook  # type: ignore[import-not-found]

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OFF = ("no", "0", "false", "off")
_MOST_ANCESTORS = 32


class _Hooks:
    """The functions to call before and after every step of an optimizer, ``begin`` and ``end``."""

    def __init__(self) -> None:
        self.begin: Callable[[Any], object] = self._begin_first
        self.end: Callable[[Any], object] = _count_nothing
        # The thread that steps first makes the loop. Until then, other threads count nothing.
        self._making = _thread.allocate_lock()

    def stop(self) -> None:
        """Count nothing any more, in a forked child process."""
        self.begin = self.end = _count_nothing

    def _begin_first(self, optimizer: "Any") -> None:
        """Handle the begin of the first step, and let the program's loop handle the others."""
        if not self._making.acquire(blocking=False):
            return
        loop = _make_loop()
        if loop is None:
            self.stop()
        else:
            loop.begin_update(optimizer)
            self.begin, self.end = loop.begin_update, loop.end_update


def _count_nothing(optimizer: "Any") -> None:
    pass


def _make_loop() -> "Any":
    """Return the library's object for this program's loop, or None to observe nothing."""
    sys.path.append(_ROOT)  # ``sys.path`` may not contain the library
    try:
        from popdist_py.torch_loops import make_loop

        return make_loop()
    except (ImportError, SyntaxError, AttributeError):
        return None  # the library was removed, this Python is too old, or torch has changed
    finally:
        sys.path.pop()


def _execute_and_register(execute: "Callable[[ModuleType], object]", module: "ModuleType") -> None:
    execute(module)
    before = getattr(module, "register_optimizer_step_pre_hook", None)
    after = getattr(module, "register_optimizer_step_post_hook", None)
    if before is None or after is None or not _is_program():  # torch may be older
        return
    hooks = _Hooks()

    def before_step(optimizer: "Any", *_: object) -> None:
        hooks.begin(optimizer)

    def after_step(optimizer: "Any", *_: object) -> None:
        hooks.end(optimizer)

    for hook in (before_step, after_step):
        # torch.compile reads this attribute. The hook then runs between two compiled parts, as in
        # a program that is not compiled.
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    before(before_step)
    after(after_step)
    os.register_at_fork(after_in_child=hooks.stop)


def _is_program() -> bool:
    """Tell whether this process is the instance's program, not a process that the program started.

    Between the launcher's wrapper and the program there may be shells, but no other Python.
    """
    wrapper = os.environ.get("POPDIST_HEARTBEAT", "").split("/")[2:3]
    pid = str(os.getppid())
    for _ in range(_MOST_ANCESTORS):
        if [pid] == wrapper:
            return True
        parent = _parent_unless_python(pid)
        if not parent:
            return False
        pid = parent
    return False


def _parent_unless_python(pid: str) -> str:
    """Return the parent of a process; empty for a Python process and for an unknown process."""
    try:
        if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
            return ""
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return ""


def start() -> None:
    """Count the steps of an instance's program, unless POPDIST_COUNT_STEPS says no."""
    wanted = os.environ.get("POPDIST_COUNT_STEPS", "").strip().lower()
    if os.environ.get("POPDIST_HEARTBEAT", "").startswith("/proc/") and wanted not in _OFF:
        popdist_import_hook.run_at_import("torch.optim.optimizer", _execute_and_register)
