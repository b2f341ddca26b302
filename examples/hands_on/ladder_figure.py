"""The figure of compare.py: a row for each step of the session, a panel for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.drawing import GRID, MEASURED, MODELLED, NEUTRAL, mark, new_figure, save
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

__all__ = ["draw"]

_SESSION = NEUTRAL
_SECOND = "#f3b184"  # a lighter MODELLED, for the second IPU


def draw(rows: Sequence, path: Path) -> None:
    """Draw the rows of compare.py as an .svg, .png or .pdf file."""
    figure = new_figure(13, 1.9 + 0.52 * len(rows))
    panels = figure.subplots(1, 6, sharey=True)
    names = [row.rung.title for row in rows]
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].invert_yaxis()
    for panel in panels:
        panel.grid(axis="x", color=GRID)
        panel.tick_params(length=0)
        panel.margins(x=0.3)

    here, session, cycles, received, memory, busy = panels
    reasons = ["out of memory" if "memory" in row.measured.reason else "failed" for row in rows]
    _bars(
        here,
        [row.measured.rate for row in rows],
        MEASURED,
        "measured-rate",
        "{:,.0f}",
        [reason if row.measured.reason else "–" for row, reason in zip(rows, reasons, strict=True)],
    )
    here.set_title("images/s on this host\ncut to its size")
    _bars(
        session,
        [row.rung.rate for row in rows],
        _SESSION,
        "session-rate",
        "{:,.0f}",
        ["–" if row.rung.fits else "out of memory" for row in rows],
    )
    session.set_title("images/s\nof the session")
    _bars(
        cycles, [row.modelled.cycles / 1e6 for row in rows], MODELLED, "modelled-cycles", "{:,.0f}"
    )
    _dots(cycles, [row.rung.cycles and row.rung.cycles / 1e6 for row in rows], "session-cycles")
    cycles.set_title("million cycles\nof a call")
    _bars(
        received, [row.modelled.received[0] for row in rows], MODELLED, "modelled-received", "{:g}"
    )
    _dots(received, [row.rung.received for row in rows], "session-received")
    received.set_title("MiB from the host\nto IPU 0, a call")
    _pairs(memory, [row.modelled.memory for row in rows], "modelled-memory")
    mark(memory.axvline(100, color="#1e293b", linewidth=1), "all-memory")
    memory.set_title("memory, %\nof the fullest tile")
    _pairs(busy, [row.modelled.busy for row in rows], "modelled-busy")
    busy.set_title("busy share, %\nof each IPU")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _legend() -> list:
    return [
        Patch(color=MEASURED, label="measured here"),
        Patch(color=MODELLED, label="modelled at the session's size (IPU 0)"),
        Patch(color=_SECOND, label="the same (IPU 1)"),
        Line2D([], [], color=_SESSION, marker="D", linestyle="", label="the session's slides"),
    ]


def _bars(
    panel,
    values: Sequence[float | None],
    colour: str,
    name: str,
    form: str,
    gaps: Sequence[str] = (),
) -> None:
    """Draw a bar and its number for each value, and a word for a missing value."""
    heights = range(len(values))
    bars = panel.barh(heights, [value or 0 for value in values], 0.6, color=colour)
    for at, (bar, value) in enumerate(zip(bars, values, strict=True)):
        mark(bar, f"{name}-{at}")
        text = gaps[at] if value is None else form.format(value)
        panel.annotate(
            text, (value or 0, at), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    if not any(values):
        panel.set_xlim(0, 1)


def _dots(panel, values: Sequence[float | None], name: str) -> None:
    """Draw the figures of the session as dots on the bars."""
    known = [(value, at) for at, value in enumerate(values) if value is not None]
    if known:
        dots = panel.scatter(*zip(*known, strict=True), color=_SESSION, marker="D", s=26, zorder=3)
        dots.set_edgecolor("white")
        mark(dots, name)


def _pairs(panel, values: Sequence[Sequence[float]], name: str) -> None:
    """Draw a bar for each IPU, in per cent."""
    for ipu, colour in enumerate((MODELLED, _SECOND)):
        places = [at + 0.3 * ipu - 0.15 for at in range(len(values))]
        shares = [100 * shares[ipu] for shares in values]
        for at, bar in enumerate(panel.barh(places, shares, 0.28, color=colour)):
            mark(bar, f"{name}-{at}-ipu-{ipu}")
        for place, share in zip(places, shares, strict=True):
            panel.annotate(
                f"{share:.0f}", (share, place), (3, 0), textcoords="offset points", va="center",
                fontsize=7,
            )  # fmt: skip
