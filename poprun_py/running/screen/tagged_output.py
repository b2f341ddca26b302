"""The output of all instances as whole, tagged lines on the launcher's stdout and stderr.

Output is handled as bytes and cut at newlines only, so multi-byte characters are never split. The
use of memory for output is bounded. A line longer than ``MAX_HELD`` bytes is passed on in pieces.
If the reader of the launcher's output is slow, the instances are paused.
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

from poprun_py.display.formatting import clock_text
from poprun_py.running.screen.progress_lines import UP, ProgressLines
from poprun_py.terminal import command_name

MAX_HELD = 1 << 22
_MAX_PENDING = 1 << 22
# The function keep_end keeps the last _KEPT bytes of a stream. If a line is longer than _TOO_LONG
# bytes, keep_end keeps only _KEPT_OF_LINE bytes at each end of the line.
_KEPT, _KEPT_OF_LINE, _TOO_LONG = 1 << 15, 1000, 3000
# The largest numbers of bytes to write at once to a pipe, to a terminal, and to a terminal that
# ``Sink`` has opened again. A pipe that is ready takes PIPE_BUF bytes without blocking. A terminal
# takes fewer bytes without blocking.
_PIPE_CHUNK, _TERMINAL_CHUNK, _WHOLE_CHUNK = 4096, 512, 1 << 16
_COLOUR = re.compile(rb"\x1b\[[\d;]*m")
_BARE_RETURN = re.compile(rb"\r(?!\n)")
# The colours of tags are green, yellow, blue, magenta and cyan, then the bright colours.
_COLOURS = (32, 33, 34, 35, 36, 92, 93, 94, 95, 96)


@dataclass(slots=True, eq=False)
class OutputStream:
    """One stream (stdout or stderr) of one instance, with the output that is not shown yet.

    Attributes:
        timed: Whether the time of day is written before each line of output.
        live: Whether unfinished lines are shown immediately, because the user types text after
            them.
        has_nested_bars: Whether the program moves the cursor up, as for one progress bar below
            another.
        held: The beginning of a line whose end has not arrived yet.
        progress: The converter that turns progress bars into whole lines if the output is not a
            terminal; None to leave progress bars unchanged.
    """

    tag: bytes
    shown: bool = True
    timed: bool = False
    live: bool = False
    has_ended: bool = False
    has_nested_bars: bool = False
    held: bytearray = field(default_factory=bytearray)
    fed_at: float = 0.0
    progress: ProgressLines | None = None

    def prefix(self) -> bytes:
        """Return the tag to write before a line, with the time of day if ``timed`` is true."""
        return f"{clock_text(time.time())} ".encode() + self.tag if self.timed else self.tag


def make_stream(
    index: int | str, name: str, *, form: str = "tag", shown: bool = True, colour: bool = False
) -> OutputStream:
    """Create the object for one output stream of an instance.

    Args:
        index: The index of the instance, or a text such as ``0-3`` for several instances.
        name: The name of the stream, ``stdout`` or ``stderr``.
        form: ``tag`` for PopRun's tag before each line, ``time`` for the time of day before the
            tag, or ``plain`` for the unchanged bytes of the program.
        shown: Whether the output of the stream is shown to the user.
        colour: Whether the tag of a single instance is coloured.
    """
    tag = b"" if form == "plain" else f"[1,{index}]<{name}>:".encode()
    if colour and tag and isinstance(index, int):
        tag = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[index % len(_COLOURS)], tag)
    progress = None if form == "plain" else ProgressLines()
    return OutputStream(tag=tag, shown=shown, timed=form == "time", progress=progress)


def tag_width(index: int, form: str) -> int:
    """Return the number of columns of the tag before each line of an instance's stdout."""
    return len(make_stream(index, "stdout", form=form).prefix())


def keep_end(kept: bytearray, data: bytes) -> bytearray:
    """Append ``data`` to ``kept``, and return the last bytes of the whole output.

    The middle of a very long line is left out.
    """
    kept = kept + data
    # This quick check finds every line that is too long, because such a line fills at least one
    # piece of ``kept`` without a newline.
    piece = _TOO_LONG // 2
    if all(kept.find(b"\n", i, i + piece) >= 0 for i in range(0, len(kept) - piece, piece)):
        return kept[-_KEPT:]
    lines = kept.split(b"\n")
    for number, line in enumerate(lines):
        if len(line) > _TOO_LONG:
            lines[number] = line[:_KEPT_OF_LINE] + b" ... " + line[-_KEPT_OF_LINE:]
    return bytearray(b"\n").join(lines)[-_KEPT:]


class Sink:
    """Writes to one of the launcher's file descriptors without blocking.

    If a pipe or terminal cannot take all output now, the rest of the output is kept for later.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.moved_at = time.monotonic()
        self._pending = bytearray()
        self._is_closed = False
        self._own = _open_again(descriptor) if self.is_terminal else None
        self._target = descriptor if self._own is None else self._own
        if self._own is not None:
            self._chunk = _WHOLE_CHUNK
        elif stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._chunk = _MAX_PENDING
        else:
            self._chunk = _TERMINAL_CHUNK if self.is_terminal else _PIPE_CHUNK
        self._poll = select.poll()
        self._poll.register(self._target, select.POLLOUT)

    @property
    def pending(self) -> int:
        """The number of output bytes that have not been written to the descriptor yet."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether the instances should be paused, because much output is not written yet."""
        return len(self._pending) >= _MAX_PENDING

    def write(self, data: bytes) -> None:
        """Write ``data``, and keep the part that the descriptor does not take now."""
        if not self._is_closed:
            self._pending += data
            self.flush()

    def flush(self, timeout: float = 0.0) -> None:
        """Write the kept output, and wait at most ``timeout`` seconds until it can be written."""
        limit = time.monotonic() + timeout
        while self._pending:
            wait = max(0, int(1000 * (limit - time.monotonic())))
            if not self._poll.poll(wait) or not self._write_some():
                return

    def close(self) -> None:
        """Drop kept output and all later output, and close the terminal that was opened again."""
        self.discard()
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def discard(self) -> None:
        """Drop the output kept so far and all later output."""
        self._is_closed = True
        self._pending.clear()

    def _write_some(self) -> bool:
        """Write a piece of the kept output; return whether another piece may be written."""
        try:
            del self._pending[: os.write(self._target, bytes(self._pending[: self._chunk]))]
        except BlockingIOError:
            # The buffer of the terminal or pipe is full and the descriptor is non-blocking.
            return False
        except OSError as error:
            # The job continues without its output, for example if the user closed its pager.
            self.discard()
            if error.errno != errno.EPIPE:
                lost = (
                    f"the output of the job to file descriptor {self.descriptor} is lost: "
                    f"{error.strerror}"
                )
                with contextlib.suppress(OSError):
                    os.write(2, f"{command_name()}: warning: {lost}\n".encode())
        self.moved_at = time.monotonic()
        return True


def _open_again(descriptor: int) -> int | None:
    """Open a terminal again in non-blocking mode; None if the terminal belongs to another user.

    Writing to the new file descriptor never blocks. Other processes that use the terminal keep
    their own descriptor in blocking mode.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None


class Screen:
    """Writes the streams of all instances to one descriptor without mixing their lines.

    An unfinished line (a progress bar or a prompt) is shown when it contains a carriage return, or
    when ``flush_idle`` finds that its end has not arrived for some time. At most one unfinished
    line is shown at a time, and is called the open line. Unfinished lines of other streams are held
    until the open line ends. If a whole line of another stream arrives, the open line is erased on
    a terminal and shown again below the whole line. If the terminal cannot erase lines, the
    open line is shown twice. If the output is not a terminal, the open line is ended by a
    newline, and progress bars are written as whole lines.

    On a terminal, a progress bar is fitted into one row, and the cursor stays at the beginning of
    the row. If the terminal is made narrower, it may wrap the bar into several rows. All of them
    are below the cursor, so they can be erased without knowing whether the terminal wraps rows.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        is_terminal: bool = False,
        can_erase: bool = True,
        columns: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._write = write
        self._columns = columns
        self.is_terminal = is_terminal
        self._can_erase = can_erase
        self.maps_newlines = True  # Whether a newline moves the cursor to the first column.
        self._open: OutputStream | None = None  # The stream of the open (unfinished) line.
        # The streams with a progress bar, and the streams that hold the beginning of a line.
        self._bars: dict[OutputStream, ProgressLines] = {}
        self._unfinished: dict[OutputStream, None] = {}
        self._drawn = b""  # The open line's text after its last carriage return.
        self._is_bar = False  # Whether the open line contains a carriage return.
        # The terminal's columns when the open line was last drawn as a bar that fits into one row;
        # None if the open line was written as the program wrote it.
        self._columns_of_bar: int | None = None

    def feed(self, stream: OutputStream, data: bytes) -> None:
        """Write the whole lines of a stream's new output, and hold the rest of the output."""
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
            self._shorten_held(stream)
        if stream.held:
            self._unfinished[stream] = None
        else:
            self._unfinished.pop(stream, None)

    @property
    def is_waiting(self) -> bool:
        """Whether any stream holds the beginning of a line."""
        return bool(self._unfinished)

    def flush_idle(self, before: float) -> None:
        """Show unfinished lines, such as a prompt, of streams without output since ``before``."""
        for stream, progress in self._bars.items():
            if lines := progress.overdue(before):
                self._write_lines(stream, lines)
        for stream in list(self._unfinished):
            if stream.fed_at < before and self._is_free_for(stream):
                self._write_partial(stream)
                if not stream.held:
                    del self._unfinished[stream]

    def finish(self, stream: OutputStream) -> None:
        """Write the rest of a stream that has ended, and add a newline if its last line has none.

        If the output is not a terminal and has no tags, the newline at the end is added only if
        other output follows.
        """
        self._unfinished.pop(stream, None)
        if progress := self._bars.pop(stream, None):
            stream.held += progress.finish(time.monotonic())
        if stream.held.endswith(b"\n"):
            self._write_lines(stream, bytes(stream.held))
            stream.held.clear()
        elif not (stream.tag or stream.timed or self.is_terminal):
            stream.has_ended = True
            self._write_partial(stream)
        elif stream.held:
            self._write_lines(stream, bytes(stream.held) + b"\n")
            stream.held.clear()
        elif self._open is stream:
            self.interrupt()

    def end_bar(self, stream: OutputStream) -> None:
        """End the progress bar of a stream, so that the stream's next output starts a new line."""
        is_open_bar = self._open is stream and self._is_bar
        if is_open_bar or b"\r" in stream.held or stream in self._bars:
            self.finish(stream)

    def interrupt(self) -> None:
        """End the open (unfinished) line, so that other code can write to the descriptor."""
        if self._open is not None:
            is_bar = self._columns_of_bar is not None
            self._write((self._ended_bar(self._open) if is_bar else b"") + self._end_of_row)
            self._open = None

    def _is_free_for(self, stream: OutputStream) -> bool:
        return self._open is None or self._open is stream or self._open.has_ended

    def next_bar_at(self) -> float:
        """Return the time when a progress bar must be shown next; inf if no bar must be shown."""
        return min((bar.due_at() for bar in self._bars.values()), default=float("inf"))

    def _with_bars_as_lines(self, stream: OutputStream, data: bytes) -> bytes:
        """Return ``data``, with progress bars as whole lines where they cannot be redrawn.

        Bars cannot be redrawn in a file or pipe. On a terminal, nested bars cannot be redrawn,
        because lines of other streams may be between them.
        """
        if stream.progress is None or (self.is_terminal and stream.live):
            return data
        if self.is_terminal and not stream.has_nested_bars:
            if UP not in data:
                return data
            stream.has_nested_bars = True
            if self._open is stream:
                self.interrupt()
            data = bytes(stream.held) + data
            stream.held.clear()
            data = data.removeprefix(UP)  # the bar above is shown already
        data = stream.progress.feed(data, stream.fed_at)
        if stream.progress.is_redrawn:
            self._bars[stream] = stream.progress
        else:
            self._bars.pop(stream, None)
        return data

    @property
    def num_columns(self) -> int | None:
        """The number of columns of a terminal whose lines can be erased; None for other output."""
        return self._columns() if self.is_terminal and self._can_erase else None

    def insert(self, lines: bytes) -> None:
        """Write a message of the launcher; on a terminal, show the unfinished line again below."""
        redraw = self._close_open_line()
        self._write(lines.replace(b"\n", self._end_of_row) + self._end_of_row + redraw)

    def _close_open_line(self) -> bytes:
        """Erase or end the open (unfinished) line; return the bytes that show the line again."""
        if self._open is None or not self.is_terminal:
            self.interrupt()
            return b""
        self._write(self._erased_bar() or (b"\r\x1b[K" if self._can_erase else self._end_of_row))
        return self._redrawn()

    @property
    def _end_of_row(self) -> bytes:
        return b"\n" if self.maps_newlines else b"\r\n"

    def end_by_terminal(self) -> None:
        """Forget the open (unfinished) line, because the user has ended it with the Enter key."""
        self._open = None

    def redraw(self) -> None:
        """Write the open (unfinished) line again."""
        if self._open is not None:
            self._write(self._redrawn())

    def resized(self) -> None:
        """Fit the progress bar of the open line into the terminal, whose size has changed."""
        if self._open is not None and self._columns_of_bar is not None:
            self._write(self._erased_bar() + self._redrawn())

    def suspend(self) -> None:
        """Move the cursor behind the progress bar of the open line, before a shell writes there."""
        if self._open is not None and self._columns_of_bar is not None:
            self._write(self._erased_bar() + self._redrawn().removesuffix(b"\r"))

    def _redrawn(self) -> bytes:
        """Return the bytes that show the open line again in an empty row."""
        assert self._open is not None
        if self._columns_of_bar is None:
            return self._open.prefix() + self._drawn
        self._columns_of_bar = self.num_columns or self._columns_of_bar
        return self._fitted_bar(self._open) + b"\r"

    def _fitted_bar(self, stream: OutputStream, *, is_last: bool = False) -> bytes:
        from poprun_py.running.screen.bar_row import fitted

        assert self._columns_of_bar is not None
        prefix = stream.prefix()
        room = self._columns_of_bar - len(_COLOUR.sub(b"", prefix))
        return prefix + fitted(self._drawn, max(room, 1), is_last=is_last)

    def _erased_bar(self) -> bytes:
        """Return the codes that erase the open line's bar, if the bar fits into one row."""
        if self._columns_of_bar is None:
            return b""
        # A terminal that was made narrower may have wrapped the bar into several rows.
        has_one_row = self._columns_of_bar == self.num_columns
        return b"\r\x1b[K" if has_one_row else b"\r\x1b[J"

    def _ended_bar(self, stream: OutputStream) -> bytes:
        """Return the bytes that show the last state of the open line's bar, with its end."""
        erased = self._erased_bar()
        self._columns_of_bar = self.num_columns or self._columns_of_bar
        return erased + self._fitted_bar(stream, is_last=True)

    def _write_lines(self, stream: OutputStream, lines: bytes) -> None:
        tag, redraw = stream.prefix(), b""
        first_tag = tag
        if self._open is stream:
            first_tag = b""
            if self._columns_of_bar is not None:
                first_tag, lines = self._last_state(stream, lines)
            self._open = None
        else:
            redraw = self._close_open_line()
        if _BARE_RETURN.search(lines) and (columns := self.num_columns) is not None:
            # The bar was held while another line was open, so only its end has to be shown.
            from poprun_py.running.screen.bar_row import last_states

            lines = last_states(lines, max(1, columns - len(_COLOUR.sub(b"", tag))))
        end = b"\n" if self.maps_newlines or stream.live else b"\r\n"
        body = _retag(lines, tag)[:-1].replace(b"\n", end + tag)
        self._write(first_tag + body + end + redraw)

    def _last_state(self, stream: OutputStream, lines: bytes) -> tuple[bytes, bytes]:
        """Return the bytes that end the open line's bar, and the rest of the lines to write."""
        from poprun_py.running.screen.bar_row import next_state, stays_in_row

        first = lines.partition(b"\n")[0]
        if stays_in_row(first):
            self._drawn = next_state(self._drawn, first)
            lines = lines[len(first) :]
        return self._ended_bar(stream), lines

    def _write_partial(self, stream: OutputStream) -> None:
        # Hold a carriage return at the end of the output, because a newline may follow.
        is_half = stream.held.endswith(b"\r") and not (stream.live or stream.has_ended)
        data = bytes(stream.held[:-1] if is_half else stream.held)
        if not data:
            return
        del stream.held[: len(data)]
        tag, start = stream.prefix(), b""
        if self._open is not stream:
            self.interrupt()
            self._open, self._drawn, self._is_bar, start = stream, b"", False, tag
            self._columns_of_bar = None
        is_new = not self._is_bar
        self._is_bar |= b"\r" in data
        if self._is_fittable(stream, data, is_new=is_new):
            self._draw_bar(data)
            return
        if self._columns_of_bar is not None:
            # The program moves the cursor, which therefore has to be at the end of the bar.
            start, self._columns_of_bar = self._ended_bar(stream), None
        self._drawn = (self._drawn + data).rpartition(b"\r")[2][-4096:]
        self._write(start + _retag(data, tag))

    def _is_fittable(self, stream: OutputStream, data: bytes, *, is_new: bool) -> bool:
        """Return whether the open line is a progress bar that can be fitted into one row.

        A line that is written as the program wrote it stays as it is until its end.
        """
        if not self._is_bar or self.num_columns is None:
            return False
        if not is_new and self._columns_of_bar is None:
            return False
        from poprun_py.running.screen.bar_row import shows_progress, stays_in_row

        # The user may be typing into the line of a live stream, where the cursor has to stay.
        return stays_in_row(data) and (not stream.live or shows_progress(self._drawn + data))

    def _draw_bar(self, data: bytes) -> None:
        from poprun_py.running.screen.bar_row import next_state

        self._drawn = next_state(self._drawn, data)[-4096:]
        if self._columns_of_bar is None:
            self._columns_of_bar = self.num_columns
        self._write(self._erased_bar() + self._redrawn())

    def _shorten_held(self, stream: OutputStream) -> None:
        """Drop the overwritten beginning of a long held line, or write the held line."""
        last = stream.held.rfind(b"\r")
        if self.is_terminal and last > 0:
            del stream.held[:last]
        else:
            self._write_partial(stream)


def _retag(data: bytes, tag: bytes) -> bytes:
    # Text after a carriage return overwrites the tag of a line, so the tag is written again.
    return _BARE_RETURN.sub(lambda _: b"\r" + tag, data) if tag else data
