"""Rows of the timeline that show the activities of the emulated IPUs during a call.

The host measures the start and the end of a call. The model of the device gives the share of this
time that each activity takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from popdist_py.errors import plural
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.call_times import Piece, Window, window
from popdist_py.poptorch.options.options import Options
from popdist_py.timeline import spans

__all__ = ["MOST_PIECES", "IpuRows", "ShownPiece", "call_pieces"]

# The largest number of spans of one call. If a schedule has more activities, one span shows all
# micro-batches of an IPU between two updates. If those spans are still too many, one span is
# drawn for each IPU.
MOST_PIECES: Final = 200
# The timeline shows the first calls, and later the calls whose training step is a multiple of 8.
# When a timeline file is full, the spans of these steps are kept longer than other spans.
_FIRST_CALLS: Final = 8
_EVERY: Final = 8
# The names of the activities that belong to a weight update.
_OF_UPDATE: Final = ("reduce", "update")


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """One span of a call.

    Attributes:
        row: The name of the row in the timeline.
        name: The name of the span.
        begin: The start of the span, as a share of the call's duration.
        end: The end of the span, as a share of the call's duration.
        arguments: A JSON text with the micro-batch and the stage, or an empty text.
    """

    row: str
    name: str
    begin: float
    end: float
    arguments: str = ""


class IpuRows:
    """Writes the calls of one compiled model to the timeline.

    Args:
        run: The input of the device model, which computes the activities at the first call.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls = 0
        self._pieces: tuple[ShownPiece, ...] | None = None

    @classmethod
    def of(cls, run: Run | None, options: Options) -> IpuRows | None:
        """Return an object that writes a run's calls to the timeline.

        The function returns None without a named device or a captured model.
        """
        return None if run is None or options.Emulator.device_named is None else cls(run)

    def draw(self, begin: int, end: int, step: int | None) -> None:
        """Write a call to the timeline, if a timeline is recorded.

        Only the first calls are written, and later the calls whose training step is a multiple of
        8.

        Args:
            begin: The start of the call, in nanoseconds of the monotonic clock.
            end: The end of the call, in nanoseconds of the monotonic clock.
            step: The number of training steps after this call, or None for inference.
        """
        if not spans.is_recording():
            return
        self._calls += 1
        if self._calls > _FIRST_CALLS and (self._calls if step is None else step) % _EVERY:
            return
        if self._pieces is None:
            self._pieces = self._laid_out()
        length = end - begin
        for piece in self._pieces:
            first, last = begin + int(piece.begin * length), begin + int(piece.end * length)
            spans.add(piece.row, piece.name, first, last, piece.arguments)

    def _laid_out(self) -> tuple[ShownPiece, ...]:
        try:
            return call_pieces(window(self._run))
        except Exception:  # The program can continue without these rows.
            logger.debug("The timeline has no rows of the IPUs", exc_info=True)
            return ()


def call_pieces(of: Window) -> tuple[ShownPiece, ...]:
    """Return the spans of a call.

    The result contains at most MOST_PIECES spans, or one span for each IPU.

    Args:
        of: The activities of the IPUs in one window. A call may repeat the window several times.
    """
    total = of.count * of.cycles
    for pieces in (of.pieces, _by_stages(of.pieces)):
        if len(pieces) * of.count <= MOST_PIECES:
            moved = (
                replace(
                    piece,
                    begin=piece.begin + number * of.cycles,
                    end=piece.end + number * of.cycles,
                )
                for number in range(of.count)
                for piece in pieces
            )
            return tuple(_shown(piece, total) for piece in moved)
    rest = total - of.cycles
    whole = _joined(of.pieces)
    return tuple(_shown(replace(piece, end=piece.end + rest), total) for piece in whole)


def _by_stages(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the updates, and one piece for all micro-batches of an IPU between two updates."""
    found: list[Piece] = []
    for is_update, some in groupby(pieces, key=lambda piece: piece.name in _OF_UPDATE):
        members = list(some)
        found += members if is_update else _joined(members)
    return found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return one piece for each IPU, with the stages of the IPU as its name."""
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
