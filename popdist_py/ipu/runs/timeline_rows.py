"""Spans that show the activities of IPUs during a call of a model, as rows of a timeline.

The beginning and the end of a span are shares of the call's duration, because only the host
measures the duration. The module ``timeline_rows`` does not write to the timeline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from popdist_py.errors import plural
from popdist_py.ipu.accumulation_window import Piece, Window

__all__ = ["MOST_PIECES", "ShownPiece", "call_pieces"]

# The largest number of spans of one call in the timeline. If the IPUs have more activities, one
# span shows all micro-batches of an IPU between two weight updates. If these spans are still too
# many, the timeline shows one span for each IPU.
MOST_PIECES: Final = 200
# The names of an IPU's activities (such as "reduce") that belong to a weight update.
_OF_UPDATE: Final = ("reduce", "update")


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """One span of an IPU's row in the timeline, during one call of a model.

    Attributes:
        row: The name of the timeline's row, such as "IPU 0".
        name: The name of the span, such as "forward".
        begin: The start of the span, as a share of the call's duration.
        end: The end of the span, as a share of the call's duration.
        arguments: A JSON text with the numbers of the micro-batch and the stage, or an empty text.
    """

    row: str
    name: str
    begin: float
    end: float
    arguments: str = ""


def call_pieces(window: Window) -> tuple[ShownPiece, ...]:
    """Return the spans that show the activities of the IPUs during one call of a model.

    The returned tuple contains at most ``MOST_PIECES`` spans, or one span for each IPU.

    Args:
        window: The activities of the IPUs from one weight update to the next. A call of the model
            with several weight updates repeats the activities in ``window`` for each update.
    """
    if window.num_pieces * window.count <= MOST_PIECES:
        return _of_every_window(window.pieces(), window)
    outermost = window.outermost_pieces()
    by_stages = _by_stages(outermost)
    if len(by_stages) * window.count <= MOST_PIECES:
        return _of_every_window(by_stages, window)
    total = window.count * window.cycles
    rest = total - window.cycles
    whole = _joined(outermost)
    return tuple(_shown(replace(piece, end=piece.end + rest), total) for piece in whole)


def _of_every_window(pieces: Sequence[Piece], window: Window) -> tuple[ShownPiece, ...]:
    """Return the spans of a call that repeats ``pieces`` for each of its weight updates."""
    starts = [number * window.cycles for number in range(window.count)]
    moved = (
        replace(piece, begin=piece.begin + start, end=piece.end + start)
        for start in starts
        for piece in pieces
    )
    return tuple(_shown(piece, window.count * window.cycles) for piece in moved)


def _by_stages(pieces: Sequence[Piece]) -> list[Piece]:
    """Return fewer activities, with one activity per IPU between two weight updates.

    The activities of a weight update are not merged with other activities. One returned activity
    replaces all activities of an IPU between two weight updates.
    """
    found: list[Piece] = []
    for is_update, some in groupby(pieces, key=lambda piece: piece.name in _OF_UPDATE):
        members = list(some)
        found += members if is_update else _joined(members)
    return found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return one activity for each IPU, which is named after the stages of the IPU."""
    found = []
    for ipu, some in groupby(pieces, key=lambda piece: piece.ipu):
        own = list(some)
        stages = sorted({piece.stage for piece in own if piece.stage is not None})
        name = f"{plural('stage', len(stages))} {', '.join(map(str, stages))}"
        found.append(Piece(ipu, name, own[0].begin, own[-1].end))
    return found


def _shown(piece: Piece, total: float) -> ShownPiece:
    about = {"micro-batch": piece.micro_batch, "stage": piece.stage}
    known = {name: value for name, value in about.items() if value is not None}
    return ShownPiece(
        row=f"IPU {piece.ipu}",
        name=piece.name,
        begin=piece.begin / total,
        end=min(piece.end / total, 1.0),
        arguments=json.dumps(known) if known else "",
    )
