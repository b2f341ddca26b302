"""The emulated IPUs as rows of the timeline: a schedule laid into the measured time of a call.

What is drawn are the proportions that the model of the device gives; when a call began and ended
was measured on the host. Nothing here measures, or computes what takes how long.
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

# Of a call; a schedule with more is drawn by stages, and by IPUs if these are too many as well.
MOST_PIECES: Final = 200
# The first calls are drawn, and later every eighth: of the steps that a full file keeps longest.
_FIRST_CALLS: Final = 8
_EVERY: Final = 8
# What separates one update from the next.
_OF_UPDATE: Final = ("reduce", "update")


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """One span of a call: its row, name and arguments, and its ends as shares of the call."""

    row: str
    name: str
    begin: float
    end: float
    arguments: str = ""


class IpuRows:
    """Draws the calls of one compiled model.

    Args:
        run: what the model of the device is asked about, when the first call is drawn.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls = 0
        self._pieces: tuple[ShownPiece, ...] | None = None

    @classmethod
    def of(cls, run: Run | None, options: Options) -> IpuRows | None:
        """Return what draws the calls of a run; None where no device is named."""
        return None if run is None or options.Emulator.device_named is None else cls(run)

    def draw(self, begin: int, end: int, step: int | None) -> None:
        """Draw a call, if a timeline is recorded and the call is one of those that are drawn.

        Args:
            begin: nanoseconds of the monotonic clock.
            end: the same.
            step: how many training steps are done with it; None for a call that trains nothing.
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
        except Exception:  # no program ends because of what cannot be drawn
            logger.debug("The timeline has no rows of the IPUs", exc_info=True)
            return ()


def call_pieces(of: Window) -> tuple[ShownPiece, ...]:
    """Return what is drawn of a call: at most MOST_PIECES, or one for each IPU.

    Args:
        of: what the IPUs do in a window, of which the call may have several.
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
    """Return pieces that are all micro-batches of an IPU together, and its updates."""
    found: list[Piece] = []
    for is_update, some in groupby(pieces, key=lambda piece: piece.name in _OF_UPDATE):
        members = list(some)
        found += members if is_update else _joined(members)
    return found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return one piece for each IPU, named by the stages that it has."""
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
