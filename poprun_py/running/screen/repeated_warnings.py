"""Filter that shows a warning only once if several processes of a job write it.

A warning is shown as it arrives. For 10 seconds after that, equal warnings of other instances, and
of other processes of the same instance, are left out, and one line tells which instances wrote
them. Nothing here holds or changes other output. The size of the held output is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poprun_py.running.screen.warning_parsing import Piece

# After this many seconds, a warning that recurs is shown again.
_SHOWN_AGAIN_SECONDS = 10.0
# The seconds between the first left-out warning and the line about left-out warnings.
_TELL_SECONDS = 1.0
# The most seconds for which an incomplete warning is held. Python writes a warning in one piece.
_HELD_SECONDS = 0.1
_MOST_HELD, _MOST_WARNINGS = 1 << 16, 256
# A warning of torch's C++ log begins with the level and the month, or with the level alone.
_TORCH_STARTS = (b"[W0", b"[W1", b"[W ")

Show = Callable[[int, bytes], None]
Tell = Callable[[tuple[int, ...], str], None]


# This class is not a dataclass, because creating a dataclass would delay the start of every job.
class _ShownWarning:
    """A warning that was shown, and the instances whose equal warnings were left out.

    Attributes:
        repeats: The number of warnings that each instance repeated since the last line about them.
        tell_at: The time of the next line about repeated warnings; inf if none were left out.
    """

    def __init__(self, index: int, name: str, now: float) -> None:
        self.index = index
        self.name = name
        self.until = now + _SHOWN_AGAIN_SECONDS
        self.repeats: dict[int, int] = {}
        self.tell_at = float("inf")
        self._first_tell_at: float | None = None

    def repeat(self, index: int, now: float) -> None:
        """Count a warning that was left out."""
        self.repeats[index] = self.repeats.get(index, 0) + 1
        if self._first_tell_at is None:
            self._first_tell_at = now + _TELL_SECONDS
        # A warning of each training step gets one line soon, and another one at the end.
        self.tell_at = self._first_tell_at if now < self._first_tell_at else self.until


def _may_warn(data: bytes) -> bool:
    # This quick check avoids an import and a slow search for output without a warning. A search for
    # one byte is much quicker than a search for several bytes.
    if b"W" not in data:
        return False
    if b"Warning: " in data:
        return True
    return b"[W" in data and any(start in data for start in _TORCH_STARTS)


class RepeatedWarnings:
    """Shows the stderr of instances, and replaces repeated warnings by one line.

    Args:
        show: A function that shows output of an instance.
        tell: A function that gets the indices of instances whose warnings were left out, and a
            sentence about these warnings.
    """

    def __init__(self, show: Show, tell: Tell) -> None:
        self._show = show
        self._tell = tell
        self._writing: set[int] = set()
        self._in_line: set[int] = set()  # the instances whose last shown line is unfinished
        self._held: dict[int, tuple[bytes, float, tuple[int, str, int]]] = {}
        self._shown: dict[str, _ShownWarning] = {}

    def joined(self, index: int) -> None:
        """Add an instance, which may write output from now on."""
        self._writing.add(index)

    def ended(self, index: int, now: float) -> None:
        """Show held output of an instance that has ended; after the last, tell of all repeats."""
        self._writing.discard(index)
        self._release(index, now)
        if not self._writing:
            self._tell_until(float("inf"))

    def feed(self, index: int, data: bytes, now: float, *, host: str = "", pid: int = 0) -> None:
        """Process output that an instance wrote to stderr.

        Warnings that differ only in times, and in the instance's index, host name or process id,
        count as equal.
        """
        if index not in self._held and not _may_warn(data):
            self._pass(index, data)
            return
        held, until, writer = self._held.pop(index, (b"", now + _HELD_SECONDS, (index, host, pid)))
        from poprun_py.running.screen.warning_parsing import Piece, split_warnings

        is_line_start = index not in self._in_line
        pieces, rest = split_warnings(held + data, writer, is_line_start=is_line_start)
        for piece in pieces:
            self._decide(index, piece, now)
        if len(rest) > _MOST_HELD:
            self._decide(index, Piece(rest), now)
        elif rest:
            self._held[index] = rest, now + _HELD_SECONDS if pieces else until, writer

    def on_time(self, now: float) -> None:
        """Show output that was held for too long, and tell of repeated warnings."""
        for index in [index for index, (_, until, _) in self._held.items() if now >= until]:
            self._release(index, now)
        if any(now >= shown.tell_at for shown in self._shown.values()):
            # One line tells of all warnings that the instances repeated at about the same time.
            self._tell_until(now + _TELL_SECONDS / 2)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        held_until = min((until for _, until, _ in self._held.values()), default=float("inf"))
        return min([held_until, *(each.tell_at for each in self._shown.values())])

    def _pass(self, index: int, data: bytes) -> None:
        if not data:
            return
        if data.endswith(b"\n"):
            self._in_line.discard(index)
        else:
            self._in_line.add(index)
        self._show(index, data)

    def _release(self, index: int, now: float) -> None:
        """Show or leave out the held beginning of a warning, which did not continue."""
        if index in self._held:
            from poprun_py.running.screen.warning_parsing import whole_warning

            data, _, writer = self._held.pop(index)
            self._decide(index, whole_warning(data, writer), now)

    def _decide(self, index: int, piece: Piece, now: float) -> None:
        """Show a piece of output, unless it is a warning that was shown a short time ago."""
        if not piece.key:
            self._pass(index, piece.data)
            return
        shown = self._shown.get(piece.key)
        if shown is not None and now < shown.until:
            shown.repeat(index, now)
            return
        if shown is not None or len(self._shown) >= _MOST_WARNINGS:
            self._tell_until(float("inf"))
            oldest = next(iter(self._shown)) if shown is None else piece.key
            del self._shown[oldest]
        self._shown[piece.key] = _ShownWarning(index, piece.name, now)
        self._pass(index, piece.data)

    def _tell_until(self, limit: float) -> None:
        """Tell of the repeated warnings that have to be told at the time ``limit`` or earlier."""
        told: dict[tuple[object, ...], list[_ShownWarning]] = {}
        for each in self._shown.values():
            if each.repeats and each.tell_at <= limit:
                key = (each.index, *sorted(each.repeats.items()))
                told.setdefault(key, []).append(each)
        for alike in told.values():
            first = alike[0]
            members = tuple(sorted(first.repeats))
            self._tell(members, _sentence(first, [each.name for each in alike]))
            for each in alike:
                each.repeats = {}
                each.tell_at = float("inf")


def _sentence(shown: _ShownWarning, names: list[str]) -> str:
    """Return a sentence about the repetitions of a warning, or of several with equal numbers."""
    count = sum(shown.repeats.values())
    is_once_each = count == len(shown.repeats) and shown.index not in shown.repeats
    what = "the same warning" if len(names) == 1 else f"the same {len(names)} warnings"
    which = f" ({names[0]})" if len(names) == 1 else ""
    if set(shown.repeats) == {shown.index}:
        return f"{what} {count} more {'time' if count == 1 else 'times'}{which}"
    times = "" if is_once_each else f", {count} times"
    return f"{what} as instance {shown.index}{times}{which}"
