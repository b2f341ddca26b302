"""The sink that writes an event file of TensorBoard, without using the package tensorboard.

An event file is a series of records. A record has a length, a checksum, an ``Event`` message of
Protocol Buffers, and another checksum. The format is defined in tensorflow/core/util/event.proto,
framework/summary.proto and lib/io/record_writer.h.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from popdist_py.metrics.sink import AppendedFile


class TensorBoardSink:
    """Writes metrics for TensorBoard, with one event file for each start of the program.

    From the first step in a new file on, TensorBoard ignores the steps in earlier files of the
    folder. TensorBoard therefore displays each step once, even if training continues from a
    checkpoint. Give each run its own folder. If a program has several ``Metrics`` objects, pass the
    same sink to all of them. Values are rounded to 32-bit floats, as in TensorBoard.

    Args:
        folder: The folder for the event file. The folder is made if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self._file: AppendedFile | None = None

    def __repr__(self) -> str:
        return f"TensorBoardSink({str(self.folder)!r})"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append an event with all values.

        Raises:
            OSError: The file cannot be written.
        """
        if self._file is None:
            self._file = self._begin(step)
        self._file.append(_record(_event(step, _message(5, _summary(values)))))

    def close(self) -> None:
        """Do nothing, because ``write`` writes each event immediately."""

    def _begin(self, step: int) -> AppendedFile:
        """Make the file, with events for the format version and the first step of this session."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the name of a file
        # contains the time when it was made.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        path = self.folder / name
        path.touch(exist_ok=False)
        file = AppendedFile(path, 0)
        version = _message(3, b"brain.Event:2")
        session_starts = _message(7, _number(1, 1))
        file.append(_record(_event(0, version)) + _record(_event(step, session_starts)))
        return file


# --- Protocol Buffers -----------------------------------------------------------------------------


def _event(step: int, content: bytes) -> bytes:
    """Return an ``Event`` message.

    The numbered fields of an ``Event`` are wall_time (1), step (2), and one of file_version (3),
    summary (5) and session_log (7).
    """
    return b"\x09" + struct.pack("<d", time.time()) + _number(2, step) + content


def _summary(values: Mapping[str, float]) -> bytes:
    """Return a ``Summary`` message.

    Field 1 of a ``Summary`` is a ``value``. In a ``value``, field 1 is the ``tag`` and field 2 is
    the ``simple_value``.
    """
    return b"".join(
        _message(1, _message(1, name.encode()) + b"\x15" + _float32(value))
        for name, value in values.items()
    )


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value % 2**64)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes((*groups, value))


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


# --- Records --------------------------------------------------------------------------------------


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C of ``data``, masked as in the files that TensorFlow writes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of(byte) for byte in range(256)]
