"""The class MemoryCopies, which copies states of a training to memory beside the training.

Parameters and optimiser state are equal on all instances, and change only in a weight update. The
instances of a host divide these tensors. A background thread of each instance copies its part while
the training already computes the next gradients. The first instance of a host also copies all other
values, before ``save`` returns. Before gradients are summed over the instances, the training calls
``wait_for_copies``. Therefore no host updates its weights before all hosts hold the last state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from popdist_py import activities
from popdist_py.checkpoint import Checkpoint, Checkpoints
from popdist_py.environment import CHECKPOINT_MEMORY, MEMORY_CHECKPOINTS, InstanceEnvironment
from popdist_py.memory_slots import Bytes, MemorySlots, SlotState, slot_state, slots_folder
from popdist_py.own_files.owner import NotOwnFileError
from popdist_py.torch_states.state_parts import (
    bytes_of,
    from_bytes,
    joined,
    split,
    storable,
    to_bytes,
)

__all__ = ["MemoryCopies", "Peers", "memory_copies", "newest_state", "wait_for_copies"]

# The copies that may still be running in this process.
_unfinished: set[Future[None]] = set()
# The thread that copies does not exist in a forked child, so a wait there would not end.
os.register_at_fork(after_in_child=_unfinished.clear)


def wait_for_copies() -> None:
    """Wait until all states that were saved so far are complete in memory."""
    if not _unfinished:
        return
    with activities.doing(activities.SAVING, "memory"):
        for copy in list(_unfinished):
            # A copy stays in the set if a signal interrupts the wait: the next update must wait.
            wait([copy])
            _unfinished.discard(copy)
            copy.result()


class Peers(Protocol):
    """The calls that MemoryCopies makes to the instances of a job."""

    @property
    def instance_index(self) -> int:
        """The index of this instance."""

    def all_gather_object(self, value: object, name: str = "") -> list[Any]:
        """Return the values of all instances, in the order of the instances."""

    def broadcast_object(self, value: object, root: int = 0, name: str = "") -> Any:
        """Return the value of the instance ``root``."""


def memory_copies(
    disk: str | os.PathLike[str], every: int | None, environ: Mapping[str, str]
) -> MemoryCopies | None:
    """Return the copies to memory for the checkpoints in the folder ``disk``.

    Args:
        disk: The folder of the checkpoints on the disk.
        every: The number of steps between two copies. With None, the launcher's option
            ``--memory-checkpoints`` selects 1, and otherwise there are no copies.
        environ: The environment variables of this process.

    Returns:
        The copies; None if none were asked for, or if the launcher did not name a folder.

    Raises:
        ValueError: ``every`` is less than 1.
    """
    if every is not None and every < 1:
        raise ValueError(f"memory_every={every}: expected a number of steps, at least 1")
    if every is None:
        every = 1 if environ.get(MEMORY_CHECKPOINTS) == "1" else None
    memory = environ.get(CHECKPOINT_MEMORY)
    if every is None or not memory:
        return None
    instance = InstanceEnvironment.from_environ(environ)
    # Only instance 0 knows that the folder on the disk is that of its own host.
    own_disk = Path(disk).resolve() if instance.replica_index_offset == 0 else None
    parts = (instance.local_instance_index, instance.num_local_instances)
    return MemoryCopies(MemorySlots(slots_folder(memory, disk), own_disk, *parts), every)


class MemoryCopies:
    """The newest states of a training in memory, which the instances of each host write together.

    Args:
        slots: The memory of the states on this host.
        every: The number of steps between two copies.

    Attributes:
        every: The number of steps between two copies.
    """

    def __init__(self, slots: MemorySlots, every: int) -> None:
        self._slots = slots
        self.every = every
        # Becomes False if the memory of the host is too small.
        self._is_writer = True
        # At its end, Python waits for the threads of executors, so the last state is completed.
        self._thread = ThreadPoolExecutor(1, "popdist-memory")
        self._is_immediate = False

    def save(
        self,
        step: int,
        make_state: Callable[[], Mapping[str, Any]],
        live: Sequence[torch.Tensor] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy a state to memory.

        Before the call, all instances must have called ``wait_for_copies``, and then a collective.
        After the collective, no instance writes the state of an earlier call any more.

        Args:
            step: The number of training steps that are done.
            make_state: A function that returns tensors and plain values in dictionaries, lists and
                tuples. Only the first instance of a host calls the function.
            live: The tensors that are equal on all instances, and change only after
                ``wait_for_copies`` has returned. The background threads copy these tensors. All
                instances pass the same tensors in the same order.
            check: A function that raises an error if a checkpoint cannot contain the state. It is
                not called if all values are plain.
        """
        if not self._is_writer:
            return
        wait_for_copies()
        tensors = storable(live)
        num_live = len(tensors)
        head: Any = b""
        if self._slots.part == 0:
            # A plain rest can be pickled beside the training.
            head, is_plain = split(make_state(), tensors)
            if not is_plain:
                check()
                head = to_bytes(head)
        if self._is_immediate:
            self._write(step, head, tensors, num_live, ())
            return
        kept = tensors[:num_live] + [each.clone() for each in tensors[num_live:]]
        watched = [(each, each._version) for each in tensors[:num_live]]
        _unfinished.add(self._thread.submit(self._write, step, head, kept, num_live, watched))

    def _write(
        self,
        step: int,
        head: Any,
        tensors: Sequence[torch.Tensor],
        num_live: int,
        watched: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Write a state, unless one of the ``watched`` tensors has another version afterwards."""
        try:
            stored = self._slots.write(
                step,
                head if isinstance(head, bytes) else to_bytes(head),
                [bytes_of(each) for each in tensors],
                lambda: all(each._version == version for each, version in watched),
                num_live,
            )
        except (OSError, NotOwnFileError) as error:
            self._is_writer = False
            self._slots.remove()
            warnings.warn(
                f"The training state is no longer copied to memory ({error}). The training "
                "continues, and saves checkpoints only on the disk. A larger /dev/shm avoids this "
                "problem",
                stacklevel=2,
            )
            return
        if not stored:
            # The program changed weights between save() and the next gradients. From now on, all
            # tensors are copied before save() returns.
            self._is_immediate = True

    def newest(self, is_known: Callable[[Any], bool]) -> SlotState | None:
        """Return the newest state on this host that is known, or None if its memory has none."""

        def is_loadable(slot: SlotState) -> bool:
            if _loaded(slot, is_known) is not None:
                return True
            warnings.warn(
                f"The copy of the training state of step {slot.step} in memory is ignored, because "
                "it was saved by another training or by another version of popdist_py",
                stacklevel=2,
            )
            return False

        return self._slots.newest(is_loadable)

    def discard_others(self) -> None:
        """Discard all states but the result of ``newest``.

        All instances of the host must have returned from ``newest`` before.
        """
        if self._slots.part == 0:
            self._slots.discard_others()


def newest_state(
    memory: MemoryCopies | None,
    files: Checkpoints,
    peers: Peers,
    is_known: Callable[[Any], bool] = lambda _: True,
) -> tuple[int, Any] | None:
    """Return the newest state in the memory of all hosts and on the disk of instance 0.

    All instances must call the function. A host without the newest state gets it from another host.

    Args:
        memory: The states in memory; None on all instances if there are none.
        files: The checkpoints on the disk, which only instance 0 reads.
        peers: The instances of the job.
        is_known: A function that tells whether the caller can load a state. Other states in memory
            are left out.

    Returns:
        The number of training steps that are done, and the state. A state from the disk is returned
        as the bytes of its file, unless the launcher has copied a known state from memory to this
        file. The result is None if there is no state.
    """
    own, steps = None, [-1]
    if memory is not None:
        wait_for_copies()
        peers.all_gather_object(None)  # the copies of all instances are complete
        own = memory.newest(is_known)
        steps = peers.all_gather_object(-1 if own is None else own.step)
        memory.discard_others()
    in_memory = max(steps)
    newer = _newer_on_disk(files, in_memory) if peers.instance_index == 0 else None
    newer = peers.broadcast_object(newer)
    if newer is not None:
        # The launcher may have copied this checkpoint from the memory of an earlier job.
        slot = slot_state(newer.data)
        state = None if slot is None else _loaded(slot, is_known)
        return newer.step, newer.data if state is None else state
    if in_memory < 0:
        return None
    parts = None if own is None else (own.head, own.arrays)
    if min(steps) < in_memory:
        root = steps.index(in_memory)
        parts = peers.broadcast_object(parts if peers.instance_index == root else None, root)
    assert parts is not None
    return in_memory, _whole(*parts)


def _loaded(slot: SlotState, is_known: Callable[[Any], bool]) -> Any:
    """Return the state in a slot, or None if it cannot be loaded or is not known."""
    try:
        state = _whole(slot.head, slot.arrays)
        return state if is_known(state) else None
    except Exception:
        # An edited program, or another version of torch or of this package, may have saved the
        # state. Unpickling and comparing such values can raise any error.
        return None


def _whole(head: bytes, arrays: Sequence[Bytes]) -> Any:
    return joined(from_bytes(head), arrays)


def _newer_on_disk(files: Checkpoints, step: int) -> Checkpoint | None:
    """Return the newest checkpoint on the disk, if it is newer than ``step``."""
    if all(found <= step for found in files.steps()):
        return None
    latest = files.latest()
    return latest if latest is not None and latest.step > step else None
