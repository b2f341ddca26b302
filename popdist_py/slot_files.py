"""The files of checkpoints in memory: their header, and their copy to the checkpoints on the disk.

``python -m popdist_py.slot_files FOLDER`` copies the newest states in the folder FOLDER, without
help from the programs that wrote the states. The launcher runs this command before the memory of a
job is lost, such as after SIGTERM. This module imports only the standard library. The class
``popdist_py.memory_slots.MemorySlots`` describes the states.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from popdist_py.checkpoint import Checkpoints

__all__ = [
    "DISK",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_PARTS",
    "NUM_SLOTS",
    "RECORD",
    "Record",
    "complete_records",
    "copy_to_disk",
    "sequence_of",
    "slot_path",
]

MAGIC = b"popdist memory2\n"
# The record of one part of a slot, with the fields of ``Record``. Each record has its own cache
# lines, because several processes write their parts at the same time.
RECORD = struct.Struct("<Q16sQQQQQ16s48x")
# The records of all parts are at the beginning of a slot.
MAX_PARTS = 32
HEADER_BYTES = MAX_PARTS * RECORD.size
NUM_SLOTS = 2
# The file beside the slots with the path of the folder of the checkpoints on the disk. Only
# instance 0 writes this file, because only its host has this folder.
DISK = "disk"
# A program may overwrite a slot while the slot is read. Then the other slot is newer.
_ATTEMPTS = 10
# No checkpoint on the disk is removed, since the program decides how many it keeps.
_KEEP_ALL = sys.maxsize


class Record(NamedTuple):
    """The record of one part of a slot.

    The first five values are equal in all parts of a complete slot. ``num_others`` and
    ``head_bytes`` are 0 in all parts but the first.

    Attributes:
        sequence: The number of the state, or 0 while the part is incomplete.
        magic: The text ``MAGIC``.
        step: The number of training steps that were done.
        num_parts: The number of parts.
        num_shared: The number of arrays that the parts have divided among them.
        num_others: The number of other arrays.
        head_bytes: The number of bytes in the head.
        digest: The checksum of the part.
    """

    sequence: int
    magic: bytes
    step: int
    num_parts: int
    num_shared: int
    num_others: int
    head_bytes: int
    digest: bytes


_NUM_COMMON = 5


def slot_path(folder: Path, slot: int) -> Path:
    """Return the path of a slot's file."""
    return folder / f"slot-{slot}"


def sequence_of(folder: Path, slot: int) -> int:
    """Return the sequence number of a slot, or 0 if the slot is incomplete or absent."""
    with contextlib.suppress(OSError), slot_path(folder, slot).open("rb") as file:
        for record in complete_records(file.read(HEADER_BYTES)):
            return record.sequence
    return 0


def complete_records(content: bytes) -> list[Record]:
    """Return the records of all parts of a slot; an empty list if a part is incomplete.

    Args:
        content: The bytes of the slot, or only its first ``HEADER_BYTES`` bytes.
    """
    if len(content) < HEADER_BYTES:
        return []
    records = [Record(*each) for each in RECORD.iter_unpack(content[:HEADER_BYTES])]
    first = records[0]
    if first.sequence == 0 or first.magic != MAGIC or not 1 <= first.num_parts <= MAX_PARTS:
        return []
    parts = records[: first.num_parts]
    return parts if all(part[:_NUM_COMMON] == first[:_NUM_COMMON] for part in parts) else []


def copy_to_disk(memory: Path) -> dict[str, int]:
    """Copy the newest state of each training to its folder on the disk, unless it is there.

    The data of such a checkpoint is the content of a slot. ``resume()`` reads it as it reads the
    checkpoints that programs have saved.

    Args:
        memory: The folder of a job's checkpoints in memory.

    Returns:
        The newest step on the disk for each folder on the disk.

    Raises:
        OSError: A checkpoint cannot be written.
    """
    found = {}
    for folder in sorted(memory.iterdir()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            disk = os.fsdecode((folder / DISK).read_bytes())
            state = _newest_slot(folder)
            if state is None:
                continue
            step, content = state
            found[disk] = _save(_FilesBesideProgram(disk, _KEEP_ALL), step, content)
    return found


class _FilesBesideProgram(Checkpoints):
    """The checkpoints in a folder in which a program may be writing a checkpoint, too."""

    def _remove_partial(self) -> None:
        """Remove nothing, because the temporary file of the program would be removed."""


def _save(files: Checkpoints, step: int, content: bytes) -> int:
    """Save a checkpoint unless a newer one is there; return the newest step in the folder."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        newest = next((each.step for each in files.newest_first()), -1)
        if newest >= step:
            return newest
        try:
            files.save(step, content)
            break
        except FileNotFoundError:  # a program began to save, and removed all temporary files
            if not attempts_left:
                raise
    return step


def _newest_slot(folder: Path) -> tuple[int, bytes] | None:
    """Return the step and the content of the newest complete slot; None without such a slot."""
    for _ in range(_ATTEMPTS):
        sequence, slot = max((sequence_of(folder, slot), slot) for slot in range(NUM_SLOTS))
        if not sequence:
            return None
        content = slot_path(folder, slot).read_bytes()
        if sequence_of(folder, slot) == sequence:
            records = complete_records(content)
            if records and records[0].sequence == sequence:
                return records[0].step, content
    return None


if __name__ == "__main__":
    with contextlib.suppress(FileNotFoundError):  # no program has saved a state in memory
        sys.stdout.write(json.dumps(copy_to_disk(Path(sys.argv[1]))))
