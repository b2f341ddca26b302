"""Everything that is shown or kept of a run: the two screens, and the folder of --output-dir.

The supervisor hands it the output and asks it when there is room again; it never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from poprun_py.output.run_folder import RunFolder
from poprun_py.output.screen import OutputStream, Screen, Sink, make_stream
from poprun_py.supervision.control_channel import Peer
from poprun_py.supervision.job import Job

__all__ = ["InstanceOutput"]

_IDLE_SECONDS = 0.2
# A reader that takes nothing for so long after everything else has ended is not waited for.
_READER_SECONDS = 2.0
# Between two tries to write to a reader that does not keep up.
_READER_PAUSE_SECONDS = 0.002
_STDOUT, _STDERR = 0, 1
_NAMES = ("stdout", "stderr")


class InstanceOutput:
    """Where the output of all instances goes.

    Args:
        job: says in which form, which instances are shown, and where files are kept.
        descriptors: the launcher's own stdout and stderr.
        write_log: writes a line of the launcher's own log.
    """

    def __init__(
        self, job: Job, descriptors: tuple[int, int], write_log: Callable[[str], None]
    ) -> None:
        self.last_word: int | None = None  # the instance that wrote to stderr last
        self._has_warned = False  # that the files are incomplete
        self._job = job
        self._write_log = write_log
        self._sinks = tuple(Sink(descriptor) for descriptor in descriptors)
        self._screens = tuple(Screen(s.write, is_terminal=s.is_terminal) for s in self._sinks)
        self._files = RunFolder(job.output_dir, len(job.variables))
        self._streams: list[tuple[OutputStream, OutputStream]] = []
        self._written_at = time.monotonic()

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return stdout and stderr of a new instance."""
        self._files.open(index)
        shown = self._job.only_output_from in (None, index)
        colour = not self._job.environ.get("NO_COLOR")
        stdout, stderr = (
            make_stream(
                index,
                name,
                form=self._job.output,
                shown=shown,
                colour=colour and sink.is_terminal,
            )
            for name, sink in zip(_NAMES, self._sinks, strict=True)
        )
        self._streams.append((stdout, stderr))
        return stdout, stderr

    def feed_stdout(self, peer: Peer, data: bytes) -> None:
        """Take what an instance wrote to its stdout."""
        self._files.write(peer.index, _NAMES[_STDOUT], data)
        self._screens[_STDOUT].feed(peer.stdout, data)

    def feed_stderr(self, peer: Peer, data: bytes) -> None:
        """Take what an instance wrote to its stderr."""
        self._files.write(peer.index, _NAMES[_STDERR], data)
        self._screens[_STDERR].feed(peer.stderr, data)
        if peer.stderr.shown:
            self.last_word = peer.index

    def finish(self, peer: Peer) -> None:
        """An instance has ended: end its unfinished lines."""
        self._screens[_STDOUT].finish(peer.stdout)
        self._screens[_STDERR].finish(peer.stderr)

    def log(self, line: str) -> None:
        """Write a line of the launcher's own log between the lines of the instances."""
        self._screens[_STDERR].interrupt()
        self._sinks[_STDERR].flush(0.1)
        self._write_log(line)

    @property
    def is_full(self) -> bool:
        """Whether the instances have to wait for the reader."""
        return any(sink.is_full for sink in self._sinks)

    @property
    def is_written(self) -> bool:
        """Whether nothing waits for the reader."""
        return not any(sink.pending for sink in self._sinks)

    def on_time(self, now: float, stopped_at: float | None, patience: float = 0.0) -> None:
        """Write what can be written now.

        Args:
            now: the time.
            stopped_at: when the job was stopped, if it was: a reader that takes nothing long after
                that is given up.
            patience: seconds to wait for the reader.
        """
        self._tell_trouble()
        self._written_at = now
        for number, screen in enumerate(self._screens):
            screen.flush_idle([pair[number] for pair in self._streams], now - _IDLE_SECONDS)
        for sink in self._sinks:
            sink.flush(patience)
            last = max(stopped_at or now, sink.moved_at)
            if sink.pending and now > last + self._job.grace_seconds + _READER_SECONDS:
                sink.discard()

    def next_deadline(self) -> float:
        """Return when there is something to write again; inf for never."""
        if not self.is_written:
            return self._written_at + _READER_PAUSE_SECONDS
        is_line_open = any(stream.held for pair in self._streams for stream in pair)
        return self._written_at + _IDLE_SECONDS if is_line_open else float("inf")

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        self._tell_trouble()
        self._sinks[_STDERR].flush(0.1)

    def _tell_trouble(self) -> None:
        """Tell at once, and once, that the files are incomplete."""
        if self._files.trouble and not self._has_warned:
            self._has_warned = True
            self._screens[_STDERR].interrupt()
            self._sinks[_STDERR].write(f"poprun-py: warning: {self._files.trouble}\n".encode())
