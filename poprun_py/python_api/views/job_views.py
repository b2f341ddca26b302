"""A running job for people: the table of its instances, as text and with bars in a notebook."""

from __future__ import annotations

from popdist_py.errors import counted
from poprun_py.python_api.views.frame import Cell, framed, heading, note, table, width_of_text
from poprun_py.running.watch.job_view import COLUMNS, JobView, headline, row_of, table_lines

_TEXT_COLUMNS = ("host", "phase")
# Of very many instances those with the longest steps.
_MOST_ROWS = 64


def view_text(view: JobView) -> str:
    """Return what --status prints."""
    return "\n".join(table_lines(view, width=width_of_text()))


def view_html(view: JobView) -> str:
    """Return the table of the instances; the slowest stands out, the bars compare the steps."""
    first = headline(view)[0]
    return framed(heading(first), *view_parts(view), *map(note, view_words(view)))


def view_words(view: JobView) -> list[str]:
    """Return who is slowest and why, where there are several instances."""
    return headline(view)[1:]


def view_parts(view: JobView) -> tuple[str, ...]:
    """Return the table of a view, and what it leaves out."""
    states = view.instances
    if len(states) > _MOST_ROWS:
        longest = sorted(states, key=lambda state: -state.own_seconds)[:_MOST_ROWS]
        states = tuple(sorted(longest, key=lambda state: state.index))
    furthest = max((state.step or 0 for state in view.instances), default=0)
    rows, marked = [], []
    for number, state in enumerate(states):
        cells = dict(zip(COLUMNS, row_of(state), strict=True))
        if view.worst is not None and view.worst.is_slow and state.index == view.worst.instance:
            marked.append(number)
        rows.append(
            [
                Cell(
                    text=text,
                    is_number=name not in _TEXT_COLUMNS,
                    part=(state.step or 0) / furthest if name == "step" and furthest else None,
                )
                for name, text in cells.items()
            ]
        )
    hidden = len(view.instances) - len(states)
    return table(COLUMNS, rows, marked), note(
        f"and {counted(hidden, 'more instance')}" if hidden else ""
    )
