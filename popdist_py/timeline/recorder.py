"""The recorder, which writes spans of this process to a file and numbers the collective calls.

The program of an instance writes its spans to one large file. Each process that the program starts,
such as a worker of a data loader, writes its spans to one of a few smaller files. The module
``spans`` defines which spans the library records.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import RLock, current_thread, main_thread
from typing import Final, NamedTuple

from popdist_py import heartbeat
from popdist_py.timeline.folder import SPANS_SUFFIX, TORCH_SUFFIX
from popdist_py.timeline.span_file import NO_NUMBER, SpanWriter, level_of_step, read_header

# The number of smaller files, which the program's child processes write. The program's file gets
# three quarters of an instance's space, and the smaller files share the rest.
_NUM_OTHERS: Final = 8
# The largest number of rows for the threads of one process. Further threads share a row, because a
# user could not read more rows in the trace.
_MOST_ROWS: Final = 200
# All process ids of Linux are less than this number.
_PIDS_END: Final = 1 << 31


class Opened(NamedTuple):
    """A span that has begun but not ended.

    Attributes:
        writer: The writer for the file of the process that began the span.
        row: The number of the row that displays the span.
        place: The index of the span in the file's table of open spans, or None if the table is
            full.
        number: The number of earlier collective calls with the same name, or NO_NUMBER if the span
            is not a collective call.
    """

    writer: SpanWriter
    row: int
    place: int | None
    number: int


class Recorder:
    """Records the spans of this process and of its forked child processes, each in its own file.

    Args:
        prefix: The common beginning of the paths of the instance's files.
        size: The total size of all files of the instance, in bytes.
    """

    def __init__(self, prefix: str, size: int) -> None:
        self._prefix = prefix
        self._size = size
        self._forget()
        if not Path(f"{prefix}.0{SPANS_SUFFIX}").exists():
            self._open()  # open it now, so that no child process takes the program's file
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Set the initial state, for a new recorder and after a fork for each child process."""
        self._moment = time.time_ns(), time.monotonic_ns()
        self._writer: SpanWriter | None = None
        self._is_broken = False
        self._opening = RLock()  # several threads may record at the same time
        self._rows: dict[tuple[str, str], int] = {}
        self._calls: dict[str, itertools.count[int]] = {}
        self._torch_files = itertools.count()

    def begin(self, name: str, track: str, begin: int, *, is_call: bool = False) -> Opened | None:
        """Write the start of this thread's span, so that the span is kept even if it never ends.

        Args:
            name: The name of the span.
            track: The row that displays the span. Each thread except the main thread has its own
                rows.
            begin: The start time of the span in nanoseconds of the monotonic clock.
            is_call: Whether the span is a collective call.

        Returns:
            The open span, which the caller passes to ``record``, or None if this process cannot
            record.
        """
        writer = self._writer or self._open()
        if writer is None:
            return None
        number = self._next_call(name) if is_call else NO_NUMBER
        row = self._row(writer, track)
        place = writer.open(writer.intern(name), row, begin, number)
        return Opened(writer, row, place, number)

    def record(
        self,
        name: str,
        track: str,
        begin: int,
        end: int,
        arguments: str = "",
        *,
        is_call: bool = False,
        opened: Opened | None = None,
    ) -> None:
        """Record one span of this thread.

        Args:
            name: The name of the span.
            track: The row that displays the span. Each thread except the main thread has its own
                rows.
            begin: The start time of the span in nanoseconds of the monotonic clock.
            end: The end time of the span in nanoseconds of the monotonic clock.
            arguments: The arguments of the span as a JSON object, or an empty string.
            is_call: Whether the span is a collective call. Collective calls with the same name are
                numbered.
            opened: The open span that the method ``begin`` returned, if the caller has called this
                method.
        """
        writer = self._writer or self._open()
        if writer is None:
            return
        # If the open span has another writer, the parent process began the span before a fork.
        if opened is None or opened.writer is not writer:
            opened = None
            row = self._row(writer, track)
            number = self._next_call(name) if is_call else NO_NUMBER
        else:
            row, number = opened.row, opened.number
        level = level_of_step(heartbeat.steps())
        writer.write(
            writer.intern(name), row, begin, end, level=level, number=number, arguments=arguments
        )
        if opened is not None and opened.place is not None:
            writer.close(opened.place)

    def torch_trace_path(self) -> Path:
        """Return a new path to which torch.profiler can write a trace of this process."""
        number = next(self._torch_files)
        return Path(f"{self._prefix}.torch-{os.getpid()}-{number}{TORCH_SUFFIX}")

    def _next_call(self, name: str) -> int:
        counter = self._calls.get(name)
        if counter is None:
            counter = self._calls.setdefault(name, itertools.count())
        return next(counter)

    def _row(self, writer: SpanWriter, track: str) -> int:
        # The keys of ``_rows`` contain thread names, not thread ids. Python reuses the id of a
        # thread that has ended.
        thread = current_thread()
        found = self._rows.get((track, thread.name))
        if found is not None:
            return found
        if thread is main_thread():
            row = track
        elif len(self._rows) < _MOST_ROWS:
            row = f"{track} ({thread.name})"
        else:
            return writer.intern(f"{track} (other threads)")
        found = self._rows[track, thread.name] = writer.intern(row)
        return found

    def _open(self) -> SpanWriter | None:
        """Make the file of this process and return its writer, or log a warning if this fails."""
        with self._opening:
            if self._is_broken or self._writer is not None:
                return self._writer
            try:
                with _locked(f"{self._prefix}.lock"):
                    self._writer = self._claim()
            except OSError as error:
                logging.getLogger(__name__).warning(
                    "the spans of process %d cannot be written and are missing in the timeline: %s",
                    os.getpid(),
                    error.strerror,
                )
            self._is_broken = self._writer is None
            return self._writer

    def _claim(self) -> SpanWriter | None:
        """Return a writer for a new file, or else for the oldest file whose process has ended.

        Raises:
            OSError: The file cannot be made.
        """
        paths = [Path(f"{self._prefix}.{n}{SPANS_SUFFIX}") for n in range(1 + _NUM_OTHERS)]
        if not paths[0].exists():
            return SpanWriter(paths[0], self._size * 3 // 4, "", self._moment)
        free = next((path for path in paths[1:] if not path.exists()), None)
        ended = [] if free else [path for path in paths[1:] if not _is_written(path)]
        path = free or min(ended, key=_begin_of, default=None)
        if path is None:
            return None
        return SpanWriter(path, self._size // 4 // _NUM_OTHERS, _process_name(), self._moment)


def _process_name() -> str:
    """Return the name that multiprocessing gave this process, or a text with the process id."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing is not None else ""
    return name if name not in ("", "MainProcess") else f"process {os.getpid()}"


def _is_written(path: Path) -> bool:
    """Tell whether the process that writes the file at ``path`` is running."""
    header = read_header(path)
    if header is None:  # a running process has not written the header yet
        return True
    if not 0 < header.pid < _PIDS_END:  # the file is damaged
        return False
    try:
        os.kill(header.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process is running but belongs to another user
    return True


def _begin_of(path: Path) -> int:
    header = read_header(path)
    return 0 if header is None else header.monotonic_ns


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock file at ``path``, which all processes of the instance use."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # the file system may not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
