"""Checkpoints in memory: two files in a tmpfs folder that keep the newest state of a training.

The files outlive the processes that write them, so a restarted program continues from them. Each
file is a slot for one state. The writers overwrite the slot with the older state, so the other slot
always contains a complete state. A state consists of arrays, which are stored without conversion,
and a head with all other values as bytes. The caller defines the meaning of the head.

Several processes of a host can write a state together. Arrays that are equal in all processes are
divided into one part for each process, unless they are small. The first process also writes the
head and its other arrays. This module needs NumPy, because NumPy copies and adds arrays without
holding Python's global lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from popdist_py.atomic_file import replaced_at_end
from popdist_py.own_files.owner import NotOwnFileError, check_own_folder
from popdist_py.slot_files import (
    DISK,
    HEADER_BYTES,
    MAGIC,
    MAX_PARTS,
    NUM_SLOTS,
    RECORD,
    complete_records,
    sequence_of,
    slot_path,
)

__all__ = ["MemorySlots", "SlotState", "slot_state", "slots_folder"]

Bytes = npt.NDArray[np.uint8]

_DIGEST_BYTES = 16
# Arrays begin at multiples of _ALIGNMENT bytes, the size of a cache line.
_ALIGNMENT = 64
# Arrays are added up and copied in blocks that stay in the CPU's cache between both operations.
_BLOCK_BYTES = 1 << 19
# The copy of fewer bytes takes less time than the wake-ups of more processes.
_DIVIDED_BYTES = 1 << 22


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

    The processes that write a state together must all have written the state before, or have failed
    to write it, when one of them begins with the next state.

    Args:
        folder: The folder of the slots. The first call of ``write`` creates the folder and its
            parent.
        disk: The folder of the checkpoints on the disk, to which the launcher copies the newest
            state before the memory is lost; None on hosts without this folder.
        part: The index of the part that this process writes.
        num_parts: The number of these processes on this host. At most ``MAX_PARTS`` of them write.

    Attributes:
        part: The index of the part that this process writes.
    """

    def __init__(
        self, folder: Path, disk: Path | None = None, part: int = 0, num_parts: int = 1
    ) -> None:
        self._folder = folder
        self._disk = disk
        self.part = part
        self._num_parts = min(num_parts, MAX_PARTS)
        self._maps: list[mmap.mmap | None] = [None] * NUM_SLOTS
        self._inodes: list[int] = [0] * NUM_SLOTS  # of the mapped files
        self._loaded: int | None = None  # the index of the slot that ``newest`` returned
        self._lock = -1  # the descriptor of the job's folder, which this process has locked

    def write(
        self,
        step: int,
        head: bytes,
        arrays: Sequence[Bytes],
        is_valid: Callable[[], bool] = lambda: True,
        num_shared: int = 0,
    ) -> bool:
        """Replace the older state by a new state, or write one part of the new state.

        Args:
            step: The number of training steps that are done.
            head: All values of the state that are not in ``arrays``. Only the head of part 0 is
                used.
            arrays: Flat arrays, which must not change during the call.
            is_valid: A function that tells after the copy whether the arrays were unchanged. If it
                returns False, the slot stays incomplete.
            num_shared: The number of arrays at the beginning of ``arrays`` that are equal in all
                processes. Only part 0 may have other arrays.

        Returns:
            Whether the state, or this part of the state, was stored.

        Raises:
            OSError: The folder cannot be written, or its file system is too small.
            NotOwnFileError: Another user can write to the folder.
        """
        sizes = [array.nbytes for array in arrays]
        num_parts = self._num_parts if sum(sizes[:num_shared]) >= _DIVIDED_BYTES else 1
        if self.part >= num_parts:
            return True
        self._forget_removed_files()
        self._make_folder()
        sequences = [sequence_of(self._folder, slot) for slot in range(NUM_SLOTS)]
        slot = sequences.index(min(sequences))
        layout = _Layout(sizes[:num_shared], sizes[num_shared:], len(head))
        memory = self._mapped(slot, layout.num_bytes)
        place = self.part * RECORD.size
        sequence = np.frombuffer(memory, np.uint64, 1, place)
        sequence[0] = 0
        target = np.frombuffer(memory, np.uint8)
        digest = layout.digest(step, self.part, num_parts, head)
        if self.part == 0:
            layout.write_rest(target, head)
        for index, begin, end in layout.pieces(self.part, num_parts):
            at = layout.offsets[index]
            digest.update(_sums(arrays[index][begin:end], target[at + begin : at + end]))
        if not is_valid():
            return False
        num_others = len(arrays) - num_shared
        common = (0, MAGIC, step, num_parts, num_shared)
        RECORD.pack_into(memory, place, *common, num_others, len(head), digest.digest())
        # The sequence number is written last. A part without a sequence number is incomplete.
        sequence[0] = max(sequences) + 1
        return True

    def newest(self, is_known: Callable[[SlotState], bool] = lambda _: True) -> SlotState | None:
        """Return the newest complete state, or None if both slots are incomplete or damaged.

        Args:
            is_known: A function that tells whether the caller can load a state. Other states are
                skipped.
        """
        sequences = ((sequence_of(self._folder, slot), slot) for slot in range(NUM_SLOTS))
        self._loaded = None
        for _, slot in sorted(sequences, reverse=True):
            with contextlib.suppress(FileNotFoundError, NotOwnFileError):
                check_own_folder(self._folder)
                state = _state_in(np.fromfile(slot_path(self._folder, slot), np.uint8))
                if state is not None and is_known(state):
                    self._loaded = slot
                    return state
        return None

    def discard_others(self) -> None:
        """Make all slots incomplete but the one that ``newest`` returned, so they are written next.

        Without this call, a part from an earlier attempt could become part of a new state.
        """
        for slot in {*range(NUM_SLOTS)} - {self._loaded}:
            with contextlib.suppress(OSError), slot_path(self._folder, slot).open("r+b") as file:
                file.write(bytes(HEADER_BYTES))

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

    def _forget_removed_files(self) -> None:
        """Forget the mapped files if a cleaner of /dev/shm has removed one of them.

        Another process that writes the state may have created the file again.
        """
        for slot, mapped in enumerate(self._maps):
            if mapped is not None and self._inodes[slot] != _inode(slot_path(self._folder, slot)):
                self._forget_files()
                return

    def _forget_files(self) -> None:
        self._maps = [None] * NUM_SLOTS
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
            found = os.fstat(descriptor)
            size = max(num_bytes, found.st_size)
            # Without reserved memory, a write to a full file system would end the process.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        self._maps[slot], self._inodes[slot] = mapped, found.st_ino
        return mapped


def slot_state(content: bytes) -> SlotState | None:
    """Return the state in a copy of a slot; None for other bytes, or for a damaged slot."""
    return _state_in(np.frombuffer(content, np.uint8))


class _Layout:
    """The places of a state in a slot.

    The header of the slot comes first. The shared arrays follow, after a table of their sizes. The
    table of the sizes of the other arrays, the head and the other arrays follow at the end, so all
    parts agree on the places of the shared arrays.

    Args:
        shared: The number of bytes of each shared array.
        others: The number of bytes of each other array.
        head_bytes: The number of bytes of the head.

    Attributes:
        offsets: The place of each array, the shared arrays first.
        rest: The place of the table of the other arrays.
        num_bytes: The number of bytes of the slot.
    """

    def __init__(self, shared: Sequence[int], others: Sequence[int], head_bytes: int) -> None:
        self._shared, self._others = shared, others
        self._tables = [np.array(sizes, np.uint64).tobytes() for sizes in (shared, others)]
        first, self.rest = _places(HEADER_BYTES + 8 * len(shared), shared)
        rest_bytes = 8 * len(others) + head_bytes
        last, self.num_bytes = _places(self.rest + rest_bytes, others)
        self.offsets = first + last

    def write_rest(self, target: Bytes, head: bytes) -> None:
        """Write everything but the header and the arrays."""
        for at, text in ((HEADER_BYTES, self._tables[0]), (self.rest, self._tables[1] + head)):
            target[at : at + len(text)] = np.frombuffer(text, np.uint8)

    def digest(self, step: int, part: int, num_parts: int, head: bytes) -> Any:
        """Return a digest of everything in a part of a state but its arrays.

        The arrays enter the digest as one sum for each block. Sums take little more time than the
        copy alone, whereas a digest of all bytes takes ten times as long.
        """
        first = struct.pack("<3Q", step, part, num_parts)
        digest = hashlib.blake2b(first, digest_size=_DIGEST_BYTES)
        digest.update(self._tables[0])
        if part == 0:
            digest.update(self._tables[1])
            digest.update(head)
        return digest

    def pieces(self, part: int, num_parts: int) -> Iterable[tuple[int, int, int]]:
        """Yield the pieces of a part: the index of an array, the piece's begin, and its end."""
        total = sum(self._shared)
        first, last = (total * index // num_parts for index in (part, part + 1))
        offset = 0
        for index, size in enumerate(self._shared):
            begin, end = (min(max(_aligned(at - offset), 0), size) for at in (first, last))
            if begin < end:
                yield index, begin, end
            offset += size
        if part == 0:
            for index, size in enumerate(self._others, len(self._shared)):
                yield index, 0, size


def _inode(path: Path) -> int:
    """Return the inode of a file, or 0 if the file is absent."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _places(begin: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the places of arrays that follow each other, and the end of the last array."""
    offsets = []
    for size in sizes:
        offsets.append(_aligned(begin))
        begin = offsets[-1] + size
    return offsets, begin


def _state_in(content: Bytes) -> SlotState | None:
    """Return the state in the content of a slot, or None if it is incomplete or damaged."""
    records = complete_records(content[:HEADER_BYTES].tobytes())
    if not records:
        return None
    first = records[0]
    shared = _sizes_at(content, HEADER_BYTES, first.num_shared)
    if shared is None:
        return None
    rest = _Layout(shared, [], 0).rest
    others = _sizes_at(content, rest, first.num_others)
    if others is None:
        return None
    layout = _Layout(shared, others, first.head_bytes)
    if layout.num_bytes > len(content):
        return None
    head_at = rest + 8 * first.num_others
    head = content[head_at : head_at + first.head_bytes].tobytes()
    arrays = [
        content[at : at + size] for at, size in zip(layout.offsets, shared + others, strict=True)
    ]
    for part, record in enumerate(records):
        digest = layout.digest(first.step, part, first.num_parts, head)
        for index, begin, end in layout.pieces(part, first.num_parts):
            digest.update(_sums(arrays[index][begin:end]))
        if digest.digest() != record.digest:
            return None
    return SlotState(first.step, head, arrays)


def _sizes_at(content: Bytes, place: int, number: int) -> list[int] | None:
    """Return the sizes in a table; None if the content is too short for the table."""
    end = place + 8 * number
    if end > len(content):
        return None
    sizes: list[int] = content[place:end].view(np.uint64).tolist()
    return sizes


def _sums(array: Bytes, target: Bytes | None = None) -> bytes:
    """Return the sum of each block's 64-bit words, and the bytes after the last whole word.

    Args:
        array: The array.
        target: The memory to which each block is copied after its sum; None for no copy.
    """
    words = array[: len(array) // 8 * 8].view(np.uint64)
    sums = []
    for at in range(0, len(array), _BLOCK_BYTES):
        sums.append(np.add.reduce(words[at // 8 : (at + _BLOCK_BYTES) // 8]))
        if target is not None:
            target[at : at + _BLOCK_BYTES] = array[at : at + _BLOCK_BYTES]
    return np.array(sums, np.uint64).tobytes() + array[8 * len(words) :].tobytes()
