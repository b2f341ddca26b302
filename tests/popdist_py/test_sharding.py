"""The parts of a data set, with a worked example and properties of all parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.sharding import global_share, shard

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


@given(st.integers(0, 400), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_global_batches_are_the_same_for_every_divisor_of_the_replicas(
    elements, micro_batch, steps, drop_last
):
    """Join the rows of all instances in the order [step][replica][micro-batch]."""
    replicas = 12
    size = replicas * micro_batch * steps
    for processes in (1, 2, 3, 4, 6, 12):
        rows = replicas // processes * micro_batch
        parts = [
            global_share(
                elements,
                num_processes=processes,
                process=process,
                rows=rows,
                step=rows * steps,
                drop_last=drop_last,
            )
            for process in range(processes)
        ]
        read = [[position for each in part.ranges() for position in each] for part in parts]
        assert [part.length for part in parts] == [len(each) for each in read]
        whole = elements - elements % size
        joined = [
            position
            for block in range(whole // (processes * rows))
            for each in read
            for position in each[block * rows : (block + 1) * rows]
        ]
        joined += [position for each in read for position in each[whole // processes :]]
        assert joined == list(range(whole if drop_last else elements))
        lengths = [part.length for part in parts]
        assert max(lengths) - min(lengths) <= (0 if drop_last else 1)


def test_the_worked_example_of_global_batches():
    """Two instances with two replicas each, a micro-batch of 3, two accumulated micro-batches."""
    share = global_share(50, num_processes=2, process=1, rows=6, step=12, drop_last=False)
    assert (share.whole, share.length) == (48, 25)
    assert list(share.ranges()) == [
        range(6, 12), range(18, 24), range(30, 36), range(42, 48), range(49, 50)
    ]  # fmt: skip


def test_rows_that_do_not_fill_a_step_are_refused():
    for rows in (0, 5):
        with pytest.raises(ValueError, match=f"step=12 must be a multiple of rows={rows}, and"):
            global_share(50, num_processes=2, process=1, rows=rows, step=12, drop_last=True)
    with pytest.raises(ValueError, match="cannot shard 50 elements"):
        global_share(50, num_processes=2, process=2, rows=6, step=12, drop_last=True)
