"""Checkpoints in memory: two files in a tmpfs folder that keep the newest state of a training.

The files outlive the process that writes them, so a restarted program continues from them. Each
file is a slot for one state. The writer overwrites the slot with the older state, so the other slot
always contains a complete state. A state consists of arrays, which are stored without conversion,
and a head with all other values as bytes. The caller defines the meaning of the head. This module
needs NumPy, because NumPy copies and adds arrays without holding Python's global lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from popdist_py.atomic_file import replaced_at_end
from popdist_py.own_files.owner import NotOwnFileError, check_own_folder
from popdist_py.slot_files import DISK, HEADER, MAGIC, NUM_SLOTS, sequence_of, slot_path

__all__ = ["MemorySlots", "SlotState", "slot_state", "slots_folder"]

Bytes = npt.NDArray[np.uint8]

_DIGEST_BYTES = 16
# Arrays begin at multiples of _ALIGNMENT bytes, the size of a cache line.
_ALIGNMENT = 64
# Arrays are copied and added up in blocks that stay in the CPU's cache between both operations.
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class SlotState:
    """A complete state from a slot.

    Attributes:
        step: The number of training steps that were done when the state was saved.
        head: The bytes that the caller of ``write`` passed as the head.
        arrays: The bytes of each array, in memory that belongs to this process.
    """

    step: int
    head: bytes
    arrays: list[Bytes]


def slots_folder(memory: str, disk: str | os.PathLike[str]) -> Path:
    """Return the folder of the slots that belong to the checkpoints on disk in the folder ``disk``.

    A job can train several models, each with another folder of checkpoints.
    """
    path = Path(disk).resolve()
    return Path(memory, hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest())


class MemorySlots:
    """The newest states of one training in a folder in memory.

    One process of a host writes states, and other processes of the host may read them.

    Args:
        folder: The folder of the slots. The first call of ``write`` creates the folder and its
            parent.
        disk: The folder of the checkpoints on the disk, to which the launcher copies the newest
            state before the memory is lost; None on hosts without this folder.
    """

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self._maps: list[mmap.mmap | None] = [None] * NUM_SLOTS
        # The index of the slot whose state must not be overwritten; None if unknown.
        self._kept: int | None = None
        self._lock = -1  # the descriptor of the job's folder, which this process has locked

    def write(
        self,
        step: int,
        head: bytes,
        arrays: Sequence[Bytes],
        is_valid: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Replace the older state by a new state.

        Args:
            step: The number of training steps that are done.
            head: All values of the state that are not in ``arrays``.
            arrays: Flat arrays, which must not change during the call.
            is_valid: A function that tells after the copy whether the arrays were unchanged. If it
                returns False, the slot stays incomplete.

        Returns:
            Whether the state was stored.

        Raises:
            OSError: The folder cannot be written, or its file system is too small.
            NotOwnFileError: Another user can write to the folder.
        """
        sequences = [sequence_of(self._folder, slot) for slot in range(NUM_SLOTS)]
        if not any(sequences):
            # A cleaner of /dev/shm may have removed the files that this process has mapped.
            self._forget_files()
        self._make_folder()
        if self._kept is None:
            self._kept = sequences.index(max(sequences))
        slot = 1 - self._kept
        sizes = [array.nbytes for array in arrays]
        offsets, total = _places(len(head), sizes)
        memory = self._mapped(slot, total)
        sequence = np.frombuffer(memory, np.uint64, 1)
        sequence[0] = 0
        HEADER.pack_into(memory, 0, 0, b"", 0, 0, 0, b"")
        table = np.array(sizes, np.uint64).tobytes()
        memory[HEADER.size : HEADER.size + len(table) + len(head)] = table + head
        digest = _digest_of(step, table, head)
        target = np.frombuffer(memory, np.uint8)
        for array, offset in zip(arrays, offsets, strict=True):
            for block in _copied(target[offset : offset + array.nbytes], array):
                digest.update(_sum(block))
        if not is_valid():
            return False
        HEADER.pack_into(memory, 0, 0, MAGIC, step, len(sizes), len(head), digest.digest())
        # The sequence number is written last. A slot without a sequence number is incomplete.
        sequence[0] = max(sequences) + 1
        self._kept = slot
        return True

    def newest(self, is_known: Callable[[SlotState], bool] = lambda _: True) -> SlotState | None:
        """Return the newest complete state, or None if both slots are incomplete or damaged.

        Args:
            is_known: A function that tells whether the caller can load a state. Other states are
                skipped.
        """
        sequences = ((sequence_of(self._folder, slot), slot) for slot in range(NUM_SLOTS))
        for _, slot in sorted(sequences, reverse=True):
            with contextlib.suppress(FileNotFoundError, NotOwnFileError):
                check_own_folder(self._folder)
                state = _state_in(np.fromfile(slot_path(self._folder, slot), np.uint8))
                if state is not None and is_known(state):
                    self._kept = slot
                    return state
        return None

    def remove(self) -> None:
        """Remove both slots, to release their memory."""
        for slot in range(NUM_SLOTS):
            with contextlib.suppress(OSError):
                slot_path(self._folder, slot).unlink()
        with contextlib.suppress(OSError):
            (self._folder / DISK).unlink()
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        self._forget_files()

    def _forget_files(self) -> None:
        self._maps, self._kept = [None] * NUM_SLOTS, None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make_folder(self) -> None:
        if self._maps[0] is not None or self._maps[1] is not None:
            return
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_own_folder(folder)
        if self._lock < 0:
            # Without a lock, the next job on this host would take the folder for abandoned.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._lock = os.open(self._folder.parent, flags)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if self._disk is not None:
            with replaced_at_end(self._folder / DISK) as partial:
                partial.write_bytes(os.fsencode(self._disk))

    def _mapped(self, slot: int, num_bytes: int) -> mmap.mmap:
        """Return the memory of a slot, with at least ``num_bytes`` bytes."""
        present = self._maps[slot]
        if present is not None and len(present) >= num_bytes:
            return present
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(slot_path(self._folder, slot), flags, 0o600)
        try:
            size = max(num_bytes, os.fstat(descriptor).st_size)
            # Without reserved memory, a write to a full file system would end the process.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        self._maps[slot] = mapped
        return mapped


def slot_state(content: bytes) -> SlotState | None:
    """Return the state in a copy of a slot; None for other bytes, or for a damaged slot."""
    return _state_in(np.frombuffer(content, np.uint8))


def _places(head_bytes: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each array in a slot, and the number of bytes of the slot."""
    offsets, end = [], HEADER.size + 8 * len(sizes) + head_bytes
    for size in sizes:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def _state_in(content: Bytes) -> SlotState | None:
    """Return the state in the content of a slot, or None if it is incomplete or damaged."""
    if len(content) < HEADER.size:
        return None
    sequence, magic, step, num_arrays, head_bytes, expected = HEADER.unpack(
        content[: HEADER.size].tobytes()
    )
    first = HEADER.size + 8 * num_arrays
    if sequence == 0 or magic != MAGIC or first + head_bytes > len(content):
        return None
    table = content[HEADER.size : first].tobytes()
    head = content[first : first + head_bytes].tobytes()
    sizes = np.frombuffer(table, np.uint64).tolist()
    offsets, total = _places(head_bytes, sizes)
    if total > len(content):
        return None
    arrays = [content[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
    digest = _digest_of(step, table, head)
    for array in arrays:
        for block in _blocks(array):
            digest.update(_sum(block))
    return SlotState(step, head, arrays) if digest.digest() == expected else None


def _digest_of(step: int, table: bytes, head: bytes) -> Any:
    """Return a digest of everything in a state but its arrays.

    The arrays enter the digest as one sum for each block. Sums take little more time than the copy
    alone, whereas a digest of all bytes takes ten times as long.
    """
    digest = hashlib.blake2b(struct.pack("<Q", step), digest_size=_DIGEST_BYTES)
    digest.update(table)
    digest.update(head)
    return digest


def _blocks(array: Bytes) -> Iterable[Bytes]:
    for begin in range(0, len(array), _BLOCK_BYTES):
        yield array[begin : begin + _BLOCK_BYTES]


def _copied(target: Bytes, source: Bytes) -> Iterator[Bytes]:
    """Copy ``source`` to ``target``, and yield each block of ``target`` after its copy."""
    for to, given in zip(_blocks(target), _blocks(source), strict=True):
        np.copyto(to, given)
        yield to


def _sum(block: Bytes) -> bytes:
    """Return the sum of a block's 64-bit words, and the bytes after the last whole word."""
    words = block[: len(block) // 8 * 8]
    total: bytes = np.add.reduce(words.view(np.uint64), keepdims=True).tobytes()
    return total + block[len(words) :].tobytes()
