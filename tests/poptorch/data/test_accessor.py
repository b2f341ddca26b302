"""Loading in a process of its own: order, epochs, structures, errors, and a clean end."""

import gc
import inspect

import pytest
import torch
from poptorch.data.loading import ASYNC, FORK, REBATCHED, Stream, flat, numbers, print_nothing, read

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, DataLoaderMode, Options, SharingStrategy
from popdist_py.poptorch.calls.custom_type_parsers import ICustomArgParser, registerCustomArgParser
from popdist_py.poptorch.data import accessor as accessor_module
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, marks=pytest.mark.sweep) for each in SharingStrategy] + ["Fork"],
)
def test_every_sharing_strategy_delivers(strategy):
    # More tensors than the file descriptors that can be passed to a new process.
    source = [torch.full((2,), float(i)) for i in range(300)]
    accessor = AsynchronousDataAccessor(source, sharing_strategy=strategy)
    assert len(accessor) == 300
    for _ in range(2):
        assert [item[0].item() for item in accessor] == list(range(300))
    accessor.terminate()


@pytest.mark.parametrize(
    ("workers", "strategy"), [(2, SharingStrategy.ForkServer), (0, SharingStrategy.Fork)]
)
def test_batches_are_those_of_the_synchronous_loader(workers, strategy):
    arguments = {"batch_size": 3, "num_workers": workers}
    expected = read(DataLoader(Options().deviceIterations(2), numbers(40), **arguments))
    loader = DataLoader(
        Options().deviceIterations(2),
        numbers(40),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
        **arguments,
    )
    assert len(loader) == len(expected)
    for _ in range(3):
        assert read(loader) == expected
    loader.terminate()


@pytest.mark.parametrize(
    ("buffer_size", "load_indefinitely", "early_preload"),
    [(1, True, True), (1, False, False), (5, True, False), (5, False, True)],
)
def test_epochs_follow_one_another(buffer_size, load_indefinitely, early_preload):
    accessor = AsynchronousDataAccessor(
        DataLoader(Options(), numbers(9), batch_size=2),
        buffer_size=buffer_size,
        load_indefinitely=load_indefinitely,
        early_preload=early_preload,
        **FORK,
    )
    for _ in range(3):
        assert read(accessor) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert next(accessor, None) is None
    accessor.terminate()


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True), (2, False)])
def test_leaving_an_epoch_begins_the_next_one_from_the_start(workers, persistent):
    loader = DataLoader(
        Options(),
        numbers(50),
        num_workers=workers,
        persistent_workers=persistent,
        **ASYNC,
    )
    for length in (1, 7, 50, 3):
        seen = [batch[0].item() for batch, _ in zip(loader, range(length), strict=False)]
        assert seen == list(range(length))
    loader.terminate()


def test_an_item_is_valid_until_the_next_and_its_memory_used_again():
    accessor = AsynchronousDataAccessor([torch.full((4,), float(i)) for i in range(20)], **FORK)
    places = set()
    for i, item in enumerate(accessor):
        assert item.tolist() == [float(i)] * 4
        places.add(item.data_ptr())
    assert len(places) <= 3, "a ring of three slots"
    accessor.terminate()


def test_items_outlive_the_accessor():
    accessor = AsynchronousDataAccessor([torch.arange(5)], **FORK)
    item = next(iter(accessor))
    accessor.terminate()
    del accessor
    gc.collect()
    assert item.tolist() == list(range(5))


def test_items_of_changing_shape_and_dtype():
    source = [
        torch.ones(n, n % 3 + 1, dtype=t)
        for n, t in zip(
            (1, 50, 2, 0, 7),
            (torch.uint8, torch.half, torch.bool, torch.double, torch.bfloat16),
            strict=True,
        )
    ]
    accessor = AsynchronousDataAccessor(source, **FORK)
    for _ in range(2):
        for got, expected in zip(accessor, source, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
    accessor.terminate()


class Pair:
    def __init__(self, x, y, label):
        self.x, self.y, self.label = x, y, label


class SpecialPair(Pair):
    pass


class PairParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.x
        yield struct.y

    def reconstruct(self, original_structure, tensor_iterator):
        kind = type(original_structure)
        return kind(next(tensor_iterator), next(tensor_iterator), original_structure.label)


@pytest.fixture
def pair_parser():
    registerCustomArgParser(Pair, PairParser())
    yield
    registerCustomArgParser(Pair, None)


def test_structures(pair_parser):
    one, two = torch.ones(2), torch.zeros(3, dtype=torch.int)
    source = [
        (one, two),
        [one, [two, (one,)]],
        {"a": one, "b": {"c": two}},
        SpecialPair(one, two, "x"),
        Pair(two, one, "y"),
    ]
    # A fork server's process learns the registered parsers too.
    accessor = AsynchronousDataAccessor(source)
    got = []
    for item in accessor:
        copy = item
        if isinstance(item, Pair):
            copy = (type(item).__name__, item.x.tolist(), item.y.tolist(), item.label)
        else:
            copy = torch.utils._pytree.tree_map(lambda tensor: tensor.tolist(), item)
        got.append(copy)
    a, b = one.tolist(), two.tolist()
    assert got == [
        [a, b],
        [a, [b, [a]]],
        {"a": a, "b": {"c": b}},
        ("SpecialPair", a, b, "x"),
        ("Pair", b, a, "y"),
    ]
    accessor.terminate()


def test_a_custom_parser_must_inherit():
    with pytest.raises(poptorch.Error, match="must inherit"):
        registerCustomArgParser(Pair, object())


class ShapeCollate:
    def __call__(self, samples):
        return {"x": torch.stack([s[0] for s in samples]), "n": torch.tensor(len(samples))}


def test_a_custom_collate_function():
    loader = DataLoader(Options(), numbers(6), 3, num_workers=1, collate_fn=ShapeCollate(), **ASYNC)
    assert [(b["x"].tolist(), b["n"].item()) for b in loader] == [([0, 1, 2], 3), ([3, 4, 5], 3)]
    loader.terminate()


def test_mixed_dtypes_are_collated_as_torch_does():
    samples = [torch.ones(2, dtype=torch.int64), torch.full((2,), 0.5)]
    (expected,) = torch.utils.data.DataLoader(samples, batch_size=2)
    loader = DataLoader(Options(), samples, batch_size=2, **ASYNC)
    (got,) = (batch.clone() for batch in loader)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffling_is_new_each_epoch_and_repeatable(workers):
    def epochs():
        torch.manual_seed(3)
        loader = DataLoader(Options(), numbers(20), shuffle=True, num_workers=workers, **ASYNC)
        orders = [[b[0].item() for b in loader] for _ in range(3)]
        loader.terminate()
        return orders

    first = epochs()
    assert all(sorted(order) == list(range(20)) for order in first)
    assert len({tuple(order) for order in first}) == 3
    assert epochs() == first


@pytest.mark.parametrize(
    ("workers", "strategy"), [(2, SharingStrategy.Fork), (0, SharingStrategy.ForkServer)]
)
def test_a_generator_of_the_program_gives_torchs_order(workers, strategy):
    def arguments():
        return {
            "shuffle": True,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "generator": torch.Generator().manual_seed(1),
        }

    expected = torch.utils.data.DataLoader(numbers(20), **arguments())
    loader = DataLoader(
        Options(),
        numbers(20),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
        **arguments(),
    )
    assert [read(loader) for _ in range(2)] == [read(expected) for _ in range(2)]
    loader.terminate()


class WithoutLength:
    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.tensor([index])


@pytest.mark.parametrize("source", [WithoutLength(), [torch.tensor([i]) for i in range(3)]])
def test_any_sequence_can_be_iterated(source):
    accessor = AsynchronousDataAccessor(source, **FORK)
    assert [item.item() for item in accessor] == [0, 1, 2]
    accessor.terminate()


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.sweep), "forkserver"])
def test_workers_may_be_started_in_any_way(method):
    loader = DataLoader(
        Options(),
        numbers(6),
        num_workers=1,
        multiprocessing_context=method,
        mode=DataLoaderMode.Async,
    )
    for _ in range(2):
        assert flat(read(loader)) == list(range(6))
    loader.terminate()


def test_instances_read_their_shares():
    orders = []
    for process in range(2):
        options = Options().randomSeed(1)
        options.Distributed.configureProcessId(process, 2)
        loader = DataLoader(options, numbers(21), batch_size=2, shuffle=True, **ASYNC)
        orders.append([flat(read(loader)) for _ in range(2)])
        loader.terminate()
    for first, second in zip(*orders, strict=True):
        assert len(set(first) | set(second)) == 20


@pytest.mark.parametrize(("workers", "make"), [(0, Stream), (2, numbers)])
def test_a_data_set_of_whole_batches(workers, make):
    arguments = {"batch_size": None, "num_workers": workers, "worker_init_fn": print_nothing}
    loader = DataLoader(Options().deviceIterations(3), make(5), **arguments, **ASYNC)
    items = [item if make is Stream else item[0] for item in loader]
    assert loader.combinedBatchSize is None
    assert (len(loader), {item.shape for item in items}) == (5, {torch.Size([])})
    loader.terminate()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
def test_single_elements_are_never_short(workers, mode):
    loader = DataLoader(Options(), numbers(5), num_workers=workers, drop_last=False, **mode)
    assert read(loader) == [[0], [1], [2], [3], [4]]
    loader.terminate()


class Shifted(DataLoader):
    """Iterates in a way of its own."""

    def __iter__(self):
        for (batch,) in super().__iter__():
            yield [batch + 100]


@pytest.mark.parametrize("mode", [{}, ASYNC])
def test_a_subclass_changes_each_batch_once(mode):
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = Shifted(Options(), data, batch_size=2, **mode)
    assert read(loader) == [[100, 101], [102, 103]]
    loader.terminate()
    if not mode:
        accessor = AsynchronousDataAccessor(loader, **FORK)
        assert read(accessor) == [[100, 101], [102, 103]]
        accessor.terminate()


def test_a_sleep_time_is_said_to_do_nothing_once(caplog):
    accessor_module._say_no_miss_sleep.cache_clear()
    items = [torch.zeros(1)]
    for options in ({}, {"miss_sleep_time_in_ms": 0.1}, {"miss_sleep_time_in_ms": 0}):
        AsynchronousDataAccessor(items, sharing_strategy="Fork", **options).terminate()
    assert not caplog.messages
    for time in (2, 5.0, 2):
        loader = DataLoader(
            Options(),
            torch.utils.data.TensorDataset(torch.zeros(2, 1)),
            mode=DataLoaderMode.Async,
            async_options={"miss_sleep_time_in_ms": time, "sharing_strategy": "Fork"},
        )
        loader.terminate()
    (message,) = caplog.messages
    assert message.startswith("miss_sleep_time_in_ms has no effect, because the operating system")


def test_every_argument_acts_or_is_said_to_do_nothing():
    # Tests in this file show the effect of the others. Put a new argument into one of the two sets.
    acting = {
        *("dataset", "buffer_size", "load_indefinitely", "early_preload", "sharing_strategy"),
        "rebatched_size",
    }
    assert {*inspect.signature(AsynchronousDataAccessor).parameters} == {
        *acting,
        "miss_sleep_time_in_ms",
    }
