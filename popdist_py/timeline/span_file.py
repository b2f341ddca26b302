"""The format of a file with the spans of one process, with a writer and a reader.

A file of spans has a fixed size, so it cannot keep all spans of a long run. The file keeps the
first spans of the run in a part called the head. Later spans are stored by the level of their
training step. Every 8th step has level 1, every 64th step has level 2, and so on. All other
training steps have level 0. For each level of training steps, the file keeps the latest spans.
Training steps of a high level are rare, so their spans stay in the file for longer. The files of
all instances contain the same training steps, so a reader can compare the instances.

A process writes its spans to a memory-mapped file. If the process is killed, the file still
contains all spans that were written. Each record of a span begins and ends with the number of the
record. If these two numbers differ, the record was not written completely. A separate table
contains the spans that have not ended. This table shows which spans were running when a process was
killed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_FILE_BYTES: Final = 1 << 14
NO_NUMBER: Final = -1

_MAGIC: Final = b"popspan2"
# The fields of the header are the magic bytes, the process id, the size of the file, and one moment
# on two clocks: the time of day and the monotonic clock.
_HEADER: Final = struct.Struct("<8sQQqq")
_HEADER_BYTES: Final = 256
# A record describes one span. The first and the last field of a record are its number, counted from
# 1. Between these two numbers are the span's start time, end time, name and row, the number of the
# collective call, and the position and length of the span's arguments.
_RECORD: Final = struct.Struct("<QqqIIqQIQ")
# Words of 8 bytes follow the header. The first two words count the used bytes of names and of
# arguments. Each other word counts the records that were written to one region.
_WORDS_AT: Final = 64
_NAMES_USED, _TEXTS_USED, _FIRST_COUNT = range(3)
# The table of open spans follows the header and its words. An entry describes one span that has not
# ended. The fields of an entry are the start time of the span (0 for a free entry), the number of
# the collective call, the name, the row, and the start time again.
_OPEN: Final = struct.Struct("<qqIIq")
_NUM_OPEN: Final = 64
_FREE: Final = bytes(8)
_BODY_AT: Final = _HEADER_BYTES + _NUM_OPEN * _OPEN.size
# The sizes of the parts of the file, in units of 1/32 of the file. The parts are the names, the
# texts of arguments, and the regions of records. The first region contains the first spans of the
# run. Each other region is a ring buffer for one level of training steps.
_NAME_PARTS, _TEXT_PARTS = 2, 5
_REGION_PARTS: Final = (3, 10, 2, 2, 2, 2, 2, 2)
_PARTS: Final = 32
_NUM_LEVELS: Final = len(_REGION_PARTS) - 1
# A training step of level L has a number that is divisible by 8**L, where 8 is 2**3.
_STEP_BITS: Final = 3
_MAX_NAME_BYTES: Final = 200
_MAX_TEXT_BYTES: Final = 2_000
_OVERFLOW_NAME: Final = "(more names than fit)"


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time in one process.

    Attributes:
        name: The name of the span.
        track: The row in which the span is displayed.
        begin: The start time in nanoseconds of the host's monotonic clock.
        end: The end time in nanoseconds of the host's monotonic clock, which is not less than
            ``begin``.
        number: The number of earlier collective calls with the same name. Every instance counts its
            collective calls, so the same call has the same number in all instances. The number is
            None if the span is not a collective call.
        arguments: The arguments of the span as a JSON object, or an empty string.
        is_open: Whether the end of the span was not recorded. Without a recorded end, ``end`` is
            the last known time of the process.
    """

    name: str
    track: str
    begin: int
    end: int
    number: int | None = None
    arguments: str = ""
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file of spans.

    Attributes:
        pid: The id of the process that writes the file.
        size: The size of the file in bytes.
        wall_ns: The same moment as ``monotonic_ns``, in nanoseconds since 1970.
        monotonic_ns: A moment before the first span, in nanoseconds of the monotonic clock.
    """

    pid: int
    size: int
    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The contents of one process's file of spans.

    Attributes:
        header: The header of the file.
        label: The name of the process. The name is empty for the main process of the instance.
        spans: The spans that have ended, in any order.
        open: The spans that have not ended, with the last known time as their end.
        dropped: The number of spans that did not fit into the file.
    """

    header: Header
    label: str
    spans: tuple[Span, ...]
    open: tuple[Span, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of the parts of a file of spans that has ``size`` bytes."""

    size: int

    @property
    def names(self) -> tuple[int, int]:
        """The position and the size of the part with the names of spans and rows, in bytes."""
        return _BODY_AT, self._part(_NAME_PARTS)

    @property
    def texts(self) -> tuple[int, int]:
        """The position and the size of the part with the arguments of spans, in bytes."""
        return _BODY_AT + self._part(_NAME_PARTS), self._part(_TEXT_PARTS)

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """The position of each region of records, and the number of records that fit into it.

        The first region contains the first spans of the run. After this region, the file has one
        region for each level of training steps (see ``level_of_step``).
        """
        begin, size = self.texts
        begin += size
        found = []
        for parts in _REGION_PARTS:
            count = self._part(parts) // _RECORD.size
            found.append((begin, count))
            begin += count * _RECORD.size
        return tuple(found)

    def _part(self, parts: int) -> int:
        return (self.size - _BODY_AT) * parts // _PARTS


def level_of_step(step: int) -> int:
    """Return the level of a training step: how often its number can be divided by 8.

    The level is less than ``_NUM_LEVELS``. Step 0 has level 0.
    """
    if step <= 0:
        return 0
    zeros = (step & -step).bit_length() - 1
    return min(zeros // _STEP_BITS, _NUM_LEVELS - 1)


class SpanWriter:
    """Writes the spans of this process to a file. Any thread may call the methods.

    Args:
        path: The path of the new file.
        size: The size of the file in bytes. A size below ``MIN_FILE_BYTES`` is raised to it.
        label: The name of the process. The name is empty for the main process of the instance.
        moment: A moment before the first span, in nanoseconds of the time of day and in nanoseconds
            of the monotonic clock.

    Raises:
        OSError: The file cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, size: int, label: str, moment: tuple[int, int]) -> None:
        layout = _Layout(max(size, MIN_FILE_BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The whole file is allocated now, so that a full disk raises an error here. Without
            # this allocation, a later write to the mapped memory could end the process by SIGBUS.
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, layout.size)
            self._memory = mmap.mmap(descriptor, layout.size)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._memory)[_WORDS_AT:_HEADER_BYTES].cast("q")
        self._layout = layout
        self._regions = layout.regions
        self._counters = [itertools.count() for _ in self._regions]
        self._has_head = True
        self._free_places = list(range(_NUM_OPEN - 1, -1, -1))
        # The lock is reentrant, because a signal handler may record in a thread that holds the
        # lock.
        self._lock = threading.RLock()
        self._ids: dict[str, int] = {}
        self._names_full = False
        self.intern(_OVERFLOW_NAME)
        self.intern(label)
        # The header is written last, because readers ignore a file without a header.
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), layout.size, *moment)

    def intern(self, name: str) -> int:
        """Return the file's number for ``name``, and write ``name`` to the file if it is new."""
        found = self._ids.get(name)
        if found is not None or self._names_full:
            return found or 0
        encoded = name.encode(errors="replace")[:_MAX_NAME_BYTES]
        begin, size = self._layout.names
        with self._lock:
            used = self._words[_NAMES_USED]
            end = used + 1 + len(encoded)
            if end > size:
                self._names_full = True
                return 0
            self._memory[begin + used : begin + end] = bytes([len(encoded)]) + encoded
            self._words[_NAMES_USED] = end
            self._ids[name] = used
        return used

    def open(self, name: int, track: int, begin: int, number: int = NO_NUMBER) -> int | None:
        """Write the start of a span into the table of open spans.

        Returns:
            The index in the table, which the caller passes to ``close``, or None if the table is
            full.
        """
        try:
            place = self._free_places.pop()
        except IndexError:
            return None
        at = _HEADER_BYTES + place * _OPEN.size
        _OPEN.pack_into(self._memory, at, begin, number, name, track, begin)
        return place

    def close(self, place: int) -> None:
        """Remove a span from the table of open spans, after the span was written."""
        at = _HEADER_BYTES + place * _OPEN.size
        self._memory[at : at + 8] = _FREE
        self._free_places.append(place)

    def write(
        self,
        name: int,
        track: int,
        begin: int,
        end: int,
        *,
        level: int = 0,
        number: int = NO_NUMBER,
        arguments: str = "",
    ) -> None:
        """Write one span.

        Args:
            name: The number that ``intern`` returned for the name of the span.
            track: The number that ``intern`` returned for the row of the span.
            begin: The start time of the span in nanoseconds of the monotonic clock.
            end: The end time of the span in nanoseconds of the monotonic clock.
            level: The level of the current training step, which ``level_of_step`` returned.
            number: The number of earlier collective calls with the same name, or ``NO_NUMBER``.
            arguments: The arguments of the span as a JSON object, or an empty string.
        """
        text_begin, text_length = self._text(arguments) if arguments else (0, 0)
        region = level + 1
        # Calling next() on an itertools.count is atomic, so two threads never get the same place in
        # the file.
        if self._has_head:
            count = next(self._counters[0])
            if count < self._regions[0][1]:
                region = 0
            else:
                self._has_head = False
        if region:
            count = next(self._counters[region])
        place, capacity = self._regions[region]
        at = place + count % capacity * _RECORD.size
        count += 1
        _RECORD.pack_into(
            *(self._memory, at, count, begin, end, name, track),
            *(number, text_begin, text_length, count),
        )
        self._words[_FIRST_COUNT + region] = count

    def _text(self, text: str) -> tuple[int, int]:
        """Write the arguments of a span into their ring buffer, over the oldest if needed.

        Returns:
            The position and the length of the arguments, in bytes. The position counts all bytes
            that were ever written to the ring buffer. Arguments that are too long are not written,
            and their length is 0.
        """
        encoded = text.encode(errors="replace")
        place, size = self._layout.texts
        if len(encoded) > min(_MAX_TEXT_BYTES, size):
            return 0, 0
        with self._lock:
            begin = self._words[_TEXTS_USED]
            if begin % size + len(encoded) > size:
                begin += size - begin % size  # a text is never split at the end of the ring buffer
            at = place + begin % size
            # The number of used bytes is written before the text itself, so that a reader treats
            # overwritten texts as lost.
            self._words[_TEXTS_USED] = begin + len(encoded)
            self._memory[at : at + len(encoded)] = encoded
        return begin, len(encoded)


def read_spans(data: bytes) -> Recorded | None:
    """Return the contents of a file of spans, or None if ``data`` is not such a file.

    Args:
        data: The whole file. The process that writes the file may have been killed, or may still be
            writing.
    """
    header = _header(data)
    if header is None or header.size != len(data) or header.size < MIN_FILE_BYTES:
        return None
    layout = _Layout(header.size)
    words = memoryview(data)[_WORDS_AT:_HEADER_BYTES].cast("q")
    names = dict(_names(data, layout, words[_NAMES_USED]))
    label = next(itertools.islice(names.values(), 1, None), "")
    spans: list[Span] = []
    dropped = 0
    for region, place in enumerate(layout.regions):
        found = list(_region(data, layout, place, names, words[_TEXTS_USED]))
        spans += found
        dropped += max(0, words[_FIRST_COUNT + region] - len(found))
    last = max((span.end for span in spans), default=header.monotonic_ns)
    written = {(span.name, span.track, span.begin) for span in spans}
    still_open = [
        span
        for span in _open_spans(data, names, last)
        if (span.name, span.track, span.begin) not in written  # killed before close()
    ]
    return Recorded(header, label, tuple(spans), tuple(still_open), dropped)


def read_header(path: Path) -> Header | None:
    """Return the header of a file of spans, or None if the file at ``path`` is not such a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return _header(file.read(_HEADER.size))


def _header(data: bytes) -> Header | None:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return None
    return Header(*_HEADER.unpack_from(data)[1:])


def _names(data: bytes, layout: _Layout, used: int) -> Iterator[tuple[int, str]]:
    """Yield the names of spans, each with the number that stands for it."""
    begin, size = layout.names
    at, end = begin, begin + min(max(used, 0), size)
    while at < end:
        length = data[at]
        yield at - begin, data[at + 1 : at + 1 + length].decode(errors="replace")
        at += 1 + length


def _open_spans(data: bytes, names: dict[int, str], last: int) -> list[Span]:
    """Return the spans in the table of open spans, with the last known time as their end."""
    found = [
        (begin, number, name, track)
        for begin, number, name, track, again in _OPEN.iter_unpack(data[_HEADER_BYTES:_BODY_AT])
        if begin and begin == again
    ]
    end = max([last, *(begin for begin, *_ in found)])
    return [
        Span(
            names.get(name, _OVERFLOW_NAME),
            names.get(track, ""),
            begin,
            end,
            None if number == NO_NUMBER else number,
            is_open=True,
        )
        for begin, number, name, track in found
    ]


def _region(
    data: bytes, layout: _Layout, place: tuple[int, int], names: dict[int, str], texts_used: int
) -> Iterator[Span]:
    """Yield the spans of a region's complete records, starting with the oldest record."""
    begin, capacity = place
    records = _RECORD.iter_unpack(data[begin : begin + capacity * _RECORD.size])
    texts, size = layout.texts
    whole = [record for record in records if record[0] and record[0] == record[-1]]
    for _, start, end, name, track, number, text, length, _ in sorted(whole):
        if end < start:
            continue
        at = texts + text % size
        is_there = length and texts_used - text <= size
        yield Span(
            names.get(name, _OVERFLOW_NAME),
            names.get(track, ""),
            start,
            end,
            None if number == NO_NUMBER else number,
            data[at : at + length].decode(errors="replace") if is_there else "",
        )
