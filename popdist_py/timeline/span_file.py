"""The file of one process's spans, with its layout, a writer and a reader.

A file has a fixed size, so it cannot keep all spans of a long run. The file keeps the first spans
of the run, which are called the head of the file. Every later span gets the level of its training
step. Level 1 is for every 8th step, level 2 is for every 64th step, and so on. Level 0 is for all
other steps. The file keeps the latest spans of each level. Steps of a high level are rare, so the
spans of a high level go back further in time. All instances keep spans of the same steps, so the
instances can be compared.

If the process is killed, the file still contains all spans that were written, because the process
writes to memory that the kernel maps to the file. Each record contains its number at the begin and
at the end. If the two numbers differ, the record was not written completely. A separate table
contains the open spans, so a reader sees in which spans a process was killed.
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
# The fields of the header are the magic bytes, the process id, the size of the file, and one time
# on two clocks: the time of day and the monotonic clock.
_HEADER: Final = struct.Struct("<8sQQqq")
_HEADER_BYTES: Final = 256
# A record describes one span. Its fields are the number of the record (from 1), begin, end, name
# and track of the span, the number of the call, position and length of the arguments, and the
# number of the record again.
_RECORD: Final = struct.Struct("<QqqIIqQIQ")
# The header is followed by words of 8 bytes: the used bytes of the names, the used bytes of the
# texts, and the number of records written to each region.
_WORDS_AT: Final = 64
_NAMES_USED, _TEXTS_USED, _FIRST_COUNT = range(3)
# The table of open spans follows these words. An entry describes one span that has not ended. Its
# fields are the begin of the span (0 for a free entry), the number of the call, name, track, and
# the begin again.
_OPEN: Final = struct.Struct("<qqIIq")
_NUM_OPEN: Final = 64
_FREE: Final = bytes(8)
_BODY_AT: Final = _HEADER_BYTES + _NUM_OPEN * _OPEN.size
# The sizes of the parts of the file, in units of 1/32 of the file. The parts are the names, the
# texts of arguments, and the regions of records. The first region is the head of the file, and each
# other region is a ring buffer for one level of steps.
_NAME_PARTS, _TEXT_PARTS = 2, 5
_REGION_PARTS: Final = (3, 10, 2, 2, 2, 2, 2, 2)
_PARTS: Final = 32
_NUM_LEVELS: Final = len(_REGION_PARTS) - 1
# The number of a step of level L is divisible by 8**L.
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
        begin: The begin in nanoseconds of the host's monotonic clock.
        end: The end in nanoseconds of the same clock, which is not less than ``begin``.
        number: The number of earlier calls with the same name. Every instance counts its calls, so
            the same call has the same number in all instances. None for a span that is not a call.
        arguments: A JSON object, or an empty string.
        is_open: Whether the file does not contain the end of the span. If the end is missing,
            ``end`` is the last known time of the process.
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
    """The header of a file.

    Attributes:
        pid: The id of the process that writes the file.
        size: The size of the file in bytes.
        wall_ns: The time of day at ``monotonic_ns``, in nanoseconds.
        monotonic_ns: A time before the first span, in nanoseconds of the monotonic clock.
    """

    pid: int
    size: int
    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The contents of the file into which one process wrote its spans.

    Attributes:
        header: The header of the file.
        label: The name of the process, which is empty for the program.
        spans: The complete spans, in any order.
        open: The spans without an end, which get the last known time as their end.
        dropped: The number of spans that did not fit into the file.
    """

    header: Header
    label: str
    spans: tuple[Span, ...]
    open: tuple[Span, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of the parts of a file of ``size`` bytes."""

    size: int

    @property
    def names(self) -> tuple[int, int]:
        """The position and the size of the names, in bytes."""
        return _BODY_AT, self._part(_NAME_PARTS)

    @property
    def texts(self) -> tuple[int, int]:
        """The position and the size of the arguments' texts, in bytes."""
        return _BODY_AT + self._part(_NAME_PARTS), self._part(_TEXT_PARTS)

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """The position of each region of records, and the number of records that fit into it.

        The first region is the head. The other regions follow, one for each level of steps (see
        ``level_of_step``).
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

    There is a highest level. Step 0 has level 0.
    """
    if step <= 0:
        return 0
    zeros = (step & -step).bit_length() - 1
    return min(zeros // _STEP_BITS, _NUM_LEVELS - 1)


class SpanWriter:
    """Writes the spans of this process. All threads may call its methods.

    Args:
        path: The path of the new file.
        size: The size of the file in bytes, which is at least ``MIN_FILE_BYTES``.
        label: The name of the process, which is empty for the program.
        moment: A time before the first span, in nanoseconds on two clocks: the time of day and the
            monotonic clock.

    Raises:
        OSError: The file cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, size: int, label: str, moment: tuple[int, int]) -> None:
        layout = _Layout(max(size, MIN_FILE_BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The whole file is allocated now, so that a full disk raises an error here. Otherwise a
            # later write to the mapped memory could end the process by SIGBUS.
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
        # The header is written last, because a file without a header is not read.
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), layout.size, *moment)

    def intern(self, name: str) -> int:
        """Return the number of a name in this file, and write a new name into the file."""
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
        """Write the begin of a span into the table of open spans.

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
            name: The number of the name, which ``intern`` returned.
            track: The number of the track, which ``intern`` returned.
            begin: The begin in nanoseconds of the monotonic clock.
            end: The end in nanoseconds of the monotonic clock.
            level: The level of the current step, which ``level_of_step`` returned.
            number: The number of earlier calls with the same name.
            arguments: A JSON object, or an empty string.
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
        """Write the arguments of a span, which may overwrite the oldest arguments.

        Returns:
            The position of the arguments among all arguments that were ever written, and the length
            of the arguments, both in bytes. Arguments that are too long are not written, and their
            length is 0.
        """
        encoded = text.encode(errors="replace")
        place, size = self._layout.texts
        if len(encoded) > min(_MAX_TEXT_BYTES, size):
            return 0, 0
        with self._lock:
            begin = self._words[_TEXTS_USED]
            if begin % size + len(encoded) > size:
                begin += size - begin % size  # a text does not wrap around
            at = place + begin % size
            # The number of used bytes is written before the text itself, so that a reader treats
            # overwritten texts as lost.
            self._words[_TEXTS_USED] = begin + len(encoded)
            self._memory[at : at + len(encoded)] = encoded
        return begin, len(encoded)


def read_spans(data: bytes) -> Recorded | None:
    """Return the contents of a file, or None if the data are not a complete file of spans.

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
    """Return the header of a file, or None if the file is not a file of spans.

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
    """Yield the number of each name together with the name."""
    begin, size = layout.names
    at, end = begin, begin + min(max(used, 0), size)
    while at < end:
        length = data[at]
        yield at - begin, data[at + 1 : at + 1 + length].decode(errors="replace")
        at += 1 + length


def _open_spans(data: bytes, names: dict[int, str], last: int) -> list[Span]:
    """Return the open spans, with the last known time as their end."""
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
    """Yield the spans of one region, starting with the oldest, without incomplete records."""
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
