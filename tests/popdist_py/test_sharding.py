"""The parts of a data set, with a worked example and properties of all parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.sharding import shard

SIZES = st.integers(0, 2000)
PROCESSES = st.integers(1, 9)
STEPS = st.integers(1, 60)


def shares(elements, processes, step, drop_last):
    return [
        shard(elements, num_processes=processes, process=p, step=step, drop_last=drop_last)
        for p in range(processes)
    ]


def test_the_worked_example_of_cifar_10():
    share = shard(50_000, num_processes=4, process=3, step=64, drop_last=True)
    assert (share.length, share.length // 64) == (12_480, 195)
    assert (share.offset, share.leftovers) == (3 * 12_480, 80)
    assert share.window(0) == range(37_440, 49_920)
    assert share.window(1) == range(37_520, 50_000)
    assert share.window(2) == share.window(0)


@given(SIZES, PROCESSES, STEPS)
def test_dropping_gives_all_processes_the_same_number_of_whole_steps(elements, processes, step):
    parts = shares(elements, processes, step, drop_last=True)
    assert {part.length for part in parts} == {step * (elements // (step * processes))}
    for epoch in (0, 1):
        indices = [index for part in parts for index in part.window(epoch)]
        assert len(set(indices)) == len(indices)
        assert all(0 <= index < elements for index in indices)


@given(SIZES, PROCESSES, STEPS)
def test_keeping_reads_every_element_exactly_once(elements, processes, step):
    parts = shares(elements, processes, step, drop_last=False)
    assert [index for part in parts for index in part.window(0)] == list(range(elements))
    lengths = [part.length for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert not any(part.leftovers for part in parts)


def test_a_data_set_smaller_than_one_step_of_all_gives_nothing():
    share = shard(5, num_processes=2, process=1, step=4, drop_last=True)
    assert (share.length, list(share.window(0))) == (0, [])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_processes": 2, "process": 2, "step": 1},
        {"num_processes": 2, "process": -1, "step": 1},
        {"num_processes": 1, "process": 0, "step": 0},
    ],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="cannot shard 10 elements"):
        shard(10, drop_last=True, **arguments)
