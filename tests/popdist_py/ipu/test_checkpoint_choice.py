"""PopART's choice of checkpoints: where the fewest bytes are live, and more often near the loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.checkpoint_choice import chosen_checkpoints, decreasing_intervals
from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.placed_stage import stage_of
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import Builder, resnet, transformer


@given(count=st.integers(0, 5000))
def test_intervals_cover_all_operations_and_get_shorter(count):
    found = list(decreasing_intervals(count))
    assert [i for begin, end in found for i in range(begin, end)] == list(range(count))
    lengths = [end - begin for begin, end in found]
    assert lengths == sorted(lengths, reverse=True)
    # The last interval ends with the operations.
    assert all(before - after == 1 for before, after in pairwise(lengths[:-1]))


def chain(sizes):
    """Return a stage in which each operation reads the result of the operation before."""
    build = Builder(1, "float32")
    x = build.input("x", 1)
    for index, size in enumerate(sizes):
        x = build.add(f"o{index}", "elementwise", [x], size)
    graph = build.graph([x])
    return stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)


def test_the_smallest_tensor_of_each_interval_is_kept():
    # The three intervals have three, two and one operations.
    assert list(decreasing_intervals(6)) == [(0, 3), (3, 5), (5, 6)]
    assert chosen_checkpoints(chain([5, 1, 9, 8, 2, 7])) == {"o1:out", "o4:out", "o5:out"}


def test_all_tensors_that_are_live_at_the_moment_are_kept():
    build = Builder(1, "float32")
    x = build.input("x", 1)
    first = build.add("first", "elementwise", [x], 1)
    skip = build.add("skip", "elementwise", [first], 2)
    inner = build.add("inner", "elementwise", [skip], 90)
    inner = build.add("end", "elementwise", [inner], 5)
    both = build.add("both", "elementwise", [inner, skip], 90)
    graph = build.graph([build.add("last", "elementwise", [both], 1)])
    stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
    # In the second interval, the fewest bytes are live after "end". At this moment "skip" is also
    # live.
    assert chosen_checkpoints(stage) == {"first:out", "skip:out", "end:out", "last:out"}
    # The tensors that a stage receives are kept anyway.
    assert "skip:out" not in chosen_checkpoints(replace(stage, operations=stage.operations[2:]))


@pytest.mark.parametrize(
    "graph",
    [resnet([3, 4, 6, 3], 224, 8), transformer(12, 768, 128, 4)],
    ids=["ResNet-50", "BERT-base"],
)
@pytest.mark.parametrize("number", [1, 2])
def test_checkpoints_save_much_memory_for_at_most_one_more_forward_pass(graph, number):
    place = [graph.operations[len(graph.operations) // 2].name] if number > 1 else []
    placement = Placement.cut(graph, place)

    def found(recompute):
        settings = Settings(recompute=recompute, accumulation=4)
        report = memory(graph, placement, settings, MK2)
        return report, cycles(graph, placement, settings, MK2).stages

    (none, plain), (standard, again) = found("none"), found("standard")
    for before, after in zip(none.ipus, standard.ipus, strict=True):
        assert after.needed < before.needed
    live = [ipu.by_category() for ipu in (none.ipus[0], standard.ipus[0])]
    kept = [own.get("stash", 0) + own.get("activations", 0) for own in live]
    assert kept[1] < 0.6 * kept[0]
    for before, after in zip(plain, again, strict=True):
        assert before.recompute == 0
        assert 0.5 * after.forward < after.recompute <= after.forward
