"""Merging of all instances' files of spans into one trace file.

Only the file of one process is in memory at a time. This module does not communicate with other
hosts. Callers pass the clock conversion of each instance's host.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from popdist_py.atomic_file import replaced_at_end
from popdist_py.timeline.clocks import LOCAL, ClockLine
from popdist_py.timeline.folder import (
    SPANS_SUFFIX,
    TORCH_SUFFIX,
    clock_path,
    end_path,
    instance_prefix,
    instances_in,
    read_clock,
    read_end,
)
from popdist_py.timeline.span_file import Header, Recorded, Span, read_header, read_spans
from popdist_py.timeline.torch_traces import MAX_TORCH_BYTES, torch_spans
from popdist_py.timeline.trace_events import (
    Call,
    Event,
    Rows,
    flow_events,
    most_waited_for,
    process_events,
    span_events,
)

# Higher compression levels make smaller files but take many times longer.
_COMPRESSION: Final = 4
# Rows are numbered from this number, which is larger than the number of any process. If a row had
# the same number as its process, viewers would treat the row as the main thread of the process.
_FIRST_ROW: Final = 100_000
# One encoder serves all calls, because json.dumps would make a new encoder for each call.
_to_json: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """The files of one instance.

    Attributes:
        label: The name of the instance in the trace.
        prefix: The common beginning of the paths of the instance's files.
        clock: The conversion of the host's clock to the trace's clock, or None if it is unknown.
        attempt: The number of the attempt at the job. Collective calls of different attempts are
            different calls, even if their names and numbers are equal.
    """

    label: str
    prefix: Path
    clock: ClockLine | None = LOCAL
    attempt: int = 1

    def files(self, suffix: str) -> list[Path]:
        """Return the instance's files that end with ``suffix``, with the program's file first."""
        return sorted(self.prefix.parent.glob(f"{glob.escape(self.prefix.name)}.*{suffix}"))

    def remove_files(self) -> None:
        """Remove the instance's files that were merged into the trace, and its lock files."""
        for path in self.prefix.parent.glob(f"{glob.escape(self.prefix.name)}.*"):
            if path.suffix in (SPANS_SUFFIX, ".lock") or ".torch-" in path.name:
                with contextlib.suppress(OSError):
                    path.unlink()


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The result of merging the files of all instances into one trace.

    Attributes:
        path: The path of the trace.
        num_spans: The number of spans in the trace.
        num_dropped: The number of recorded spans that the trace lacks, because they did not fit
            into the files.
        clock_error: The largest possible error of the clock conversions between hosts, in
            nanoseconds.
        spans_hosts: Whether the clock of any instance differs from the trace's clock.
        troubles: Messages about files that could not be read and about clocks that are not known.
        waited_for: The name of the instance that caused more than half of all waiting time, or an
            empty text.
        waited: The nanoseconds that other instances waited for the instance ``waited_for``.
    """

    path: Path
    num_spans: int
    num_dropped: int
    clock_error: int
    spans_hosts: bool = False
    troubles: tuple[str, ...] = ()
    waited_for: str = ""
    waited: int = 0


@dataclass(slots=True)
class _Counts:
    """Counts and messages for ``Merged``, collected while the trace is written."""

    spans: int = 0
    dropped: int = 0
    troubles: list[str] = field(default_factory=list)
    waited_for: str = ""
    waited: int = 0


def merge_files(instances: Sequence[Instance], path: Path) -> Merged:
    """Write the trace of all instances to a file that only its owner can read.

    Args:
        instances: The instances in the order in which the trace displays them.
        path: The path of the trace, which is compressed if the name ends with ``.gz``. An existing
            file is replaced atomically.

    Raises:
        OSError: The file cannot be written.
    """
    counts = _Counts()
    errors = [instance.clock.error for instance in instances if instance.clock is not None]
    about = {"clock_error_ns": max(errors, default=0)}
    _write_trace(path, _events(instances, counts), about)
    counts.troubles += [
        f"the clock of {instance.label} is not known"
        for instance in instances
        if not instance.clock
    ]
    return Merged(
        path=path,
        num_spans=counts.spans,
        num_dropped=counts.dropped,
        clock_error=max(errors, default=0),
        spans_hosts=any(instance.clock != LOCAL for instance in instances),
        troubles=tuple(counts.troubles),
        waited_for=counts.waited_for,
        waited=counts.waited,
    )


def recorded_instances(folders: Sequence[Path], first: int = 1) -> list[Instance]:
    """Return the instances that have files in the folders of a job's attempts.

    Args:
        folders: The folders of the attempts, in order.
        first: The number of the attempt that wrote the first of the folders.
    """
    is_named = len(folders) > 1 or first > 1
    return [
        Instance(
            label=f"instance {index}" + (f" (attempt {attempt})" if is_named else ""),
            prefix=instance_prefix(folder, index),
            clock=read_clock(clock_path(instance_prefix(folder, index))),
            attempt=attempt,
        )
        for attempt, folder in enumerate(folders, start=first)
        for index in instances_in(folder)
    ]


def _events(instances: Sequence[Instance], counts: _Counts) -> Iterator[Event]:
    """Yield all events of the trace, one instance after another."""
    origin = _origin(instances)
    calls: list[Call] = []
    numbers = itertools.count(_FIRST_ROW)
    for process, instance in enumerate(instances, start=1):
        rows = Rows(process, numbers)
        yield from process_events(process, instance.label)
        yield from _instance_events(instance, process, rows, calls, counts, origin)
        yield from rows.events()
    yield from flow_events(calls)
    if found := most_waited_for(calls):
        process, counts.waited = found
        counts.waited_for = instances[process - 1].label


def _instance_events(
    instance: Instance,
    process: int,
    rows: Rows,
    calls: list[Call],
    counts: _Counts,
    origin: int,
) -> Iterator[Event]:
    line = instance.clock or LOCAL
    ahead = 0
    labels: set[str] = set()

    def clock(moment: int) -> int:
        return max(0, line.ours(moment) - origin)

    for path in instance.files(SPANS_SUFFIX):
        recorded = _read(path, counts)
        if recorded is None:
            continue
        ahead = recorded.header.wall_ns - recorded.header.monotonic_ns
        ended = None if recorded.label else read_end(end_path(instance.prefix))
        spans = [*recorded.spans, *(_until(span, ended) for span in recorded.open)]
        counts.spans += len(spans)
        counts.dropped += recorded.dropped
        label = recorded.label
        if label in labels:  # in a common row, the spans of two processes would overlap
            label = f"{label} (process {recorded.header.pid})"
        labels.add(label)
        yield from span_events(
            spans,
            process,
            rows,
            clock,
            suffix=f" of {label}" if label else "",
            calls=None if recorded.label else calls,
            job=str(instance.attempt),
        )
    for path in instance.files(TORCH_SUFFIX):
        spans = _read_torch(path, ahead, counts)
        yield from span_events(spans, process, rows, clock)


def _until(span: Span, ended: int | None) -> Span:
    """Set the end of an open span to the time when its process ended, if this time is known."""
    return span if ended is None else replace(span, end=max(span.end, ended))


def _origin(instances: Iterable[Instance]) -> int:
    """Return the time when the trace begins.

    The trace stores times as floating-point microseconds since the beginning of the trace. Large
    floating-point numbers could not represent single nanoseconds.
    """
    return min(
        (
            (instance.clock or LOCAL).ours(header.monotonic_ns)
            for instance in instances
            for path in instance.files(SPANS_SUFFIX)
            if (header := _read_header(path)) is not None
        ),
        default=0,
    )


def _read_header(path: Path) -> Header | None:
    try:
        return read_header(path)
    except OSError:
        return None  # _read reports the error


def _read(path: Path, counts: _Counts) -> Recorded | None:
    try:
        recorded = read_spans(path.read_bytes())
    except OSError as error:
        counts.troubles.append(f"{path}: {error.strerror}")
        return None
    if recorded is None:
        counts.troubles.append(f"{path} is not a file with spans of a timeline")
    return recorded


def _read_torch(path: Path, ahead: int, counts: _Counts) -> list[Span]:
    try:
        if path.stat().st_size > MAX_TORCH_BYTES:
            raise ValueError(
                "the file is omitted from the timeline, because it has more than "
                f"{MAX_TORCH_BYTES >> 20} MiB"
            )
        spans, left_out = torch_spans(path.read_text(encoding="utf-8", errors="replace"), ahead)
    except OSError as error:
        counts.troubles.append(f"{path}: {error.strerror}")
        return []
    except ValueError as error:
        counts.troubles.append(f"{path}: {error}")
        return []
    counts.spans += len(spans)
    counts.dropped += left_out
    return spans


def _write_trace(path: Path, events: Iterable[Event], about: dict[str, Any]) -> None:
    """Write a trace to a temporary file, then move the file to its path.

    Raises:
        OSError: The file cannot be written.
    """
    with contextlib.ExitStack() as files:
        partial = files.enter_context(replaced_at_end(path, private=True))
        binary: Any = files.enter_context(partial.open("wb"))
        if path.suffix == ".gz":
            binary = files.enter_context(gzip.GzipFile("", "wb", _COMPRESSION, binary, mtime=0))
        text = files.enter_context(io.TextIOWrapper(binary, encoding="utf-8"))
        text.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events):
            text.write(",\n" if number else "")
            text.write(_to_json(event))
        text.write(f'\n],"otherData":{json.dumps(about)}}}\n')
