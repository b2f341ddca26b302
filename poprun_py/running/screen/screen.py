"""What instances write, on the launcher's own stdout and stderr: whole lines, tagged, in order.

Bytes in, bytes out: lines are cut at newlines only, so that no character is ever split. Memory is
bounded: a line longer than ``MAX_HELD`` bytes is passed on in pieces, and a reader that does not
keep up makes the instances wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from poprun_py.console import command_name
from poprun_py.running.screen.progress_lines import ProgressLines
from poprun_py.texts import clock_text

MAX_HELD = 1 << 22
_MAX_PENDING = 1 << 22
# What is kept of a stream's end, and of the two ends of each line of it.
_KEPT, _KEPT_OF_LINE, _TOO_LONG = 1 << 15, 1000, 3000
# A pipe that is ready takes PIPE_BUF bytes without blocking, a terminal less.
_PIPE_CHUNK, _TERMINAL_CHUNK, _WHOLE_CHUNK = 4096, 512, 1 << 16
_BARE_RETURN = re.compile(rb"\r(?!\n)")
# Green, yellow, blue, magenta, cyan, and the bright ones.
_COLOURS = (32, 33, 34, 35, 36, 92, 93, 94, 95, 96)


@dataclass(slots=True)
class OutputStream:
    """One stream (stdout or stderr) of one instance on its way to the screen."""

    tag: bytes
    shown: bool = True
    timed: bool = False
    live: bool = False  # shown at once: somebody types there
    has_ended: bool = False
    held: bytearray = field(default_factory=bytearray)
    fed_at: float = 0.0
    # None: what it redraws is shown as it is, on a file too.
    progress: ProgressLines | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the program's output is shown without tags and times."""
        return not self.tag and not self.timed

    def prefix(self) -> bytes:
        """Return what stands in front of each line now."""
        if not self.timed:
            return self.tag
        return f"{clock_text(time.time())} ".encode() + self.tag


def make_stream(
    index: int | str, name: str, *, form: str = "tag", shown: bool = True, colour: bool = False
) -> OutputStream:
    """Return the stream ``name`` of instance ``index``.

    Args:
        index: the instance; or several as a list, which have no colour.
        name: ``stdout`` or ``stderr``.
        form: ``tag`` for PopRun's tag, ``time`` for the time of day before it, ``plain`` for the
            bytes of the program and nothing else.
        shown: whether anything of it appears.
        colour: whether the tag has the instance's colour.
    """
    tag = b"" if form == "plain" else f"[1,{index}]<{name}>:".encode()
    if colour and tag and isinstance(index, int):
        tag = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[index % len(_COLOURS)], tag)
    progress = None if form == "plain" else ProgressLines()
    return OutputStream(tag=tag, shown=shown, timed=form == "time", progress=progress)


def tag_width(index: int, form: str) -> int:
    """Return the columns in front of each line of instance ``index``'s stdout."""
    stream = make_stream(index, "stdout", form=form)
    return len(stream.prefix())


def keep_end(kept: bytearray, data: bytes) -> bytearray:
    """Return the end of a stream after more of it came; a very long line loses its middle."""
    kept = kept + data
    # A line that is too long fills a whole piece: nearly always there is none, and this is quick.
    piece = _TOO_LONG // 2
    if all(kept.find(b"\n", i, i + piece) >= 0 for i in range(0, len(kept) - piece, piece)):
        return kept[-_KEPT:]
    lines = kept.split(b"\n")
    for number, line in enumerate(lines):
        if len(line) > _TOO_LONG:
            lines[number] = line[:_KEPT_OF_LINE] + b" ... " + line[-_KEPT_OF_LINE:]
    return bytearray(b"\n").join(lines)[-_KEPT:]


class Sink:
    """A descriptor of ours that is written to without ever blocking.

    Files and devices that are always ready are written at once. For pipes and terminals what does
    not go out now is kept; ``is_full`` says when nothing more should be fed.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.moved_at = time.monotonic()
        self._pending = bytearray()
        self._gone = False
        self._always_ready = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._chunk = _TERMINAL_CHUNK if self.is_terminal else _PIPE_CHUNK
        self._own = _open_again(descriptor) if self.is_terminal else None
        if self._own is not None:
            self._chunk = _WHOLE_CHUNK
        self._target = descriptor if self._own is None else self._own
        self._poll = select.poll()
        self._poll.register(self._target, select.POLLOUT)

    @property
    def pending(self) -> int:
        """Number of bytes that wait for the reader."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that the instances should wait too."""
        return len(self._pending) >= _MAX_PENDING

    def write(self, data: bytes) -> None:
        """Take ``data``, and write what can be written now."""
        if not self._gone:
            self._pending += data
            self.flush()

    def flush(self, patience: float = 0.0) -> None:
        """Write what the descriptor takes, waiting up to ``patience`` seconds for it."""
        limit = time.monotonic() + patience
        while self._pending and not self._gone:
            if not self._always_ready:
                wait = max(0, int(1000 * (limit - time.monotonic())))
                if not self._poll.poll(wait):
                    return
            if not self._write_some():
                return

    def close(self) -> None:
        """Close the descriptor that was opened here; later output is dropped."""
        self.discard()
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def discard(self) -> None:
        """Drop what waits, and all that follows: it has no reader."""
        self._gone = True
        self._pending.clear()

    def _write_some(self) -> bool:
        """Write a piece of the pending output; return whether to go on with the next one."""
        piece = bytes(self._pending) if self._always_ready else bytes(self._pending[: self._chunk])
        try:
            del self._pending[: os.write(self._target, piece)]
        except BlockingIOError:
            # The terminal has too little room, or another process made the descriptor non-blocking.
            return False
        except OSError as error:
            # The job goes on without its output: training outlives a pager that was closed.
            self.discard()
            if error.errno != errno.EPIPE:
                _tell_of_loss(self.descriptor, error)
        self.moved_at = time.monotonic()
        return True


def _open_again(descriptor: int) -> int | None:
    """Open a terminal again in non-blocking mode; None if it cannot be opened (another user's).

    A write to the new descriptor takes a piece of any size at once if the terminal has room. Other
    processes keep their own descriptor in blocking mode.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None


def _tell_of_loss(descriptor: int, error: OSError) -> None:
    """Write on stderr that output is lost, unless stderr itself is lost."""
    lost = f"output to descriptor {descriptor} is lost: {error.strerror}"
    text = f"{command_name()}: warning: {lost}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class Screen:
    """Writes the streams of all instances to one descriptor without mixing their lines.

    A line whose end has not been written yet (a progress bar, a prompt) is shown when it holds a
    carriage return, or when ``flush_idle`` finds it waiting. One line at a time is open in this way
    and belongs to its stream until it is ended; unfinished lines of other streams wait meanwhile.
    When another stream has a whole line, the open one is ended first, on a terminal erased and
    drawn again below; one that cannot erase keeps both. Without a terminal, a progress bar is
    written as a whole line from time to time. A plain stream may then end without a newline, which
    is added only if something else is written after it.
    """

    def __init__(
        self, write: Callable[[bytes], None], *, is_terminal: bool = False, can_erase: bool = True
    ) -> None:
        self._write = write
        self.is_terminal = is_terminal
        self._can_erase = can_erase
        self.maps_newlines = True  # whether the terminal also returns to the first column
        self._open: OutputStream | None = None
        self._redrawn: dict[int, OutputStream] = {}  # whose lines are progress bars now, by id
        self._unfinished: dict[int, OutputStream] = {}  # that hold the begin of a line, by id
        self._drawn = b""  # what the open line shows since its last carriage return
        self._is_bar = False  # whether the open line was begun anew

    def feed(self, stream: OutputStream, data: bytes) -> None:
        """Take ``data`` of ``stream`` and write what can be written."""
        if not stream.shown:
            return
        stream.fed_at = time.monotonic()
        stream.held += self._with_bars_as_lines(stream, data)
        end = stream.held.rfind(b"\n") + 1
        if end:
            self._write_lines(stream, bytes(stream.held[:end]))
            del stream.held[:end]
        if (stream.live and stream.held) or (b"\r" in stream.held and self._is_free_for(stream)):
            self._write_partial(stream)
        elif len(stream.held) > MAX_HELD:
            self._relieve(stream)
        if stream.held:
            self._unfinished[id(stream)] = stream
        else:
            self._unfinished.pop(id(stream), None)

    @property
    def is_waiting(self) -> bool:
        """Whether a stream holds the begin of a line whose end has not been written yet."""
        return bool(self._unfinished)

    def flush_idle(self, before: float) -> None:
        """Show what has waited without a newline since ``before``, such as a prompt."""
        for bar in list(self._redrawn.values()):
            if bar.progress is not None and (lines := bar.progress.overdue(before)):
                self._write_lines(bar, lines)
        for stream in list(self._unfinished.values()):
            if stream.fed_at < before and self._is_free_for(stream):
                self._write_partial(stream)
                if not stream.held:
                    del self._unfinished[id(stream)]

    def finish(self, stream: OutputStream) -> None:
        """Write the rest of a stream that has ended, and add a missing newline at its end.

        Without a terminal, a plain stream gets the newline only if other output follows.
        """
        self._unfinished.pop(id(stream), None)
        if self._redrawn.pop(id(stream), None) and stream.progress is not None:
            stream.held += stream.progress.finish(time.monotonic())
        if stream.held.endswith(b"\n"):
            self._write_lines(stream, bytes(stream.held))
            stream.held.clear()
        elif stream.is_plain and not self.is_terminal:
            stream.has_ended = True
            self._write_partial(stream)
        elif stream.held:
            self._write_lines(stream, bytes(stream.held) + b"\n")
            stream.held.clear()
        elif self._open is stream:
            self.interrupt()

    def end_bar(self, stream: OutputStream) -> None:
        """End a line that is being redrawn: what follows is not to stand behind it."""
        is_open_bar = self._open is stream and self._is_bar
        if is_open_bar or b"\r" in stream.held or id(stream) in self._redrawn:
            self.finish(stream)

    def interrupt(self) -> None:
        """End an open line, so that somebody else can write to the descriptor."""
        if self._open is not None:
            self._write(self._end_of_row)
            self._open = None

    def _is_free_for(self, stream: OutputStream) -> bool:
        """Return whether a stream's unfinished line may be shown now."""
        return self._open is None or self._open is stream or self._open.has_ended

    def next_bar_at(self) -> float:
        """Return when a bar that stands still is due to be shown; inf for never."""
        bars = (s.progress for s in self._redrawn.values() if s.progress is not None)
        return min((bar.due_at() for bar in bars), default=float("inf"))

    def _with_bars_as_lines(self, stream: OutputStream, data: bytes) -> bytes:
        """Return what to show of ``data``; without a terminal, bars are whole lines."""
        if self.is_terminal or stream.progress is None:
            return data
        data = stream.progress.feed(data, stream.fed_at)
        if stream.progress.is_open:
            self._redrawn[id(stream)] = stream
        else:
            self._redrawn.pop(id(stream), None)
        return data

    def insert(self, line: bytes) -> None:
        """Write somebody else's line; on a terminal an open line, such as a prompt, stays below."""
        redraw = self._make_way()
        self._write(line + self._end_of_row + redraw)

    def _make_way(self) -> bytes:
        """Free the row of an open line; return what shows it again below, on a terminal."""
        if self._open is None or not self.is_terminal:
            self.interrupt()
            return b""
        self._write(b"\r\x1b[K" if self._can_erase else self._end_of_row)
        return self._open.prefix() + self._drawn

    @property
    def _end_of_row(self) -> bytes:
        return b"\n" if self.maps_newlines else b"\r\n"

    def end_by_terminal(self) -> None:
        """The terminal has ended the open line itself: it echoed the Enter key."""
        self._open = None

    def redraw(self) -> None:
        """Show an open line again."""
        if self._open is not None:
            self._write(self._open.prefix() + self._drawn)

    def _write_lines(self, stream: OutputStream, lines: bytes) -> None:
        """Write whole lines of one stream."""
        redraw = b""
        tag = stream.prefix()
        first_tag = tag
        if self._open is stream:
            first_tag = b""
            self._open = None
        else:
            redraw = self._make_way()
        end = b"\n"
        if not self.maps_newlines and not stream.live:
            end = b"\r\n"
        body = _retag(lines, tag)[:-1].replace(b"\n", end + tag)
        self._write(first_tag + body + end + redraw)

    def _write_partial(self, stream: OutputStream) -> None:
        """Write the unfinished line of one stream and leave it open."""
        # A carriage return at the end may be the first half of a line's end, or moves the cursor.
        is_half = stream.held.endswith(b"\r") and not (stream.live or stream.has_ended)
        data = bytes(stream.held[:-1] if is_half else stream.held)
        if not data:
            return
        del stream.held[: len(data)]
        tag = stream.prefix()
        start = b""
        if self._open is not stream:
            self.interrupt()
            start = tag
            self._drawn = b""
            self._is_bar = False
        self._open = stream
        self._is_bar |= b"\r" in data
        self._drawn = (self._drawn + data).rpartition(b"\r")[2][-4096:]
        self._write(start + _retag(data, tag))

    def _relieve(self, stream: OutputStream) -> None:
        """Make room in a very long line: what a carriage return overwrote, else the line so far."""
        last = stream.held.rfind(b"\r")
        if self.is_terminal and last > 0:
            del stream.held[:last]
        else:
            self._write_partial(stream)


def _retag(data: bytes, tag: bytes) -> bytes:
    """Repeat the tag after each carriage return, which would otherwise be overwritten."""
    return _BARE_RETURN.sub(lambda _: b"\r" + tag, data) if tag else data
