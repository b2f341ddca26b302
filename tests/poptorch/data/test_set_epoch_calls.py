"""Samplers and data sets that the program tells of epochs: also in Async mode, and in workers."""

import pytest
import torch
from poptorch.data.loading import ASYNC, FORK, REBATCHED, flat, numbers, read
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from popdist_py.poptorch import AsynchronousDataAccessor, DataLoader, Options


def distributed(rank=1, replicas=2, count=24):
    return DistributedSampler(numbers(count), num_replicas=replicas, rank=rank, seed=3)


def order(epoch, **arguments):
    sampler = distributed(**arguments)
    sampler.set_epoch(epoch)
    return list(sampler)


def of_two_processes(di=1):
    options = Options().deviceIterations(di)
    options.Distributed.configureProcessId(1, 2)
    return options


@pytest.mark.parametrize(
    ("mode", "workers"), [({}, 2), (ASYNC, 0), pytest.param(REBATCHED, 2, marks=pytest.mark.sweep)]
)
def test_a_distributed_sampler_gives_the_share_and_its_epochs(mode, workers):
    sampler = distributed()
    loader = DataLoader(
        of_two_processes(), numbers(24), 4, sampler=sampler, num_workers=workers, **mode
    )
    assert len(loader) == 3
    for epoch in (0, 1, 1, 5):
        sampler.set_epoch(epoch)
        assert flat(read(loader)) == order(epoch)
    loader.terminate()


def test_a_sampler_for_one_process_is_shared_out():
    sampler = distributed(rank=0, replicas=1)
    loader = DataLoader(of_two_processes(), numbers(24), 4, sampler=sampler, **ASYNC)
    for epoch in (2, 4):
        sampler.set_epoch(epoch)
        whole = order(epoch, rank=0, replicas=1)
        assert read(loader) == [whole[start : start + 4] for start in (4, 12, 20)]
    loader.terminate()


def test_inside_a_batch_sampler_and_after_a_break():
    sampler = distributed()
    loader = DataLoader(
        of_two_processes(di=2),
        numbers(24),
        batch_sampler=BatchSampler(sampler, 2, drop_last=True),
        auto_distributed_partitioning=False,
        **ASYNC,
    )
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch in loader:
            assert batch[0].tolist() == order(epoch)[:4]
            break
    assert loader.state_dict()["epoch"] == 3
    sampler.set_epoch(7)
    assert flat(read(loader)) == order(7)
    assert loader.state_dict()["epoch"] == 5
    loader.terminate()


def test_the_next_epoch_is_not_loaded_twice_where_nothing_was_told():
    sampler = distributed()
    sampler.set_epoch(2)
    loader = DataLoader(of_two_processes(), numbers(24), 4, sampler=sampler, **ASYNC)
    for _ in range(2):
        assert flat(read(loader)) == order(2)
    assert loader._accessor._epoch == 2
    loader.terminate()


@pytest.mark.parametrize("told", [True, False])
def test_an_epoch_goes_on_in_its_order(told):
    sampler = distributed()
    loader = DataLoader(of_two_processes(), numbers(24), 4, sampler=sampler, **ASYNC)
    sampler.set_epoch(6)
    next(iter(loader))
    state = loader.state_dict()
    loader.terminate()
    again = distributed()
    resumed = DataLoader(of_two_processes(), numbers(24), 4, sampler=again, **ASYNC)
    resumed.load_state_dict(state)
    if told:
        again.set_epoch(6)
    assert flat(read(resumed)) == order(6)[4:]
    again.set_epoch(7)
    assert flat(read(resumed)) == order(7)
    resumed.terminate()


class Shifted(Dataset):
    """Its elements are those of no other epoch; how it keeps the number is its own business."""

    shift = 0

    def set_epoch(self, epoch, factor=100):
        self.shift = factor * epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return (torch.tensor(self.shift + index),)


class Stream(IterableDataset):
    shift = 0

    def set_epoch(self, epoch):
        self.shift = 100 * epoch

    def __iter__(self):
        return iter([[each] for each in torch.arange(self.shift, self.shift + 8)])


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ({}, 1),
        (ASYNC, 0),
        pytest.param(ASYNC, 1, marks=pytest.mark.sweep),
    ],
)
def test_a_data_set_is_told_of_epochs_wherever_its_copies_are(mode, workers):
    inner = Shifted()
    inner.set_epoch(3)  # before there is a loader
    loader = DataLoader(
        Options(), Subset(inner, range(1, 5)), 4, num_workers=workers,
        **({"multiprocessing_context": "fork"} if workers else {}), **mode,
    )  # fmt: skip
    assert flat(read(loader)) == [301, 302, 303, 304]
    for epoch in (1, 1, 5):
        inner.set_epoch(epoch)
        assert flat(read(loader)) == [100 * epoch + i for i in range(1, 5)]
    loader.terminate()


def test_workers_go_on_where_the_data_set_was_told_nothing_new():
    dataset = Shifted()
    loader = DataLoader(Options(), dataset, 4, num_workers=1, multiprocessing_context="fork")
    dataset.set_epoch(1)
    pids = []
    for epoch in (1, 1, 2):
        dataset.set_epoch(epoch)
        read(loader)
        pids.append(loader._iterator._workers[0].pid)
    assert pids[0] == pids[1] != pids[2]
    del loader


@pytest.mark.parametrize("dataset", [Shifted(), Stream()])
def test_an_accessor_tells_its_data_set(dataset):
    accessor = AsynchronousDataAccessor(dataset, **FORK)
    for epoch in (0, 2, 3):
        dataset.set_epoch(epoch)
        assert [item.item() for (item,) in accessor] == [100 * epoch + i for i in range(8)]
    accessor.terminate()
