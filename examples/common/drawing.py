"""Figures of the examples, with one style and reproducible files.

The texts in an SVG file are stored as text, not as outlines. ``mark`` gives an id to a part of a
figure. Tests can therefore find texts and parts in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.figure import Figure

__all__ = ["COLOURS", "GRID", "MEASURED", "MODELLED", "NEUTRAL", "mark", "new_figure", "save"]

#: The colours of the launcher's charts, which colour-blind people can distinguish.
COLOURS: Sequence[str] = ("#0056b4", "#e56713", "#0f8f6b", "#c34993", "#ab8946", "#8a78e8")
MEASURED, MODELLED = COLOURS[0], COLOURS[1]
NEUTRAL, GRID = "#7a8699", "#e2e8f1"
mpl.rcParams.update({
    "svg.fonttype": "none",
    "svg.hashsalt": "poprun-py",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": NEUTRAL,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": GRID,
    "text.color": "#1e293b",
    "figure.facecolor": "#fefefe",  # readable on a dark page too
})  # fmt: skip


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of ``width`` by ``height`` inches in the common style."""
    return Figure(figsize=(width, height), layout="constrained")


def mark(artist: Artist, name: str) -> Artist:
    """Set the id of an artist's element in an SVG, and return the artist."""
    artist.set_gid(name)
    return artist


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a .svg, .png or .pdf file. The file does not contain the current date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
    figure.savefig(path, metadata=metadata)
