"""The output of all instances, on the launcher's stdout and stderr, and in --output-dir.

Writing never blocks. While the reader of the launcher's output does not keep up, the supervisor
makes the instances wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from poprun_py.display.formatting import ranges_text
from poprun_py.running.output_files import OutputFiles
from poprun_py.running.screen.panel import Panel
from poprun_py.running.screen.repeat_filter import RepeatedTracebacks
from poprun_py.running.screen.repeated_warnings import RepeatedWarnings
from poprun_py.running.screen.tagged_output import OutputStream, Screen, Sink, make_stream
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.job_description import Job
from poprun_py.terminal import (
    can_erase,
    columns_of,
    command_name,
    has_cursor,
    may_colour,
    wrapped_messages,
)

if TYPE_CHECKING:
    from poprun_py.running.screen.traceback_parsing import InterruptTracebacks

# The launcher holds back an unfinished line of output for a fixed time plus a time for each
# instance, up to the maximum. An unbuffered print() writes the newline separately. If many programs
# share a CPU, a program may have to wait for the CPU before it writes the newline.
_IDLE_SECONDS, _IDLE_SECONDS_PER_INSTANCE, _MAX_IDLE_SECONDS = 0.2, 0.005, 2.0
# After a job was stopped and the grace time is over, the rest of the output is discarded if the
# reader of the output reads nothing for this long.
_READER_SECONDS = 2.0
# The seconds between two attempts to write output whose reader is too slow.
_READER_PAUSE_SECONDS = 0.002
# If at most this many lines follow the last lines of an instance, the user sees those last lines
# together with the launcher's report.
_VISIBLE_LINES = 8
_STDOUT, _STDERR = 0, 1
_NAMES = ("stdout", "stderr")


class InstanceOutput:
    """Writes the output of all instances.

    Args:
        job: The job, with the form of the output, the shown instances, and the output folder.
        descriptors: The launcher's own stdout and stderr.
        write_log: Writes a line of the launcher's own log.

    Attributes:
        stopped_at: The time when the job was stopped; None before. Output that is not read for long
            after this time is discarded.
    """

    def __init__(
        self, job: Job, descriptors: tuple[int, int], write_log: Callable[[str], None]
    ) -> None:
        self.stopped_at: float | None = None
        # The number of lines on stderr, in total and up to the last output of each instance.
        self._num_lines = 0
        self._last_line: dict[int, int] = {}
        self._shown_troubles: set[str] = set()  # the shown warnings about incomplete files
        of_instances = _IDLE_SECONDS_PER_INSTANCE * job.num_instances
        self._idle_seconds = min(_IDLE_SECONDS + of_instances, _MAX_IDLE_SECONDS)
        self._job = job
        self._write_log = write_log
        self._sinks = tuple(Sink(descriptor) for descriptor in descriptors)
        if _is_same_terminal(*descriptors):
            # On one terminal, stdout and stderr share the cursor, so one sink tracks the unfinished
            # line.
            self._sinks = self._sinks[:1] * 2
        terminal = next((sink for sink in reversed(self._sinks) if sink.is_terminal), None)
        self._panel: Panel | None = None
        self._panel_sink: Sink | None = None
        writers = {id(sink): sink.write for sink in self._sinks}
        if terminal is not None and job.watchers.live and has_cursor(job.command.environ):
            self._panel_sink = terminal
            self._panel = Panel(
                terminal.write, lambda: self.panel_size, lambda: not terminal.pending
            )
            writers[id(terminal)] = self._panel.write
        screens = {
            id(sink): Screen(
                writers[id(sink)],
                is_terminal=sink.is_terminal,
                can_erase=can_erase(job.command.environ),
                columns=partial(columns_of, sink.descriptor),
            )
            for sink in self._sinks
        }
        self._screens = tuple(screens[id(sink)] for sink in self._sinks)
        one, other = (os.fstat(descriptor) for descriptor in descriptors)
        self._is_one_file = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
        self._typed_into: int | None = None
        self._files = OutputFiles(job.files.output_dir, job.num_instances, job.files.output_limit)
        self._streams: dict[int, tuple[OutputStream, OutputStream]] = {}
        self._ended: set[int] = set()
        self._repeats = RepeatedTracebacks(
            self._show_stderr, self._begin_traceback, self._show_repeated
        )
        self._warnings = RepeatedWarnings(self._find_tracebacks, self._tell_of)
        self._processes: dict[int, tuple[str, int]] = {}  # host and process id of each instance
        self._interrupts: InterruptTracebacks | None = None
        self._written_at = time.monotonic()

    def add(self, index: int) -> None:
        """Make the streams and files for the output of a new instance."""
        self._files.open(index)
        colour = may_colour(self._job.command.environ)
        stdout, stderr = (
            make_stream(
                index,
                name,
                form=self._job.watchers.output,
                shown=self._is_shown(index),
                colour=colour and sink.is_terminal,
            )
            for name, sink in zip(_NAMES, self._sinks, strict=True)
        )
        self._streams[index] = stdout, stderr
        self._warnings.joined(index)
        self._repeats.joined(index)

    def _is_shown(self, index: int) -> bool:
        only = self._job.watchers.only_output_from
        return only is None or index in only

    def feed_stdout(self, peer: Peer, data: bytes) -> None:
        """Write bytes that an instance has written to its stdout."""
        self._files.write(peer.index, _NAMES[_STDOUT], data)
        self._screens[_STDOUT].feed(self._streams[peer.index][_STDOUT], data)

    def feed_stderr(self, peer: Peer, data: bytes) -> None:
        """Write bytes that an instance has written to its stderr."""
        self._files.write(peer.index, _NAMES[_STDERR], data)
        if not self._streams[peer.index][_STDERR].shown:
            return
        if self._job.watchers.output == "plain":
            # Plain output does not name instances, so repeated warnings and tracebacks stay.
            self._show_stderr(peer.index, data)
            return
        self._processes[peer.index] = (peer.host, peer.started.get("pid", 0))
        if self._interrupts is not None:
            self._interrupts.feed(peer.index, data, time.monotonic())
        else:
            self._find_repeats(peer.index, data)

    def shorten_interrupts(self) -> None:
        """From now on, show each traceback of a KeyboardInterrupt as one line."""
        if self._interrupts is None:
            # The module is imported only after Ctrl-C, so that other jobs start faster.
            from poprun_py.running.screen.traceback_parsing import InterruptTracebacks

            self._interrupts = InterruptTracebacks(self._find_repeats)

    def _find_repeats(self, index: int, data: bytes) -> None:
        host, pid = self._processes[index]
        self._warnings.feed(index, data, time.monotonic(), host=host, pid=pid)

    def _find_tracebacks(self, index: int, data: bytes) -> None:
        host, pid = self._processes[index]
        self._repeats.feed(index, data, time.monotonic(), host=host, pid=pid)

    def finish(self, index: int) -> None:
        """End the unfinished lines of an instance that has ended."""
        if self._interrupts is not None:
            self._interrupts.ended(index)
        self._warnings.ended(index, time.monotonic())
        self._ended.add(index)
        self._repeats.ended(index)
        for screen, stream in zip(self._screens, self._streams[index], strict=True):
            screen.finish(stream)

    def _show_stderr(self, index: int, data: bytes) -> None:
        stream = self._streams[index][_STDERR]
        self._screens[_STDERR].feed(stream, data)
        if index in self._ended:
            self._screens[_STDERR].finish(stream)
        self._num_lines += data.count(b"\n")
        self._last_line[index] = self._num_lines

    def _begin_traceback(self, index: int) -> None:
        self._screens[_STDERR].end_bar(self._streams[index][_STDERR])

    def _show_repeated(self, members: tuple[int, ...], shown: int) -> None:
        """Write a line that says that ``members`` had the same traceback as ``shown``."""
        self._tell_of(members, f"the same traceback as instance {shown}")
        for index in members:
            self._last_line[index] = self._last_line[shown]

    def _tell_of(self, members: tuple[int, ...], sentence: str) -> None:
        """Write a line about output of ``members`` that was left out."""
        tag = make_stream(ranges_text(members), _NAMES[_STDERR], form=self._job.watchers.output)
        self._screens[_STDERR].feed(tag, sentence.encode(errors="replace") + b"\n")
        self._num_lines += 1

    @property
    def visible_instances(self) -> frozenset[int]:
        """The instances whose last stderr output is among the last lines of the launcher's stderr.

        If an instance's traceback was not shown because another instance had written an equal
        traceback, the position of that traceback counts.
        """
        end = self._num_lines
        return frozenset(i for i, at in self._last_line.items() if end - at <= _VISIBLE_LINES)

    def say(self, sentence: str) -> None:
        """Write a message of the launcher that is shown at any verbosity."""
        self._insert(sentence)

    def begin_report(self) -> None:
        """End the unfinished line of a program on stderr, before the launcher's report."""
        for screen in self._screens if self._is_one_file else self._screens[_STDERR:]:
            screen.interrupt()

    def log(self, line: str) -> None:
        """Write a line of the launcher's own log between the lines of the instances."""
        self._screens[_STDERR].interrupt()
        self.erase_panel()
        self._sinks[_STDERR].flush(0.1)
        self._write_log(line)
        if self._panel is not None:
            self._panel.draw()

    @property
    def panel_size(self) -> tuple[int, int] | None:
        """The number of columns and rows of the terminal of the panel; None without a panel."""
        if self._panel_sink is None:
            return None
        try:
            size = os.get_terminal_size(self._panel_sink.descriptor)
        except OSError:
            return None
        return size.columns, size.lines

    def show_panel(self, lines: Sequence[str]) -> None:
        """Show a panel of ``lines`` below the output on the terminal; without lines, remove it."""
        if self._panel is not None and not (lines and self.is_full):
            self._panel.show(lines)

    def erase_panel(self) -> None:
        """Erase the panel from the terminal until the next output or ``show_panel``."""
        if self._panel is not None and self._panel_sink is not None:
            self._panel.erase()
            self._panel_sink.flush(0.1)

    @property
    def is_terminal(self) -> tuple[bool, bool]:
        """Whether stdout and stderr are shown on a terminal."""
        return self._sinks[_STDOUT].is_terminal, self._sinks[_STDERR].is_terminal

    def give_keyboard(self, instance: int | None, *, shows_hidden: bool) -> None:
        """Show the output of ``instance``, which has the keyboard, before its lines are complete.

        ``shows_hidden`` tells whether to show the instance's output even if --only-output-from
        hides it.
        """
        for is_live, index in ((False, self._typed_into), (True, instance)):
            if index is None:
                continue
            for stream, sink in zip(self._streams[index], self._sinks, strict=True):
                stream.live = is_live and sink.is_terminal
                stream.shown = self._is_shown(index) or (stream.live and shows_hidden)
        self._typed_into = instance

    def map_newlines(self, mapped: bool) -> None:
        """Record whether the terminal returns to the first column after a newline."""
        for screen in self._screens:
            screen.maps_newlines = mapped or not screen.is_terminal

    def enter_typed(self) -> None:
        """Record that a typed newline has moved the cursor of the terminal to the next line."""
        if self._panel is not None:
            self._panel.enter_typed()
        for screen in self._screens:
            screen.end_by_terminal()

    def resized(self) -> None:
        """Fit progress bars into a terminal whose size has changed."""
        for screen in dict.fromkeys(self._screens):
            screen.resized()

    def suspend(self) -> None:
        """Erase the panel, and move the cursor behind a progress bar, before a shell writes."""
        for screen in dict.fromkeys(self._screens):
            screen.suspend()
        self.erase_panel()

    def redraw(self) -> None:
        """Show unfinished lines again, after a shell wrote to the terminal."""
        for screen in dict.fromkeys(self._screens):
            screen.redraw()

    @property
    def is_full(self) -> bool:
        """Whether the instances have to wait for the reader of the launcher's output."""
        return any(sink.is_full for sink in self._sinks)

    @property
    def is_written(self) -> bool:
        """Whether all output has been written."""
        return not any(sink.pending for sink in self._sinks)

    def on_time(self, now: float, wait_seconds: float = 0.0) -> None:
        """Write as much of the output as its readers accept within ``wait_seconds``."""
        self._warn_of_incomplete_files()
        if self._panel is not None:
            self._panel.on_time(now)
        if self._interrupts is not None:
            self._interrupts.on_time(now)
        self._warnings.on_time(now)
        self._repeats.on_time(now)
        self._written_at = now
        for screen in self._screens:
            screen.flush_idle(now - self._idle_seconds)
        for sink in self._sinks:
            sink.flush(wait_seconds)
            last = max(self.stopped_at or now, sink.moved_at)
            if sink.pending and now > last + self._job.limits.grace + _READER_SECONDS:
                sink.discard()

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        if not self.is_written:
            return self._written_at + _READER_PAUSE_SECONDS
        if any(screen.is_waiting for screen in self._screens):
            return self._written_at + self._idle_seconds
        next_panel_at = self._panel.next_deadline() if self._panel is not None else float("inf")
        next_bar_at = min(screen.next_bar_at() for screen in self._screens)
        next_bar_at += self._idle_seconds
        held_until = float("inf") if self._interrupts is None else self._interrupts.next_deadline()
        repeats_until = min(self._warnings.next_deadline(), self._repeats.next_deadline())
        return min(repeats_until, next_bar_at, next_panel_at, held_until)

    def close(self) -> None:
        """Remove the panel from the terminal, and close the output files."""
        self._files.close()
        self._warn_of_incomplete_files()
        self.show_panel(())
        for sink in dict.fromkeys(self._sinks):
            sink.flush(0.1)
            sink.close()

    def _warn_of_incomplete_files(self) -> None:
        for sentence in (self._files.notice, self._files.trouble):
            if sentence and sentence not in self._shown_troubles:
                self._shown_troubles.add(sentence)
                self._insert(f"warning: {sentence}")

    def _insert(self, sentence: str) -> None:
        """Write a message of the launcher to stderr; undecodable bytes of a path are escaped."""
        screen = self._screens[_STDERR]
        line = f"{command_name()}: {sentence}"
        text = line.encode(errors="backslashreplace").decode()
        screen.insert(wrapped_messages(text, screen.num_columns).encode())


def _is_same_terminal(one: int, other: int) -> bool:
    is_terminal = os.isatty(one) and os.isatty(other)
    return is_terminal and os.fstat(one).st_rdev == os.fstat(other).st_rdev
