"""The explanation why a model does not fit into memory, and advice with the bytes saved.

To compute the bytes that a change saves, the module ``advice`` estimates the memory of a run with
the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from popdist_py.ipu.graph import Type
from popdist_py.ipu.memory_contents import UNCERTAINTY, IpuMemory
from popdist_py.ipu.searches import Run, best_splits, places_to_cut, with_checkpoints
from popdist_py.ipu.settings import SGD, Location
from popdist_py.ipu.what_if.identical_modules import reused

__all__ = ["Advice", "Kind", "OutOfMemory", "explain"]

Kind: TypeAlias = Literal[
    "batch",
    "half inference",
    "half training",
    "recomputation",
    "checkpoints",
    "optimizer off chip",
    "activations off chip",
    "half accumulators",
    "no state",
    "half state",
    "I/O tiles",
    "proportion",
    "half partials",
    "splits",
    "identical parts",
    "profiling",
]

_OFF_CHIP = Location(on_chip=False)
_MOST_IO_TILES = 192


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
    """

    change: str
    saved: int
    fits: bool
    kind: Kind
    how: str = ""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The explanation why a model does not fit into memory, or is close to the limit.

    Attributes:
        memory: The data and code in the memory of the IPU that contains the fullest tile.
        advice: The changes of the model or its options that would save memory, with the largest
            saving first. The advice to share weights between identical submodules comes last.
    """

    memory: IpuMemory
    advice: tuple[Advice, ...]

    def __str__(self) -> str:
        own = self.memory
        lines = [
            self._first_line(),
            f"All tiles: {own.needed:,} bytes needed of {own.capacity:,}, peak at {own.peak_at}.",
            "Largest contributions:",
            *(f"  {_megabytes(p.bytes)}  {p.category}: {p.name}" for p in own.largest()),
        ]
        if self.advice:
            lines.append("What would help, each alone:")
        for advice in self.advice:
            fits = ", then it fits" if advice.fits else ""
            lines.append(f"  {_megabytes(advice.saved)} less  {advice.change}{fits}")
            if advice.how:
                lines.append(f"      {advice.how}")
        return "\n".join(lines)

    def _first_line(self) -> str:
        own = self.memory
        sort, used = "tile", own.fullest_tile
        if own.fullest_io_tile > used:
            sort, used = "I/O tile", own.fullest_io_tile
        if own.verdict == "close":
            return (
                f"Close to the limit on IPU {own.ipu}: {used:,} bytes used on the fullest {sort} "
                f"of {own.tile_bytes:,} ({own.share:.1%} +- {UNCERTAINTY:.0%})."
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
    found = []
    for kind, change, other in _changes(run):
        after = other.fullest
        if after.needed < own.needed or after.fits:
            saved = max(0, own.needed - after.needed)
            found.append(Advice(change, saved, after.fits, kind))
    # The advice to share weights between identical submodules comes last, because shared weights
    # change what the model can learn.
    ordered = sorted(found, key=lambda one: (one.kind == "identical parts", -one.saved))
    return OutOfMemory(own, tuple(ordered))


def _changes(run: Run) -> Iterator[tuple[Kind, str, Run]]:
    """Yield changes of a run that may save memory, in the order of Graphcore's tips."""
    graph, settings = run.graph, run.settings
    if graph.batch > 1:
        batch = graph.batch // 2
        yield (
            "batch",
            f"micro-batches of {batch}, not {graph.batch}",
            replace(run, graph=graph.with_batch(batch)),
        )
    types = {t.type for t in graph.tensors.values()} | {w.type for w in graph.weights}
    if "float32" in types:
        if settings.is_training:
            change = "half precision: all but second moments in float16"
            yield "half training", change, _in_half(run)
        else:
            yield "half inference", "half precision", _in_half(run)
    if settings.is_training:
        yield from _training_changes(run)
    if settings.overlaps_io and 2 * settings.io_tiles <= _MOST_IO_TILES:
        more = replace(settings, io_tiles=2 * settings.io_tiles)
        change = f"{more.io_tiles} I/O tiles, not {settings.io_tiles}"
        yield "I/O tiles", change, replace(run, settings=more)
    lower = replace(settings, memory_proportion=0.1, matmul_proportion=None)
    yield "proportion", "an available memory proportion of 0.1", replace(run, settings=lower)
    if settings.partials != "float16" or settings.matmul_partials == "float32":
        half_sums = replace(settings, partials="float16", matmul_partials=None)
        yield "half partials", "partials in float16", replace(run, settings=half_sums)
    yield from _program_changes(run)
    if settings.is_pipelined and run.placement.num_stages > 1:
        splits = best_splits(run, run.placement.num_ipus, tries_all=False, is_quick=True)
        if splits is not None:
            names = [
                graph.operations[splits.stages.index(stage)].name
                for stage in range(1, splits.num_stages)
            ]
            change = f"stages that begin at {', '.join(names)}"
            yield "splits", change, replace(run, placement=splits)


def _program_changes(run: Run) -> Iterator[tuple[Kind, str, Run]]:
    """Yield changes of the user's program that save memory, such as running without a profile."""
    graph, settings = run.graph, run.settings
    reuse = reused(graph, run.placement)
    if reuse is not None:
        change = f"identical parts reused: {reuse.kept} called {reuse.calls} times, and so on"
        yield "identical parts", change, replace(run, graph=reuse.graph)
    if settings.is_profiled:
        plain = replace(settings, is_profiled=False)
        yield "profiling", "no profiling on the IPU", replace(run, settings=plain)


def _in_half(run: Run) -> Run:
    """Return the configuration in half precision, including optimiser state and accumulators."""
    graph = run.graph.cast(data="float16", weights="float16")
    optimizer = run.settings.optimizer
    first: tuple[Type, ...] = ("float16",) if optimizer.state else ()
    optimizer = replace(optimizer, accumulator="float16", state=(*first, *optimizer.state[1:]))
    return replace(run, graph=graph, settings=replace(run.settings, optimizer=optimizer))


def _training_changes(run: Run) -> Iterator[tuple[Kind, str, Run]]:
    settings = run.settings
    optimizer = settings.optimizer
    if settings.recompute_for(run.placement) == "none":
        is_marked = any(operation.is_checkpoint for operation in run.graph.operations)
        again = replace(settings, recompute="stage" if is_marked else "standard")
        yield "recomputation", "recomputation", replace(run, settings=again)
    again = replace(settings, recompute="stage", recomputes_last=True)
    checkpoints = with_checkpoints(run.graph, places_to_cut(run.graph))
    yield (
        "checkpoints",
        "recomputation checkpoints",
        replace(run, graph=checkpoints, settings=again),
    )
    yield (
        "optimizer off chip",
        "optimiser state off the chip",
        replace(run, settings=replace(settings, optimizer_location=_OFF_CHIP)),
    )
    yield (
        "activations off chip",
        "activations off the chip",
        replace(run, settings=replace(settings, activation_location=_OFF_CHIP)),
    )
    if settings.accumulation > 1 and optimizer.accumulator == "float32":
        sums = replace(settings, optimizer=replace(optimizer, accumulator="float16"))
        yield "half accumulators", "gradient accumulators in float16", replace(run, settings=sums)
    if optimizer.state:
        plain = replace(SGD, accumulator=optimizer.accumulator)
        yield (
            "no state",
            "an optimiser without state (SGD)",
            replace(run, settings=replace(settings, optimizer=plain)),
        )
        if "float32" in optimizer.state:
            half: Type = "float16"
            states = replace(optimizer, state=(half,) * len(optimizer.state))
            yield (
                "half state",
                "optimiser state in float16",
                replace(run, settings=replace(settings, optimizer=states)),
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
