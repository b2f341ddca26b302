"""The file into which one process writes its spans: its layout, a writer and a reader.

A file has a fixed size and keeps what a long run needs, in bounded space: the first spans (the head
of the file), the latest of all steps, and, the further back, the fewer steps: of steps that 8, 64,
512, ... divide, the latest. Every instance keeps the same steps, so that they can be compared.

What was written is in the file also when the process is killed: the kernel holds its memory. A
record carries its number at both ends; one that was cut short, or overwritten, shows two numbers.
Spans that are open stand in a table of their own, so that the one in which a process died is known.
Nothing here knows where files are, or what the spans mean.
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

__all__ = [
    "MIN_FILE_BYTES",
    "NO_NUMBER",
    "Header",
    "Recorded",
    "Span",
    "SpanWriter",
    "level_of_step",
    "read_header",
    "read_spans",
]

MIN_FILE_BYTES: Final = 1 << 14
NO_NUMBER: Final = -1

_MAGIC: Final = b"popspan2"
# Magic, process id, bytes of the file, and a moment on both clocks: of the day, monotonic.
_HEADER: Final = struct.Struct("<8sQQqq")
_HEADER_BYTES: Final = 256
# Number (from 1), begin, end, name, track, the span's own number, where its arguments are (begin
# and length), number.
_RECORD: Final = struct.Struct("<QqqIIqQIQ")
# The words behind the header, each of 8 bytes: bytes used of the names and of the texts.
_WORDS_AT: Final = 64
_NAMES_USED, _TEXTS_USED, _FIRST_COUNT = range(3)
# The table of open spans, behind the words: begin (0: free), the span's own number, name, track,
# begin.
_OPEN: Final = struct.Struct("<qqIIq")
_NUM_OPEN: Final = 64
_FREE: Final = bytes(8)
_BODY_AT: Final = _HEADER_BYTES + _NUM_OPEN * _OPEN.size
# Of every 32 parts of a file: names, texts, head, and then the ring of each level of steps.
_NAME_PARTS, _TEXT_PARTS = 2, 5
_REGION_PARTS: Final = (3, 10, 2, 2, 2, 2, 2, 2)
_PARTS: Final = 32
_NUM_LEVELS: Final = len(_REGION_PARTS) - 1
# A step of level L is one of 8**L.
_STEP_BITS: Final = 3
_MAX_NAME_BYTES: Final = 200
_MAX_TEXT_BYTES: Final = 2_000
_OVERFLOW_NAME: Final = "(more names than fit)"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of time of one process.

    Attributes:
        name: what went on.
        track: the row in which it is shown.
        begin: nanoseconds of the host's monotonic clock.
        end: the same; not before ``begin``.
        number: which of the calls of this name it is, counted in every instance; None without.
        arguments: a JSON object, or empty.
        is_open: whether it has not ended, as far as is known: ``end`` is what is known.
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
    """What a file says of itself.

    Attributes:
        pid: the process that writes it.
        size: its bytes.
        wall_ns: the time of day, in nanoseconds, at ``monotonic_ns``.
        monotonic_ns: a moment on the clock of the spans, before the first.
    """

    pid: int
    size: int
    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the file of one process holds.

    Attributes:
        header: of the file.
        label: what the process calls itself; empty for the program.
        spans: in no order.
        open: those that had not ended, up to the last moment that the file tells of.
        dropped: how many spans the file had no room for.
    """

    header: Header
    label: str
    spans: tuple[Span, ...]
    open: tuple[Span, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts of a file of ``size`` bytes begin, and how many records a region holds."""

    size: int

    @property
    def names(self) -> tuple[int, int]:
        """Begin and size of the names."""
        return _BODY_AT, self._part(_NAME_PARTS)

    @property
    def texts(self) -> tuple[int, int]:
        """Begin and size of the texts of arguments."""
        return _BODY_AT + self._part(_NAME_PARTS), self._part(_TEXT_PARTS)

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """Begin of each region of records, and how many it holds: the head, then each level's."""
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
    """Return how often 8 divides a step, at most as often as there are levels; of step 0: 0."""
    if step <= 0:
        return 0
    zeros = (step & -step).bit_length() - 1
    return min(zeros // _STEP_BITS, _NUM_LEVELS - 1)


class SpanWriter:
    """Writes the spans of this process; any thread may.

    Args:
        path: the file, which is made.
        size: its bytes; at least ``MIN_FILE_BYTES``.
        label: what the process calls itself; empty for the program.
        moment: before the first span: nanoseconds of the day, and of the monotonic clock.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """

    def __init__(self, path: Path, size: int, label: str, moment: tuple[int, int]) -> None:
        layout = _Layout(max(size, MIN_FILE_BYTES))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A full disk is an error here; later it would end the process (SIGBUS).
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
        # Taken again by the same thread where a signal's handler records in between.
        self._lock = threading.RLock()
        self._ids: dict[str, int] = {}
        self._names_full = False
        self.intern(_OVERFLOW_NAME)
        self.intern(label)
        # The header comes last: a file without it is not read.
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), layout.size, *moment)

    def intern(self, name: str) -> int:
        """Return the number of a name in this file."""
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
        """Note a span that has begun.

        Returns:
            Its place, for ``close``; None if too many are open.
        """
        try:
            place = self._free_places.pop()
        except IndexError:
            return None
        at = _HEADER_BYTES + place * _OPEN.size
        _OPEN.pack_into(self._memory, at, begin, number, name, track, begin)
        return place

    def close(self, place: int) -> None:
        """Forget a span that was open, once it is written."""
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
            name: its number, of ``intern``.
            track: the number of its track, of ``intern``.
            begin: nanoseconds of the monotonic clock.
            end: the same.
            level: of the step in which it ends, of ``level_of_step``.
            number: which of the calls of this name it is.
            arguments: a JSON object, or empty.
        """
        text_begin, text_length = self._text(arguments) if arguments else (0, 0)
        region = level + 1
        # next() of a counter cannot be interrupted: no two threads get the same place.
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
        """Write arguments over the oldest; returns where they begin in all that was written."""
        encoded = text.encode(errors="replace")
        place, size = self._layout.texts
        if len(encoded) > min(_MAX_TEXT_BYTES, size):
            return 0, 0
        with self._lock:
            begin = self._words[_TEXTS_USED]
            if begin % size + len(encoded) > size:
                begin += size - begin % size  # no text goes over the end
            at = place + begin % size
            # Before the bytes: whoever reads meanwhile takes what is overwritten for lost.
            self._words[_TEXTS_USED] = begin + len(encoded)
            self._memory[at : at + len(encoded)] = encoded
        return begin, len(encoded)


def read_spans(data: bytes) -> Recorded | None:
    """Return what a file holds; None if it is no such file, or one that was just begun.

    Args:
        data: the whole file, perhaps of a process that was killed or still writes.
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
        if (span.name, span.track, span.begin) not in written  # killed before it was closed
    ]
    return Recorded(header, label, tuple(spans), tuple(still_open), dropped)


def read_header(path: Path) -> Header | None:
    """Return what a file says of itself; None if it is no such file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _header(file.read(_HEADER.size))


def _header(data: bytes) -> Header | None:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return None
    return Header(*_HEADER.unpack_from(data)[1:])


def _names(data: bytes, layout: _Layout, used: int) -> Iterator[tuple[int, str]]:
    """Yield each name with its number."""
    begin, size = layout.names
    at, end = begin, begin + min(max(used, 0), size)
    while at < end:
        length = data[at]
        yield at - begin, data[at + 1 : at + 1 + length].decode(errors="replace")
        at += 1 + length


def _open_spans(data: bytes, names: dict[int, str], last: int) -> list[Span]:
    """Return the spans that are open, up to the last moment that the file tells of."""
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
    """Yield the spans of one region, the oldest first; what was cut short is left out."""
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
