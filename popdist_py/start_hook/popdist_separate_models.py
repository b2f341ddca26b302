"""Detects programs that train a separate model in each instance, and tells the launcher.

A training library that finds no GPU may train a separate model in every instance. If a program has
certainly trained separate models, this module sets a flag when the program exits. The launcher's
wrapper process reads this flag from shared memory. Importing torch.distributed also imports this
module, so this module imports few other modules.
"""

import atexit
import functools
import os
import sys

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

# The index of the flag in the shared memory, and the size of the flag, which is an integer of 8
# bytes. poprun_py/instance/progress_memory.py contains the same two numbers.
_WORD, _WORD_BYTES = 31, 8
# The module that init() imports in a job of several instances.
_MEETING = "popdist_py.collectives.between_hosts.socket_meeting"
_SILENT = "POPDIST_SEPARATE_MODELS"


class _Watch:
    """Records whether torch makes a process group of several processes."""

    def __init__(self, heartbeat: str) -> None:
        self._heartbeat = heartbeat
        self._pid = os.getpid()
        self._has_group = False

    def groups_of(self, distributed: "ModuleType") -> None:
        """Start watching for process groups that torch.distributed makes."""
        module = distributed.distributed_c10d
        make = module._new_process_group_helper

        @functools.wraps(make)
        def noting(*args: "Any", **kwargs: "Any") -> "Any":
            size = args[0] if args else kwargs.get("group_size")
            self._has_group = self._has_group or size != 1
            return make(*args, **kwargs)

        module._new_process_group_helper = noting

    def tell(self) -> None:
        """Set the flag if this program has certainly trained without the other instances."""
        if os.getpid() != self._pid or not _has_trained() or _has_mpi() or _has_joined():
            return
        if self._has_group and not _is_alone_for_accelerate():
            return
        try:
            with open(self._heartbeat, "r+b", buffering=0) as file:
                file.seek(_WORD * _WORD_BYTES)
                file.write((1).to_bytes(_WORD_BYTES, sys.byteorder))
        except OSError:
            pass


def _has_trained() -> bool:
    """Tell whether the program has made an optimizer.

    When a program makes an optimizer, torch sets the attribute ``hooked`` on the ``step`` method of
    the optimizer's class.
    """
    module = sys.modules.get("torch.optim.optimizer")
    if module is None:
        return False
    return any(
        getattr(kind.step, "hooked", False)
        for kind in _subclasses(module.Optimizer)
        if not kind.__module__.startswith("popdist_py.")
    )


def _subclasses(kind: "Any") -> "Iterator[Any]":
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _has_mpi() -> bool:
    """Tell whether MPI is loaded. With MPI, a program can communicate without torch."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return b"/libmpi" in file.read()
    except OSError:
        return True


def _has_joined() -> bool:
    """Tell whether the program has called ``init()`` in a job that does not start MPI."""
    return _MEETING in sys.modules


def _is_alone_for_accelerate() -> bool:
    """Tell whether the library accelerate has made a process group but does not use the group.

    Without a GPU, accelerate assumes that the program is a single process.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    if shared.get("num_processes") != 1:
        return False
    try:
        world = sys.modules["torch.distributed"].group.WORLD
        return world is not None and world._get_sequence_number_for_group() == 0
    except (AttributeError, RuntimeError):
        return False


def start(distributed: "ModuleType") -> None:
    """Watch an instance's program unless the variable POPDIST_SEPARATE_MODELS is set."""
    heartbeat = os.environ.get("POPDIST_HEARTBEAT", "")
    if os.environ.get(_SILENT) or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    # Only the wrapper's own child process is watched. Processes that the child process starts may
    # do other work than training.
    if heartbeat.split("/")[1:3] != ["proc", str(os.getppid())]:
        return
    watch = _Watch(heartbeat)
    watch.groups_of(distributed)
    atexit.register(watch.tell)
