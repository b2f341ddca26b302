"""The DataLoader in mode Sync: batch sizes, lengths, shares of instances, batch samplers."""

import logging
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from poptorch.data.loading import ASYNC, FORK, REBATCHED, flat, read

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, Options


def options(di=1, replicas=1, group=1, ga=1, processes=1, process=0, seed=None):
    made = Options().deviceIterations(di).replicationFactor(replicas)
    if group > 1:
        made.inputReplicaGrouping(group, poptorch.CommGroupType.Consecutive)
    made.Training.gradientAccumulation(ga)
    made.Distributed.configureProcessId(process, processes)
    if seed is not None:
        made.randomSeed(seed)
    return made


def numbers(count):
    return torch.utils.data.TensorDataset(torch.arange(count))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(self.count))

    def __len__(self):
        return self.count


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, logger="poptorch::python")
    return caplog


@given(
    batch_size=st.integers(1, 4),
    di=st.integers(1, 3),
    ga=st.integers(1, 3),
    replicas=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    count=st.integers(0, 100),
    drop_last=st.booleans(),
)
def test_a_batch_is_what_one_call_takes(batch_size, di, ga, replicas, count, drop_last):
    factor, group = replicas
    opts = options(di=di, ga=ga, replicas=factor, group=group)
    loader = DataLoader(opts, numbers(count), batch_size=batch_size, drop_last=drop_last)
    combined = batch_size * di * ga * factor // group
    assert loader.combinedBatchSize == loader._combined_batch_size == combined
    batches = read(loader)
    assert len(batches) == len(loader)
    assert flat(batches) == list(range(count - count % combined if drop_last else count))
    assert all(len(batch) == combined for batch in batches[: count // combined])


def test_the_options_are_frozen_and_returned():
    opts = options()
    loader = DataLoader(opts, numbers(4))
    assert loader.options is opts
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError):
        loader.combinedBatchSize = 3


def test_other_options_are_refused():
    with pytest.raises(AssertionError, match="Options"):
        DataLoader({"device_iterations": 1}, numbers(4))


@pytest.mark.parametrize("count", [0, -1])
def test_counts_begin_at_1(count):
    for setter in (
        Options().deviceIterations, Options().replicationFactor,
        Options().Training.gradientAccumulation,
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=rf"\({count}\) is too small: expected 1 or more"):
            setter(count)


@pytest.mark.parametrize("size", [0, -1, 1.5, "4"])
def test_a_batch_size_is_a_number(size):
    with pytest.raises(AssertionError, match=r"batch_size=.*: expected a whole number of 1 or mo"):
        DataLoader(options(processes=2), numbers(10), batch_size=size)


def test_a_loader_without_batches_says_so(caplog):
    caplog.set_level(logging.WARNING, "poptorch::python")
    made = options(di=5, processes=2)
    assert len(DataLoader(made, numbers(19), batch_size=2)) == 0
    said = (
        "The DataLoader has no batches: the data set has 19 elements, but a combined batch needs "
        "10 elements (batch_size 2 x deviceIterations 5 x replicationFactor 1 x "
        "gradientAccumulation 1) on each of 2 instances, 20 in total"
    )
    assert said in caplog.text
    caplog.clear()
    assert len(DataLoader(made, numbers(20), batch_size=2)) == 1
    assert len(DataLoader(made, numbers(0), batch_size=2)) == 0
    assert caplog.text == ""


def test_a_loader_says_that_its_instance_alone_has_no_batch(caplog):
    caplog.set_level(logging.WARNING, "poptorch::python")
    said = "The DataLoader of instance 1 has no batches: the data set has 1 element for 2 instances"
    for process, warns in ((0, False), (1, True)):
        made = options(processes=2, process=process)
        assert len(DataLoader(made, numbers(1), drop_last=False)) == 1 - process
        assert (said in caplog.text) is warns
    with pytest.raises(poptorch.Error, match=said):
        DataLoader(made, numbers(1), drop_last=False, **ASYNC)
    caplog.clear()
    DataLoader(options(), numbers(0), drop_last=False)
    assert caplog.text == ""


NO_BATCHES = (
    "160 elements, but a combined batch needs 400 elements (batch_size 4 x deviceIterations 5 x "
    "replicationFactor 8 / inputReplicaGrouping 2 x gradientAccumulation 5)"
)


def grouped():
    return options(di=5, replicas=8, group=2, ga=5)


@pytest.mark.parametrize("make", [numbers, Stream])
def test_every_factor_of_what_is_missing_is_named(make, caplog):
    caplog.set_level(logging.WARNING, "poptorch::python")
    loader = DataLoader(grouped(), make(160), batch_size=4)
    assert NO_BATCHES in caplog.text
    assert len(loader) == 0
    assert list(loader) == []


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
def test_a_loader_process_without_batches_says_so_too(mode):
    with pytest.raises(poptorch.Error, match=re.escape(NO_BATCHES)) as caught:
        DataLoader(grouped(), numbers(160), batch_size=4, **mode)
    assert "worker thread failed to start" in str(caught.value)
    assert "empty" not in str(caught.value)


def test_an_accessor_of_a_loader_without_batches_says_so_too():
    loader = DataLoader(grouped(), numbers(160), batch_size=4)
    with pytest.raises(poptorch.Error, match=re.escape(NO_BATCHES)):
        poptorch.AsynchronousDataAccessor(loader, **FORK)


def test_too_few_batches_of_a_sampler(caplog):
    caplog.set_level(logging.WARNING, "poptorch::python")
    loader = DataLoader(options(di=3, ga=2), numbers(20), batch_sampler=batches_of(20, 4))
    assert len(loader) == len(list(loader)) == 0
    assert (
        "the batch sampler has 5 batches, but a call of the model needs 6 batches "
        "(deviceIterations 3 x replicationFactor 1 x gradientAccumulation 2)"
    ) in caplog.text


@pytest.mark.parametrize("mode", ["Async", None, 7])
def test_a_mode_is_one_of_three(mode):
    with pytest.raises(AssertionError, match=r"mode=.*DataLoaderMode\.Sync, .*AsyncRebatched"):
        DataLoader(options(), numbers(4), mode=mode)
    assert len(DataLoader(options(), numbers(4), mode=0)) == 4


def test_without_a_batch_size_items_pass_unchanged():
    loader = DataLoader(options(di=3), numbers(4), batch_size=None)
    assert loader.combinedBatchSize is loader._combined_batch_size is None
    assert [item[0].shape for item in loader] == [torch.Size([])] * 4


def test_workers_persist_unless_told_otherwise():
    assert DataLoader(options(), numbers(4), num_workers=1).persistent_workers
    assert not DataLoader(options(), numbers(4)).persistent_workers
    loader = DataLoader(options(), numbers(4), num_workers=1, persistent_workers=False)
    assert not loader.persistent_workers


def test_a_short_last_batch_is_announced(log):
    DataLoader(options(di=2), numbers(11), batch_size=3, drop_last=False)
    assert "batch size of 5" in log.text
    log.clear()
    DataLoader(options(di=2), numbers(12), batch_size=3, drop_last=False)
    DataLoader(options(di=2), numbers(11), batch_size=3)
    assert not log.records


def test_a_sampler_need_not_know_its_length():
    class Sampler:
        def __iter__(self):
            return iter([4, 2, 0])

    loader = DataLoader(options(), numbers(5), 2, drop_last=False, sampler=Sampler())
    assert read(loader) == [[4, 2], [0]]


def test_terminate_does_nothing_here():
    loader = DataLoader(options(), numbers(3))
    loader.terminate()
    assert len(read(loader)) == 3


# --- Shares of instances --------------------------------------------------------------------------

CONTIGUOUS = {"distributed_order": "contiguous"}


def loaders_of(count, data, *args, seed=None, **kwargs):
    return [
        DataLoader(options(processes=count, process=p, seed=seed), data, *args, **kwargs)
        for p in range(count)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_instance_reads_its_rows_of_each_global_batch(workers):
    for process in range(2):
        opts = options(di=2, replicas=2, processes=2, process=process)
        loader = DataLoader(opts, numbers(50), batch_size=3, num_workers=workers)
        assert len(loader) == 2
        blocks = [list(range(start, start + 6)) for start in range(6 * process, 48, 12)]
        for _ in range(2):
            assert read(loader) == [blocks[0] + blocks[1], blocks[2] + blocks[3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_contiguous_order_every_instance_reads_its_own_block(workers):
    for process in range(3):
        opts = options(di=2, processes=3, process=process)
        loader = DataLoader(opts, numbers(50), batch_size=4, num_workers=workers, **CONTIGUOUS)
        assert len(loader) == 2
        start = 16 * process
        for _ in range(2):
            assert flat(read(loader)) == list(range(start, start + 16))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("global", [[[0, 1, 2], [9]], [[3, 4, 5], [10]], [[6, 7, 8]]]),
        ("contiguous", [[[0, 1, 2], [3]], [[4, 5, 6], [7]], [[8, 9, 10]]]),
    ],
)
def test_keeping_the_last_elements_spreads_them_over_the_instances(order, expected):
    parts = loaders_of(3, numbers(11), batch_size=3, drop_last=False, distributed_order=order)
    assert [read(part) for part in parts] == expected
    assert [len(part) for part in parts] == [2, 2, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_shuffled_epochs_are_functions_of_seed_and_epoch(count):
    loaders = loaders_of(count, numbers(31), 15 // count, shuffle=True, seed=5)
    for epoch in range(3):
        generator = torch.Generator().manual_seed(5 + epoch)
        permutation = torch.randperm(31, generator=generator).tolist()
        rows = 15 // count * count
        expected = [permutation[start : start + rows] for start in range(0, 31 - rows, rows)]
        assert [flat(parts) for parts in zip(*map(read, loaders), strict=True)] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_contiguous_shuffled_instances_share_one_permutation_and_toggle_the_leftovers(workers):
    arguments = {"batch_size": 7, "shuffle": True, "num_workers": workers, **CONTIGUOUS}
    loaders = loaders_of(2, numbers(30), seed=5, **arguments)
    epochs = []
    for _ in range(4):
        shares = [flat(read(loader)) for loader in loaders]
        assert [len(share) for share in shares] == [14, 14]
        assert not set(shares[0]) & set(shares[1])
        epochs.append(tuple(shares[0] + shares[1]))
    assert len(set(epochs)) == 4, "every epoch has an order of its own"
    # The same permutations in one go: the window of epoch 1 lies two elements further.
    generator = torch.Generator().manual_seed(5)
    for epoch, order in enumerate(epochs):
        permutation = torch.randperm(30, generator=generator).tolist()
        start = 2 if epoch % 2 else 0
        assert list(order) == permutation[start : start + 28]


@pytest.mark.parametrize("wrong", ["Global", None, 0])
def test_an_order_is_one_of_two(wrong):
    with pytest.raises(AssertionError, match=r'distributed_order=.*"global" or "contiguous"'):
        DataLoader(options(), numbers(4), distributed_order=wrong)


def test_shuffling_several_instances_needs_a_seed():
    with pytest.raises(AssertionError, match="randomSeed"):
        DataLoader(options(processes=2), numbers(30), shuffle=True)


def test_a_sampler_of_the_user_is_shared_out_too():
    order = list(reversed(range(20)))
    parts = list(map(read, loaders_of(2, numbers(20), batch_size=5, sampler=order)))
    assert flat(flat(batches) for batches in zip(*parts, strict=True)) == order
    parts = loaders_of(2, numbers(20), batch_size=5, sampler=order, **CONTIGUOUS)
    assert flat(flat(read(part)) for part in parts) == order


def test_a_range_as_a_sampler_names_elements():
    parts = list(map(read, loaders_of(2, numbers(20), batch_size=2, sampler=range(8, 16))))
    assert parts == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


def test_without_partitioning_every_instance_reads_everything():
    opts = options(processes=2, process=1)
    loader = DataLoader(opts, numbers(6), auto_distributed_partitioning=False)
    assert flat(read(loader)) == list(range(6))


def test_whole_batches_cannot_be_partitioned():
    with pytest.raises(AssertionError, match="batch_size=None"):
        DataLoader(options(processes=2), numbers(6), batch_size=None)


# --- Iterable data sets ---------------------------------------------------------------------------


def test_an_iterable_data_set_is_batched_in_order():
    loader = DataLoader(options(di=2), Stream(11), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2


def test_an_iterable_data_set_cannot_be_shuffled_or_partitioned():
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(options(), Stream(4), shuffle=True)
    with pytest.raises(AssertionError, match="IterableDataset"):
        DataLoader(options(processes=2), Stream(4))
    DataLoader(options(processes=2), Stream(4), auto_distributed_partitioning=False)


def test_workers_that_would_repeat_an_iterable_data_set_are_reported(log):
    DataLoader(options(), Stream(4), num_workers=2)
    assert "returned 2 times" in log.text
    log.clear()
    DataLoader(options(), Stream(4), num_workers=2, worker_init_fn=print)
    DataLoader(options(), Stream(4), num_workers=1)
    assert not log.records


# --- Batch samplers -------------------------------------------------------------------------------


def batches_of(count, size, drop_last=False):
    return torch.utils.data.BatchSampler(range(count), size, drop_last)


@pytest.mark.parametrize("collate_fn", [None, torch.utils.data.default_collate])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_a_sampler_are_joined(drop_last, collate_fn):
    loader = DataLoader(
        options(di=2, ga=3),
        numbers(50),
        batch_sampler=batches_of(50, 4),
        drop_last=drop_last,
        collate_fn=collate_fn,
    )
    assert loader.combinedBatchSize == 24
    sizes = [24, 24] if drop_last else [24, 24, 2]
    assert [len(batch) for batch in read(loader)] == sizes
    assert len(loader) == len(sizes)
    assert flat(read(loader)) == list(range(sum(sizes)))


def test_a_custom_collate_function_sees_one_batch_of_the_sampler():
    def collate(samples):
        assert len(samples) == 4
        return {"sum": torch.stack([s[0] for s in samples]).sum(0, keepdim=True)}

    loader = DataLoader(
        options(di=3), numbers(24), batch_sampler=batches_of(24, 4), collate_fn=collate
    )
    assert [batch["sum"].tolist() for batch in loader] == [[6, 22, 38], [54, 70, 86]]


def test_one_batch_per_step_passes_as_it_is():
    loader = DataLoader(options(), numbers(10), batch_sampler=batches_of(10, 4), drop_last=True)
    assert [len(batch) for batch in read(loader)] == [4, 4, 2]


@pytest.mark.parametrize("wrong", [{"batch_size": 2}, {"shuffle": True}, {"batch_size": None}])
def test_a_batch_sampler_excludes_other_ways_to_batch(wrong):
    with pytest.raises(poptorch.Error, match="mutually exclusive"):
        DataLoader(options(), numbers(4), batch_sampler=batches_of(4, 2), **wrong)


def test_a_batch_sampler_excludes_partitioning():
    arguments = {"batch_sampler": batches_of(4, 2)}
    with pytest.raises(poptorch.Error, match="mutually exclusive"):
        DataLoader(options(processes=2), numbers(4), **arguments)
    DataLoader(options(processes=2), numbers(4), auto_distributed_partitioning=False, **arguments)


class NoLength:
    def __iter__(self):
        return iter([[0, 1], [2, 3], [4]])


class UnknownLength(NoLength):
    def __len__(self):
        raise NotImplementedError


class LengthNotImplemented(NoLength):
    def __len__(self):
        return NotImplemented


@pytest.mark.parametrize("sampler", [NoLength(), UnknownLength(), LengthNotImplemented()])
@pytest.mark.parametrize("di", [1, 2])
def test_a_batch_sampler_need_not_know_its_length(sampler, di, log):
    loader = DataLoader(options(di=di), numbers(5), batch_sampler=sampler, drop_last=False)
    assert "no usable __len__" in log.text
    assert loader.combinedBatchSize == di
    assert flat(read(loader)) == list(range(5))
    with pytest.raises((TypeError, NotImplementedError)):
        len(loader)


def test_a_shuffled_data_set_may_grow_between_epochs():
    data = list(range(8))
    loader = poptorch.DataLoader(poptorch.Options(), data, batch_size=2, shuffle=True)
    assert sorted(int(x) for batch in loader for x in batch) == data
    data += range(8, 12)
    assert len(loader) == 6
    assert sorted(int(x) for batch in loader for x in batch) == data
