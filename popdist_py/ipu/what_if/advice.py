"""The explanation why a model does not fit into memory, and advice with the bytes saved.

To compute the bytes that a change saves, the module ``advice`` estimates the memory of a run with
the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import ceil, log2
from typing import Final

from popdist_py.ipu.memory import ipu_fits
from popdist_py.ipu.memory_contents import UNCERTAINTY, IpuMemory
from popdist_py.ipu.searches.division_costs import Effort, shared_weights
from popdist_py.ipu.searches.fewest_ipus import divided
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.searches.search_answers import beginnings
from popdist_py.ipu.searches.splits import with_micro_batches
from popdist_py.ipu.what_if.changes import Kind, changes, other_splits

__all__ = ["INCOMPLETE", "Advice", "Kind", "OutOfMemory", "explain"]

# The sentence of a report whose advice does not compare everything.
INCOMPLETE: Final = (
    "Some changes, splits and numbers of IPUs were not compared, because the model is large"
)
# The kinds of changes that make another model, and that are not combined with other changes.
_OTHER_MODELS: Final = ("identical parts", "no state")
# A smaller relative difference in samples per second is called "equally fast".
_SAME_SPEED: Final = 0.0005
# The number of tries to find a larger number of IPUs on which the model fits.
_MORE_COUNTS: Final = 3
# The largest number of operations whose memory the searches for splits estimate. It bounds the time
# of advice for every model.
_EFFORT: Final = 30_000
# In very large models, the number of changes times the number of operations is at most
# ``_MOST_ESTIMATES``, but at least ``_LEAST_CHANGES`` changes are estimated.
_MOST_ESTIMATES: Final = 80_000
_LEAST_CHANGES: Final = 4


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the model or its options that saves memory.

    Attributes:
        change: A text that describes the change of the model or its options for the user.
        saved: The bytes that the change saves on the fullest IPU. The fullest IPU after the change
            may be another IPU than before the change.
        fits: Whether the model gets the verdict "fits" (not "close") if only this change is made.
        kind: A fixed word for the kind of the change, which programs can compare.
        how: The PopTorch call or option with which the user makes the change. By default, ``how``
            is an empty text. The module ``poptorch_advice`` sets ``how``.
        slower: The share by which the samples per second fall with the change. If the samples per
            second rise, ``slower`` is negative.
    """

    change: str
    saved: int
    fits: bool
    kind: Kind
    how: str = ""
    slower: float = 0.0

    @property
    def time(self) -> str:
        """A text that says by how much the change makes the run slower or faster."""
        if abs(self.slower) < _SAME_SPEED:
            return "equally fast"
        return f"{abs(self.slower):.1%} {'slower' if self.slower > 0 else 'faster'}"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The explanation why a model does not fit into memory, or is close to the limit.

    Attributes:
        memory: The data and code in the memory of the IPU that contains the fullest tile.
        advice: The changes of the model or its options that would save memory. The change that
            costs the least time for each saved byte comes first. The advice to share weights
            between identical submodules comes last.
        together: Changes that together make the model fit. The memory and the time of each of them
            are compared with the run after the changes before it. ``together`` is empty if the
            changes are not enough.
        more_ipus: A text with a larger number of IPUs on which the model fits, and with the IPUs'
            first operations. If the longer pipeline needs more micro-batches, the text says how
            many. ``more_ipus`` may be empty.
        is_complete: Whether all changes, splits and numbers of IPUs were compared. In very large
            models, that would take too long.
    """

    memory: IpuMemory
    advice: tuple[Advice, ...]
    together: tuple[Advice, ...] = ()
    more_ipus: str = ""
    is_complete: bool = True

    def __str__(self) -> str:
        own = self.memory
        lines = [
            self._first_line(),
            f"All tiles of IPU {own.ipu} need {own.needed:,} of {own.capacity:,} bytes, with the "
            f"peak at {own.peak_at}.",
            "Largest contributions:",
            *(f"  {_megabytes(p.bytes)}  {p.category}: {p.name}" for p in own.largest()),
        ]
        if self.advice:
            lines.append("Changes that would save memory, each alone:")
        for advice in self.advice:
            fits = ", then the model fits" if advice.fits else ""
            lines.append(f"  {_saved(advice)}  {advice.change}{fits}")
            if advice.how:
                lines.append(f"      {advice.how}")
        if self.together:
            lines.append("Changes that together make the model fit:")
            lines += [f"  {_saved(advice)}  {advice.change}" for advice in self.together]
        if self.more_ipus:
            lines.append(f"The model also fits on {self.more_ipus}")
        if not self.is_complete:
            lines.append(INCOMPLETE)
        return "\n".join(lines)

    def _first_line(self) -> str:
        own = self.memory
        sort, used = "tile", own.fullest_tile
        if own.fullest_io_tile > used:
            sort, used = "I/O tile", own.fullest_io_tile
        if own.verdict == "close":
            return (
                f"Close to the limit on IPU {own.ipu}: the fullest {sort} uses {used:,} of "
                f"{own.tile_bytes:,} bytes ({own.share:.1%} +- {UNCERTAINTY:.0%})."
            )
        return (
            f"Out of memory on IPU {own.ipu}: {used:,} bytes used on the fullest {sort} but tiles "
            f"only have {own.tile_bytes:,}."
        )


def explain(run: Run) -> OutOfMemory | None:
    """Return the reason why a model does not fit into memory, with advice; None if it fits.

    A model that is close to the limit gets advice too, because it may not fit.
    """
    own = run.fullest
    if own.fits:
        return None
    speed = run.throughput
    effort = Effort(_EFFORT)
    most = max(_LEAST_CHANGES, _MOST_ESTIMATES // len(run.graph.operations))
    batch = _smaller_batch(run, own)
    remaining = changes(run, batch)
    changed = chain(islice(remaining, most), other_splits(run, effort))
    found = [one for change in changed if (one := _advised(own, speed, *change)) is not None]
    ordered = tuple(sorted(found, key=_cost))
    together = _together(run, own, [one for one in ordered if one.kind != "splits"], batch)
    more_ipus = _on_more_ipus(run, effort)
    is_complete = next(remaining, None) is None and not effort.is_spent
    return OutOfMemory(own, ordered, together, more_ipus, is_complete)


def _smaller_batch(run: Run, own: IpuMemory) -> int:
    """Return the number of samples of a smaller micro-batch, which may fit.

    The micro-batch is halved at least once, and as often as the memory of the fullest tile would
    have to be halved. A part of the memory does not depend on the micro-batch, so a micro-batch
    that is far too large is halved up to twice more.
    """
    halvings = max(1, ceil(log2(own.share)))
    first = max(1, run.graph.batch >> halvings)
    smaller = (first, first // 2, first // 4) if halvings > 1 else (first,)
    for batch in filter(None, smaller):
        if _fits(replace(run, graph=run.graph.with_batch(batch)), own.ipu):
            return batch
    return first


def _advised(own: IpuMemory, speed: float, kind: Kind, change: str, other: Run) -> Advice | None:
    """Return a change as advice, or None if the change does not help.

    Args:
        own: The fullest IPU's memory before the change.
        speed: The samples per second before the change.
        kind: The kind of the change.
        change: A text that describes the change.
        other: The changed run.
    """
    after = other.fullest
    # More I/O tiles leave fewer tiles for the model. The code then needs fewer bytes in total, but
    # the fullest tile may need more.
    helps = after.needed < own.needed and after.share <= own.share
    if not helps and not after.fits:
        return None
    saved = max(0, own.needed - after.needed)
    return Advice(change, saved, after.fits, kind, slower=1 - other.throughput / speed)


def _cost(advice: Advice) -> tuple[bool, float, int]:
    """Return a key that sorts advice by the time that it costs for each saved byte.

    The advice to share weights between identical submodules comes last, because shared weights
    change what the model can learn.
    """
    cost = max(0.0, round(advice.slower, 3)) / max(1, advice.saved)
    return advice.kind == "identical parts", cost, -advice.saved


def _together(
    run: Run, own: IpuMemory, ordered: Sequence[Advice], batch: int
) -> tuple[Advice, ...]:
    """Return changes that together make a model fit, in the order in which they are made.

    The changes that cost the least time for each saved byte are added first. Changes that are not
    necessary are then left out. The returned tuple is empty if all changes are not enough.
    """
    kinds: list[Kind] = []
    for advice in (one for one in ordered if one.kind not in _OTHER_MODELS):
        kinds.append(advice.kind)
        if _fits(_after(run, kinds, batch), own.ipu):
            break
    else:
        return ()
    for kind in kinds[:-1]:
        rest = [other for other in kinds if other != kind]
        if _fits(_after(run, rest, batch), own.ipu):
            kinds = rest
    steps: list[Advice] = []
    for kind in kinds:
        text, after = next((t, other) for k, t, other in changes(run, batch) if k == kind)
        own, speed = run.fullest, run.throughput
        saved, slower = max(0, own.needed - after.fullest.needed), 1 - after.throughput / speed
        steps.append(Advice(text, saved, after.fullest.fits, kind, slower=slower))
        run = after
    return tuple(steps)


def _fits(run: Run, first: int) -> bool:
    """Return whether every IPU has enough memory, where the IPU ``first`` is checked first."""
    numbers = sorted(range(run.placement.num_ipus), key=lambda ipu: ipu != first)
    parts = run.graph, run.placement, run.settings, run.ipu
    return all(ipu_fits(*parts, number, run.estimates) for number in numbers)


def _after(run: Run, kinds: Sequence[Kind], batch: int) -> Run:
    """Return a run after changes of the given kinds, without those that are no longer possible."""
    for kind in kinds:
        run = next((other for k, _, other in changes(run, batch) if k == kind), run)
    return run


def _on_more_ipus(run: Run, effort: Effort) -> str:
    """Return a text with the least larger number of IPUs on which the model fits, or no text."""
    if run.settings.is_phased:
        return ""
    count = 2 ** (run.placement.num_ipus.bit_length())
    for _ in range(_MORE_COUNTS):
        stages = count + 1 if shared_weights(run.graph) else count
        filled = with_micro_batches(run, stages)
        found = divided(filled, count, effort)
        if found is not None and found.fits:
            name = "accumulation" if run.settings.is_training else "device iterations"
            needs = "" if filled is run else f" with {name} of {filled.settings.micro_batches}"
            return f"{count} IPUs{needs}: {beginnings(found)}"
        count *= 2
    return ""


def _saved(advice: Advice) -> str:
    return f"{_megabytes(advice.saved)} less, {advice.time}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
