"""Changes of a run that may save memory, such as recomputation or half precision.

The module ``changes`` does not estimate the memory of a changed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

from popdist_py.ipu.graph import Type
from popdist_py.ipu.searches.division_costs import Effort
from popdist_py.ipu.searches.places import cheap_places, places_to_cut, with_checkpoints
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.searches.search_answers import beginnings
from popdist_py.ipu.searches.splits import best_splits
from popdist_py.ipu.settings import SGD, Location
from popdist_py.ipu.what_if.identical_modules import reused

__all__ = ["Kind", "changes", "other_splits"]

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


def changes(run: Run, batch: int) -> Iterator[tuple[Kind, str, Run]]:
    """Yield changes of a run that may save memory, in the order of Graphcore's tips.

    Other splits, which need a search, are not among the changes.

    Args:
        run: The run to change.
        batch: The number of samples of a smaller micro-batch. A run whose micro-batches have at
            most as many samples keeps them.
    """
    graph, settings = run.graph, run.settings
    if batch < graph.batch:
        yield (
            "batch",
            f"micro-batches of {batch:,}, not {graph.batch:,}",
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


def other_splits(run: Run, effort: Effort) -> Iterator[tuple[Kind, str, Run]]:
    """Yield the run with another division into stages, if a quick search finds one that fits."""
    if run.settings.is_pipelined and run.placement.num_stages > 1:
        ipus = run.placement.num_ipus
        splits = best_splits(run, ipus, tries_all=False, is_quick=True, effort=effort)
        if splits is not None:
            divided = replace(run, placement=splits)
            yield "splits", f"other splits: {beginnings(divided)}", divided


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
    checkpoints = with_checkpoints(run.graph, places_to_cut(run.graph) or cheap_places(run.graph))
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
