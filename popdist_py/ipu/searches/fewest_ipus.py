"""The search for the fewest IPUs on which a model fits, with a suitable division and options.

For each number of IPUs, the search combines recomputation, off-chip memory and sharding. The search
keeps the precision and the optimiser of the run, because they change what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Final

from popdist_py.ipu.memory import least_bytes
from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.searches.division_costs import Effort, shared_weights
from popdist_py.ipu.searches.places import cheap_places, with_checkpoints
from popdist_py.ipu.searches.run import LIMITS, Run
from popdist_py.ipu.searches.splits import best_splits, with_micro_batches
from popdist_py.ipu.settings import Recompute, Settings

__all__ = ["MOST_IPUS", "Combination", "divided", "fewest_ipus"]

# The largest number of IPUs of one replica in a search without another limit.
MOST_IPUS: Final = 64
# The largest numbers of IPUs above the least number that the search compares.
_MORE_COUNTS: Final = 2

# The kinds of recomputation that suit a run without a pipeline, with texts for the user.
_KINDS: Final[Mapping[Recompute, str]] = MappingProxyType(
    {
        "norm": "recomputation of normalisations",
        "standard": "recomputation with PopART's checkpoints",
    }
)


@dataclass(frozen=True, slots=True)
class Combination:
    """A number of IPUs on which a model fits, with the changes of the run that make it fit.

    Attributes:
        run: The changed run, divided among the IPUs.
        changes: Texts that describe the changed options of the run.
        verdict: Whether the run fits into memory, or is close to the limit.
        samples_per_second: The samples that all replicas together process in a second.
    """

    run: Run
    changes: tuple[str, ...]
    verdict: Verdict
    samples_per_second: float

    @property
    def ipus(self) -> int:
        """The number of IPUs of one replica."""
        return self.run.placement.num_ipus


def fewest_ipus(run: Run, most: int = MOST_IPUS) -> tuple[Combination, ...]:
    """Return combinations of a number of IPUs and options with which a model fits into memory.

    The first combination uses the fewest IPUs that fit, and is the fastest one on these IPUs. After
    it come slower combinations on the same IPUs, the fastest combination on more IPUs, and
    combinations on fewer IPUs that are close to the limit. If no combination fits, the first one is
    close to the limit. The returned tuple is empty if all combinations need too much memory.

    Args:
        run: The configuration of the run. The placement in ``run`` is not used.
        most: The largest number of IPUs of one replica. The search compares the powers of two up to
            ``most``, because PopTorch only reserves such numbers of IPUs.
    """
    fitting: list[Combination] = []
    close: list[Combination] = []
    counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
    for count in counts:
        found = sorted(_combinations(run, count), key=lambda one: -one.samples_per_second)
        certain = [one for one in found if one.verdict == "fits"]
        close += [one for one in found if one.verdict == "close"][: 0 if certain else 1]
        if certain and not fitting:
            fitting.append(_refined(certain[0]))
            fitting += certain[1:]
        else:
            fitting += certain[:1]
        if len({one.ipus for one in fitting}) > _MORE_COUNTS:
            break
    return (*fitting, *close)


def _combinations(run: Run, count: int) -> Iterator[Combination]:
    """Yield the combinations of options with which a model fits on ``count`` IPUs.

    A combination is left out if fewer changes are enough, because each change costs time.
    """
    options = sorted(_options(run, count), key=lambda option: len(option[0]))
    # For each kind of recomputation, the last combination has all options that save memory, so it
    # needs the least. Which kind of recomputation needs the least depends on the model.
    smallest = {(o.settings.recompute, o.settings.recomputes_last): o for _, o in options}
    if all(divided(changed, count) is None for changed in reversed(smallest.values())):
        return
    enough: list[frozenset[str]] = []
    for changes, changed in options:
        if any(fewer < frozenset(changes) for fewer in enough):
            continue
        found = divided(changed, count)
        if found is None:
            continue
        made = _combination(found, changes)
        if made.verdict == "fits":
            enough.append(frozenset(changes))
        yield made


def _combination(run: Run, changes: tuple[str, ...]) -> Combination:
    return Combination(run, changes, run.fullest.verdict, run.throughput)


def _refined(found: Combination) -> Combination:
    """Return a combination whose division is compared with similar ones."""
    placement = best_splits(found.run, found.ipus, tries_all=False)
    if placement is None:
        return found
    return _combination(replace(found.run, placement=placement), found.changes)


def divided(run: Run, count: int, effort: Effort | None = None) -> Run | None:
    """Return a run that is divided among ``count`` IPUs, or None if it does not fit.

    Args:
        run: The configuration of the run.
        count: The number of IPUs.
        effort: The number of operations whose memory the search may estimate.
    """
    room = count * (run.ipu.tiles - run.settings.io_tiles) * run.ipu.tile_bytes
    if sum(least_bytes(run.graph, run.settings)) > LIMITS[-1] * room:
        return None
    placement = best_splits(run, count, tries_all=False, is_quick=True, effort=effort)
    return None if placement is None else replace(run, placement=placement)


def _options(run: Run, count: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Yield the run with each combination of options, and texts that describe the changes."""
    stages = count + 1 if count > 1 and shared_weights(run.graph) else count
    filled, first = with_micro_batches(run, stages), tuple[str, ...]()
    if filled is not run:
        name = "accumulation" if run.settings.is_training else "device iterations"
        first = (f"{name} of {filled.settings.micro_batches}",)
    recomputations = list(_recomputations(filled, count))
    for (one, again), (other, stored) in product(recomputations, _stored(run.settings)):
        settings = replace(
            again.settings,
            optimizer_location=stored.optimizer_location,
            activation_location=stored.activation_location,
        )
        yield (*first, *one, *other), replace(again, settings=settings)


def _recomputations(run: Run, count: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    yield (), run
    settings = run.settings
    if not settings.is_training:
        return
    if settings.recompute == "none":
        settings = replace(settings, recompute="default")
        if count > 1 and settings.is_pipelined:
            yield ("recomputation",), replace(run, settings=settings)
    if count == 1 or not settings.is_pipelined:
        # A pipeline recomputes whole stages anyway.
        for kind, change in _KINDS.items():
            if run.settings.recompute != kind:
                yield (change,), replace(run, settings=replace(settings, recompute=kind))
    settings = replace(settings, recompute="stage", recomputes_last=True)
    graph = with_checkpoints(run.graph, cheap_places(run.graph))
    change = "recomputation with checkpoints between layers"
    yield (change,), replace(run, graph=graph, settings=settings)


def _stored(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Yield the settings with optimiser state and activations in each kind of memory."""
    if not settings.is_training:
        yield (), settings
        return
    states, activations = settings.optimizer_location, settings.activation_location
    changed: list[tuple[tuple[str, ...], Settings]] = [((), settings)]
    # Locations have no effect on the state of a combined optimiser.
    has_state = settings.optimizer.state and not settings.optimizer.is_combined
    if has_state and settings.replicas > 1 and not states.is_sharded:
        sharded = replace(states, is_sharded=True)
        changed.append(
            (("optimiser state sharded",), replace(settings, optimizer_location=sharded))
        )
    if has_state and states.on_chip:
        for texts, each in tuple(changed):
            away = replace(each.optimizer_location, on_chip=False)
            change = "optimiser state off the chip"
            changed.append(((*texts, change), replace(each, optimizer_location=away)))
    if activations.on_chip:
        away = replace(activations, on_chip=False)
        for texts, each in tuple(changed):
            change = "activations off the chip"
            changed.append(((*texts, change), replace(each, activation_location=away)))
    yield from changed
