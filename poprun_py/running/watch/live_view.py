"""The view of --live: a panel below the output of a terminal, elsewhere two lines at times.

Nothing here makes the text of a view, or writes it: job_view.py does, and the screen that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from poprun_py.running.watch.job_view import JobView, headline, table_lines

# Between two lines where there is no terminal; rows of the panel that are no instance.
_LINE_SECONDS, _PANEL_EXTRA_ROWS = 30.0, 5


class Screen(Protocol):
    """Where the view is shown."""

    @property
    def panel_size(self) -> tuple[int, int] | None:
        """Columns and rows of the terminal that has a panel; None without one."""

    def show_panel(self, lines: Sequence[str], /) -> None:
        """Keep these lines below all output; none: take the panel away."""

    def say(self, sentence: str, /) -> None:
        """Write a line between the lines of the instances."""


class LiveView:
    """Shows views of one job.

    Args:
        screen: where.
        has_colour: whether the table has colours.
        is_taken: tells whether something else has the terminal for itself, such as a debugger.
    """

    def __init__(self, screen: Screen, has_colour: bool, is_taken: Callable[[], bool]) -> None:
        self._screen = screen
        self._has_colour = has_colour
        self._is_taken = is_taken
        self._next_line = 0.0

    def show(self, view: JobView, now: float) -> None:
        """Show a view, or take the panel away where it has no room."""
        size = self._screen.panel_size
        if size is not None:
            columns, rows = size
            most_rows = max(1, rows // 2 - _PANEL_EXTRA_ROWS)
            lines = table_lines(
                view, width=columns - 1, most_rows=most_rows, colour=self._has_colour
            )
            is_hidden = self._is_taken() or rows <= len(lines) + 1
            self._screen.show_panel(() if is_hidden else lines)
        elif now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            for line in headline(view):
                self._screen.say(line)
