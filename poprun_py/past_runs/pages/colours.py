"""The colours of charts, for light and dark screens.

People who see no red, no green or no blue can tell the six colours apart. Their contrast with the
page is at least 3. ``test_colours.py`` computes both.
"""

from __future__ import annotations

from typing import Final

_SERIES: Final = (
    ("#0056b4", "#68adff"),  # blue
    ("#e56713", "#ff8f4d"),  # orange
    ("#0f8f6b", "#3fd6a8"),  # green
    ("#c34993", "#e283c0"),  # pink
    ("#ab8946", "#fade63"),  # sand
    ("#8a78e8", "#7582fa"),  # violet
)
NUM_COLOURS: Final = len(_SERIES)
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
# Of everything in a chart but its series, by its use.
_OTHERS: Final = {
    "text": ("#475569", "#cbd5e1"),
    "grid": ("#e2e8f1", "#2c3a50"),
    "axis": ("#94a3b8", "#64748b"),
    "neutral": ("#7a8699", "#8d9bb0"),
    "ground": ("#fefefe", "#172033"),
    "alert": ("#c81e1e", "#ff7b7b"),
}


def _faint(colour: str) -> str:
    """Return a colour (``#rrggbb``) that lets most of the ground through."""
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},0.14)"


#: The colours of charts as values, by use; a page in the dark shows those of ``DARK``.
LIGHT: Final = {name: light for name, (light, _) in _OTHERS.items()}
NEUTRAL: Final = LIGHT["neutral"]
#: The colour in the dark of each colour in the light.
DARK: Final = {
    **dict((*_SERIES, *_OTHERS.values())),
    **{_faint(light): _faint(dark) for light, dark in _SERIES},
}


def series_colour(index: int) -> str:
    """Return the colour of series ``index``: that of an instance in every chart."""
    return _SERIES[index % len(_SERIES)][0]


def faint_colour(index: int) -> str:
    """Return the colour of areas of series ``index``, which may lie over one another."""
    return _faint(series_colour(index))


def dash(index: int) -> str:
    """Return how the line of series ``index`` is dashed: series of one colour differ in it."""
    return _DASHES[index // len(_SERIES) % len(_DASHES)]
