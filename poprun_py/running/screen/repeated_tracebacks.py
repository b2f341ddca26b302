"""One failure, shown once: equal tracebacks that several instances write within a second.

The first is shown as it comes. Of those that follow, each is held until it is complete, for a
second at most, and compared: the same one is told in a line, any other is shown. Everything else
that is written passes at once. Bytes in, bytes out, the clock is an argument; memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

# A traceback that begins later than this after the first is shown as another failure.
_TOGETHER_SECONDS = 1.0
_HELD_SECONDS = 1.0
_MOST_OF_ONE, _MOST_HELD = 1 << 16, 1 << 22
_MOST_DIFFERENT = 8

Show = Callable[[int, bytes], None]
Tell = Callable[[tuple[int, ...], int], None]


class _Block:
    """What an instance wrote from the beginning of a traceback on."""

    __slots__ = ("_lines", "_size_of_lines", "_writer", "began", "data", "index")

    def __init__(self, index: int, host: str, pid: int, began: float) -> None:
        self.index = index
        self.began = began
        self.data = bytearray()
        self._writer = (index, host, pid)
        self._lines: list[str] = []
        self._size_of_lines = 0

    def lines(self) -> list[str]:
        """Return its lines in their normal form."""
        from poprun_py.running.screen.tracebacks import normal_line

        if len(self.data) != self._size_of_lines:
            text = self.data.decode(errors="replace")
            self._lines = [normal_line(line, *self._writer) for line in text.split("\n")]
            self._size_of_lines = len(self.data)
        return self._lines


def _find_traceback(data: bytes) -> int:
    """Return where a traceback begins in what an instance wrote; -1 for nowhere."""
    # Nearly always there is none: nothing is searched for, nor imported.
    if b"Traceback (most" not in data and b'  File "' not in data:
        return -1
    from poprun_py.running.screen.tracebacks import find_traceback

    return find_traceback(data)


class RepeatedTracebacks:
    """Passes on what instances write to stderr, and tells of equal tracebacks once.

    Args:
        show: takes an instance and what is to be shown of it.
        begin: takes an instance that begins a traceback, after what it wrote before was shown.
        tell: takes instances, and the one whose traceback, which was shown, they wrote as well.
    """

    def __init__(self, show: Show, begin: Callable[[int], None], tell: Tell) -> None:
        self._show = show
        self._begin = begin
        self._tell = tell
        self._writing: set[int] = set()
        self._began = 0.0
        self._size_held = 0
        # Of the failure that is under way: the tracebacks that were shown, those that are held,
        # and who wrote the same one as whom and has not been told of.
        self._shown: dict[int, _Block] = {}
        self._held: dict[int, _Block] = {}
        self._same: dict[int, int] = {}

    def joined(self, index: int) -> None:
        """An instance begins to write."""
        self._writing.add(index)

    def ended(self, index: int) -> None:
        """An instance has written all; after the last one nothing is held."""
        self._writing.discard(index)
        if not self._writing:
            self._finish()

    def feed(self, index: int, data: bytes, now: float, *, host: str = "", pid: int = 0) -> None:
        """Take what an instance wrote, whose own name of its host and process id differ."""
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
            self._shown[index] = _Block(index, host, pid, now)
        elif now < self._began + _TOGETHER_SECONDS:
            self._held[index] = _Block(index, host, pid, now)
            self._hold(self._held[index], data[start:])
            return
        self._pass(index, data[start:])

    def on_time(self, now: float) -> None:
        """Decide what has been held for long enough."""
        for held in list(self._held.values()):
            if now >= held.began + _HELD_SECONDS:
                self._decide(held)
        if self._shown and not self._held and now >= self._began + _TOGETHER_SECONDS:
            self._finish()

    def next_deadline(self) -> float:
        """Return when something is to be decided; inf for never."""
        if not self._shown:
            return float("inf")
        held = (block.began + _HELD_SECONDS for block in self._held.values())
        return min(held, default=self._began + _TOGETHER_SECONDS)

    def _hold(self, held: _Block, data: bytes) -> None:
        """Keep more of a traceback; what is too much is decided at once."""
        held.data += data
        self._size_held += len(data)
        if len(held.data) > _MOST_OF_ONE or self._size_held > _MOST_HELD:
            self._decide(held)

    def _pass(self, index: int, data: bytes) -> None:
        """Show what an instance wrote, after what was to be told of it."""
        if not data:
            return
        if index in self._same:
            self._tell_of(self._same[index])
        if (shown := self._shown.get(index)) is not None:
            shown.data += data[: max(0, _MOST_OF_ONE - len(shown.data))]
        self._show(index, data)

    def _decide(self, held: _Block) -> None:
        """Show a traceback that is held, or note that it is one that was shown."""
        from poprun_py.running.screen.tracebacks import equal_lines

        index, data = held.index, bytes(held.data)
        del self._held[index]
        self._size_held -= len(data)
        for other, shown in self._shown.items():
            if equal := equal_lines(held.lines(), shown.lines()):
                self._same[index] = other
                self._pass(index, b"".join(data.split(b"\n", equal)[equal:]))
                return
        if len(self._shown) < _MOST_DIFFERENT:
            self._shown[index] = held
            held.data = bytearray()
        self._pass(index, data)

    def _tell_of(self, shown: int) -> None:
        members = tuple(sorted(index for index, other in self._same.items() if other == shown))
        for index in members:
            del self._same[index]
        self._tell(members, shown)

    def _finish(self) -> None:
        """The failure is over: nothing of it is held or untold."""
        for held in list(self._held.values()):
            self._decide(held)
        while self._same:
            self._tell_of(next(iter(self._same.values())))
        self._shown.clear()
