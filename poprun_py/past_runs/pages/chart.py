"""A chart as a value: how charts are made, charts.py; how they are shown, page_frame.py.

Nothing else is here, since a page without charts shall cost nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        title: what is seen, in a few words.
        told: one sentence with the numbers, for who does not see it; it stands below the title.
        figure: of plotly: ``data`` and ``layout``; JSON without NaN or infinities.
        height: in pixels.
    """

    title: str
    told: str
    figure: Mapping[str, Any]
    height: int = 320
