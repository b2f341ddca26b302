"""Batches of another size than the workers load: joined, cut, and checked."""

import pytest
import torch
from poptorch.data.loading import ASYNC, FORK, REBATCHED, Stream, flat, numbers, print_nothing, read

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, DataLoaderMode, Options
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_a_sampler(workers, drop_last):
    loader = DataLoader(
        Options().deviceIterations(2),
        numbers(9),
        num_workers=workers,
        drop_last=drop_last,
        batch_sampler=torch.utils.data.BatchSampler(range(9), 2, drop_last=False),
        **ASYNC,
    )
    short = [] if drop_last else [[8]]
    assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], *short]
    assert len(loader) == (2 if drop_last else 3)
    loader.terminate()


@pytest.mark.parametrize(
    ("elements", "drop_last", "iterations"),
    [(8, False, 2), (9, False, 1), (9, False, 2), (9, True, 2)],
)
def test_rebatched_batches_of_a_sampler_have_a_length(elements, drop_last, iterations):
    sampler = torch.utils.data.BatchSampler(range(elements), 2, drop_last=False)
    loader = DataLoader(
        Options().deviceIterations(iterations),
        numbers(20),  # of which the sampler chooses some
        drop_last=drop_last,
        batch_sampler=sampler,
        **REBATCHED,
    )
    whole, short = divmod(elements, 2 * iterations)
    assert len(loader) == len(read(loader)) == whole + bool(short and not drop_last)
    loader.terminate()


@pytest.mark.parametrize(
    ("make", "worker_size", "drop_last", "workers"),
    [
        (numbers, None, True, 2),
        (numbers, 1, False, 0),
        (numbers, 4, True, 0),
        (numbers, 4, False, 2),
        (numbers, 6, False, 0),
        (Stream, None, False, 0),
        (Stream, 1, True, 2),
        (Stream, 4, False, 2),
        (Stream, 4, True, 0),
    ],
)
def test_workers_may_load_batches_of_another_size(workers, worker_size, drop_last, make):
    loader = DataLoader(
        Options().deviceIterations(2),
        make(40),
        batch_size=3,
        num_workers=workers,
        drop_last=drop_last,
        rebatched_worker_size=worker_size,
        worker_init_fn=print_nothing,
        **REBATCHED,
    )
    sizes = [6] * 6 if drop_last else [6] * 6 + [4]
    assert len(loader) == len(sizes)
    batches = [(b if make is Stream else b[0]).tolist() for b in loader]
    assert [len(batch) for batch in batches] == sizes
    elements = flat(batches)
    assert len(set(elements)) == len(elements)
    if make is numbers:
        assert elements == list(range(len(elements)))
    loader.terminate()


def test_async_without_dropping_rebatches():
    loader = DataLoader(Options(), numbers(7), batch_size=3, drop_last=False, **ASYNC)
    assert (len(loader), read(loader)) == (3, [[0, 1, 2], [3, 4, 5], [6]])
    loader.terminate()


def test_items_without_tensors_cannot_be_rebatched():
    with pytest.raises(poptorch.Error, match="a int without tensors"):
        AsynchronousDataAccessor([1, 2, 3], rebatched_size=2, **FORK)


@pytest.mark.parametrize("more", [torch.tensor(3), torch.arange(6)])
def test_tensors_of_other_lengths_cannot_be_rebatched(more):
    source = [(torch.arange(3), more)] * 4
    with pytest.raises(poptorch.Error, match=r"shapes \[3\], .*the same first dimension"):
        AsynchronousDataAccessor(source, rebatched_size=2, **FORK)


def test_an_accessor_rebatches_on_its_own():
    def sync(drop_last):
        return DataLoader(Options(), numbers(11), batch_size=2, drop_last=drop_last)

    accessor = AsynchronousDataAccessor(sync(True), rebatched_size=4, **FORK)
    assert (len(accessor), read(accessor)) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]])
    accessor.terminate()
    accessor = AsynchronousDataAccessor(sync(False), rebatched_size=4, **FORK)
    assert read(accessor)[-1] == [8, 9, 10]
    accessor.terminate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rebatched_worker_size": 7}, "rebatched_worker_size"),
        ({"async_options": {"rebatched_size": 4}}, "rebatched_size"),
    ],
)
def test_sizes_that_do_not_go_together(arguments, message):
    with pytest.raises(AssertionError, match=message):
        DataLoader(
            Options(), numbers(9), batch_size=6, mode=DataLoaderMode.AsyncRebatched, **arguments
        )


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_rebatched_size_is_greater_than_one(size):
    with pytest.raises(AssertionError, match="rebatched_size"):
        AsynchronousDataAccessor([torch.ones(1)], rebatched_size=size)


def test_a_short_batch_needs_rebatching():
    loader = DataLoader(Options(), numbers(7), batch_size=3, drop_last=False)
    with pytest.raises(AssertionError, match="drop_last"):
        AsynchronousDataAccessor(loader)
