"""The colours of charts on light pages, and the colours that replace them on dark screens."""

from __future__ import annotations

from typing import Final

# Pairs of a colour for light pages and a colour for dark pages. People with any colour blindness
# can tell the six colours apart, and each has a contrast of at least 3 with the page.
# test_chart_colours.py checks both facts.
_SERIES_COLOURS: Final = (
    ("#0056b4", "#68adff"),  # blue
    ("#e56713", "#ff8f4d"),  # orange
    ("#0f8f6b", "#3fd6a8"),  # green
    ("#c34993", "#e283c0"),  # pink
    ("#ab8946", "#fade63"),  # sand
    ("#8a78e8", "#7582fa"),  # violet
)
NUM_COLOURS: Final = len(_SERIES_COLOURS)
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_OTHER_COLOURS: Final = {
    "text": ("#475569", "#cbd5e1"),
    "grid": ("#e2e8f1", "#2c3a50"),
    "axis": ("#94a3b8", "#64748b"),
    "neutral": ("#7a8699", "#8d9bb0"),
    "ground": ("#fefefe", "#172033"),
    "alert": ("#c81e1e", "#ff7b7b"),
}


def _faint(colour: str) -> str:
    """Return a colour (``#rrggbb``) with an opacity of 14 %, in CSS notation."""
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},0.14)"


#: Maps each part of a chart except its series, such as "grid", to its colour on light pages.
LIGHT: Final = {name: light for name, (light, _) in _OTHER_COLOURS.items()}
NEUTRAL: Final = LIGHT["neutral"]
#: Maps each colour for light pages to the colour that replaces it on dark pages.
DARK: Final = {
    **dict((*_SERIES_COLOURS, *_OTHER_COLOURS.values())),
    **{_faint(light): _faint(dark) for light, dark in _SERIES_COLOURS},
}


def series_colour(index: int) -> str:
    """Return the colour of series ``index``; an instance has the same colour in every chart."""
    return _SERIES_COLOURS[index % NUM_COLOURS][0]


def faint_colour(index: int) -> str:
    """Return the fill colour of series ``index``, translucent because areas may overlap."""
    return _faint(series_colour(index))


def dash(index: int) -> str:
    """Return the dash pattern of series ``index``. Series of the same colour differ in pattern."""
    return _DASHES[index // NUM_COLOURS % len(_DASHES)]
