"""Tells the launcher of a program that trained a model without the other instances.

A trainer that looks for GPUs and finds none may train a model of its own in every instance. At the
end of the program's Python, a word of the memory that it shares with the launcher's wrapper says
so. Where it is not sure, it says nothing. Imported when torch.distributed is, so it imports little.
"""

import atexit
import functools
import os
import sys

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

# poprun_py/instance/vitals.py has the same: a word of 8 bytes, in which 1 says so.
_WORD, _WORD_BYTES = 31, 8
_SILENT = "POPDIST_SEPARATE_MODELS"


class _Watch:
    """Sees whether torch makes a process group of several processes."""

    def __init__(self, heartbeat: str) -> None:
        self._heartbeat = heartbeat
        self._pid = os.getpid()
        self._has_group = False

    def groups_of(self, distributed: "ModuleType") -> None:
        """Note every group that torch.distributed makes from now on."""
        module = distributed.distributed_c10d
        make = module._new_process_group_helper

        @functools.wraps(make)
        def noting(*args: "Any", **kwargs: "Any") -> "Any":
            size = args[0] if args else kwargs.get("group_size")
            self._has_group = self._has_group or size != 1
            return make(*args, **kwargs)

        module._new_process_group_helper = noting

    def tell(self) -> None:
        """Say that this program trained a model of its own, if that is sure."""
        if os.getpid() != self._pid or not _has_trained() or _has_mpi():
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
    """Tell whether an optimizer was made: torch then marks the ``step`` of its class."""
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
    """Tell whether MPI is loaded: the program may communicate by itself."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return b"/libmpi" in file.read()
    except OSError:
        return True


def _is_alone_for_accelerate() -> bool:
    """Tell whether accelerate has made a group of several processes that it does not use.

    So it does where it finds no GPU: it takes itself for the only process.
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
    """Watch the program of an instance, unless its user says that separate models are meant."""
    heartbeat = os.environ.get("POPDIST_HEARTBEAT", "")
    if os.environ.get(_SILENT) or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    # The wrapper's own child alone: what that starts may be about something else.
    if heartbeat.split("/")[1:3] != ["proc", str(os.getppid())]:
        return
    watch = _Watch(heartbeat)
    watch.groups_of(distributed)
    atexit.register(watch.tell)
