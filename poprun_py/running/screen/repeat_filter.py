"""Filter that shows a traceback only once if several instances write it within a second.

The first traceback of a failure is shown as it arrives. Later tracebacks are held for at most a
second, until they are complete, and then compared with the tracebacks that were shown. All other
output is shown immediately. The size of the held output is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

# If a traceback begins more than this many seconds after the first traceback of a failure, it
# belongs to another failure.
_TOGETHER_SECONDS = 1.0
_HELD_SECONDS = 1.0
_MOST_OF_ONE, _MOST_HELD = 1 << 16, 1 << 22
_MOST_DIFFERENT = 8

Show = Callable[[int, bytes], None]
Tell = Callable[[tuple[int, ...], int], None]


# This class is not a dataclass, because creating a dataclass would delay the start of every job.
class _TracebackOutput:
    """The output of an instance since the beginning of a traceback."""

    def __init__(self, index: int, host: str, pid: int, began: float) -> None:
        self.index = index
        self.began = began
        self.data = bytearray()
        self._writer = (index, host, pid)
        self._lines: list[str] = []
        self._size_of_lines = 0

    def lines(self) -> list[str]:
        """Return the lines of the output; fixed words replace parts such as process ids."""
        from poprun_py.running.screen.traceback_parsing import normal_line

        if len(self.data) != self._size_of_lines:
            lines = self.data.decode(errors="replace").split("\n")
            self._lines = [normal_line(each, *self._writer) for each in lines]
            self._size_of_lines = len(self.data)
        return self._lines


def _find_traceback(data: bytes) -> int:
    # This quick check avoids the import below for output without a traceback.
    if b"Traceback (most" not in data and b'  File "' not in data:
        return -1
    from poprun_py.running.screen.traceback_parsing import find_traceback

    return find_traceback(data)


class RepeatedTracebacks:
    """Shows the stderr of instances, and replaces repeated tracebacks by one line.

    Args:
        show: A function that shows output of an instance.
        begin: A function that is called when an instance begins to write a traceback.
        tell: A function that tells the user which instances wrote the same traceback as another
            instance, whose traceback was shown.
    """

    def __init__(self, show: Show, begin: Callable[[int], None], tell: Tell) -> None:
        self._show = show
        self._begin = begin
        self._tell = tell
        self._writing: set[int] = set()
        # The state of the current failure: the time when it began, the tracebacks that were shown,
        # the tracebacks that are held, and a map from each instance with a repeated traceback to
        # the instance whose equal traceback was shown.
        self._began = 0.0
        self._shown: dict[int, _TracebackOutput] = {}
        self._held: dict[int, _TracebackOutput] = {}
        self._size_held = 0
        self._repeated: dict[int, int] = {}

    def joined(self, index: int) -> None:
        """Add an instance, which may write output from now on."""
        self._writing.add(index)

    def ended(self, index: int) -> None:
        """Remove an instance that has ended; after the last instance, show all held output."""
        self._writing.discard(index)
        if not self._writing:
            self._finish()

    def feed(self, index: int, data: bytes, now: float, *, host: str = "", pid: int = 0) -> None:
        """Process output that an instance wrote to stderr.

        Tracebacks that differ only in the instance's host name or process id count as equal.
        """
        self.on_time(now)
        if index in self._held:
            self._hold(self._held[index], data)
            return
        start = -1 if index in self._shown else _find_traceback(data)
        if start < 0:
            self._pass(index, data)
            return
        self._pass(index, data[:start])
        self._begin(index)
        if not self._shown:
            self._began = now
            self._shown[index] = _TracebackOutput(index, host, pid, now)
        elif now < self._began + _TOGETHER_SECONDS:
            self._held[index] = _TracebackOutput(index, host, pid, now)
            self._hold(self._held[index], data[start:])
            return
        self._pass(index, data[start:])

    def on_time(self, now: float) -> None:
        """Show tracebacks that were held for a second, except repetitions of shown tracebacks."""
        for held in list(self._held.values()):
            if now >= held.began + _HELD_SECONDS:
                self._decide(held)
        if self._shown and not self._held and now >= self._began + _TOGETHER_SECONDS:
            self._finish()

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        if not self._shown:
            return float("inf")
        held = (output.began + _HELD_SECONDS for output in self._held.values())
        return min(held, default=self._began + _TOGETHER_SECONDS)

    def _hold(self, held: _TracebackOutput, data: bytes) -> None:
        held.data += data
        self._size_held += len(data)
        if len(held.data) > _MOST_OF_ONE or self._size_held > _MOST_HELD:
            self._decide(held)

    def _pass(self, index: int, data: bytes) -> None:
        """Show output of an instance; if it wrote a repeated traceback, report this first."""
        if not data:
            return
        if index in self._repeated:
            self._tell_repeated(self._repeated[index])
        if (shown := self._shown.get(index)) is not None:
            shown.data += data[: max(0, _MOST_OF_ONE - len(shown.data))]
        self._show(index, data)

    def _decide(self, held: _TracebackOutput) -> None:
        """Show a held traceback, unless an equal traceback of another instance was shown."""
        from poprun_py.running.screen.traceback_parsing import equal_lines

        index, data = held.index, bytes(held.data)
        del self._held[index]
        self._size_held -= len(data)
        for other, shown in self._shown.items():
            if equal := equal_lines(held.lines(), shown.lines()):
                self._repeated[index] = other
                self._pass(index, b"".join(data.split(b"\n", equal)[equal:]))
                return
        if len(self._shown) < _MOST_DIFFERENT:
            self._shown[index] = held
            held.data = bytearray()
        self._pass(index, data)

    def _tell_repeated(self, shown: int) -> None:
        members = tuple(sorted(index for index, other in self._repeated.items() if other == shown))
        for index in members:
            del self._repeated[index]
        self._tell(members, shown)

    def _finish(self) -> None:
        for held in list(self._held.values()):
            self._decide(held)
        while self._repeated:
            self._tell_repeated(next(iter(self._repeated.values())))
        self._shown.clear()
