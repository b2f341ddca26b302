"""A loader that is given the state of another goes on with the very next batch."""

import io
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch.data.loading import ASYNC, FORK, REBATCHED, Stream, flat, numbers, read

from popdist_py.poptorch import AsynchronousDataAccessor, DataLoader, Options
from popdist_py.poptorch.data.samplers import ShardSampler
from popdist_py.sharding import shard

EPOCHS = 3


def saved(state):
    """Return ``state`` from a file that cannot run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def batches_from(loader, epoch):
    """Read the rest of the epochs, while the program draws random numbers of its own."""
    for number in range(epoch, EPOCHS):
        for batch in loader:
            torch.rand(1)
            yield number, (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


def assert_resumes(make, cuts):
    """Cut a loop after each number of batches; a new loader must give what would have followed."""
    for done in cuts:
        torch.manual_seed(done)
        loader = make()
        reader = batches_from(loader, 0)
        before = list(itertools.islice(reader, done))
        state, random = saved(loader.state_dict()), torch.get_rng_state()
        expected = list(reader)
        stop(loader)
        torch.manual_seed(99)
        resumed = make()
        resumed.load_state_dict(state)
        assert saved(resumed.state_dict())["position"] == state["position"]
        torch.set_rng_state(random)
        last = before[-1][0] if before else 0
        assert list(batches_from(resumed, last)) == expected, f"after {done} batches"
        assert resumed.state_dict()["epoch"] == EPOCHS
        stop(resumed)


def stop(loader):
    if isinstance(loader, (DataLoader, AsynchronousDataAccessor)):
        loader.terminate()


class Noisy(torch.utils.data.Dataset):
    """Elements with random numbers of the process that loads them."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index + torch.rand(1, dtype=torch.double)


# How a loader loads.
WAYS = {
    "sync": {},
    "workers": {"num_workers": 2},
    "workers of one epoch": {"num_workers": 2, "persistent_workers": False},
    "async": ASYNC,
    "async workers": {**ASYNC, "num_workers": 2},
    "async workers of one epoch": {**ASYNC, "num_workers": 2, "persistent_workers": False},
}


# Five batches in an epoch: the first of all, within the first, at its end, within the second.
@pytest.mark.parametrize(
    ("way", "cuts"),
    [
        ("sync", (0, 3, 5, 8)),
        ("workers", (3,)),
        ("async", (5,)),
        ("async workers", (3,)),
        pytest.param("async", (0, 8), marks=pytest.mark.sweep),
        pytest.param("workers", (0, 5, 8), marks=pytest.mark.sweep),
        pytest.param("async workers", (0, 5, 8), marks=pytest.mark.sweep),
        pytest.param("workers of one epoch", (0, 3, 5, 8), marks=pytest.mark.sweep),
    ],
)
def test_a_shuffled_epoch_goes_on(way, cuts):
    assert_resumes(
        lambda: DataLoader(Options(), numbers(10), batch_size=2, shuffle=True, **WAYS[way]), cuts
    )


def test_rebatched_items_go_on():
    arguments = {"batch_size": 4, "rebatched_worker_size": 3, "drop_last": False, **REBATCHED}
    assert_resumes(lambda: DataLoader(Options(), numbers(10), shuffle=True, **arguments), (1, 5))


@pytest.mark.parametrize(
    ("way", "cuts"),
    [
        ("sync", (3, 8)),
        ("async", (3, 8)),
        pytest.param("async workers of one epoch", (3,), marks=pytest.mark.sweep),
    ],
)
def test_random_numbers_of_the_data_set_go_on(way, cuts):
    assert_resumes(
        lambda: DataLoader(Options(), Noisy(), batch_size=2, shuffle=True, **WAYS[way]), cuts
    )


@pytest.mark.parametrize("way", ["sync", "async"])
def test_shares_of_instances_go_on(way):
    def make():
        options = Options()
        options.Distributed.configureProcessId(1, 2)
        options.randomSeed(5)
        return DataLoader(options, numbers(23), batch_size=2, shuffle=True, **WAYS[way])

    assert_resumes(make, (3, 7))


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_generator_of_the_program_goes_on(way):
    def make():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Options(), numbers(10), 2, shuffle=True, generator=generator, **WAYS[way])

    assert_resumes(make, (3, 7))


class Counting:
    """A sampler with a state of its own: each pass begins one element later."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([(i + self.passes) % 12 for i in range(12)])

    def __len__(self):
        return 12

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


@pytest.mark.parametrize(("way", "di"), [("sync", 1), ("sync", 2), ("async", 2)])
def test_a_sampler_of_the_program_goes_on(way, di):
    def make():
        batches = torch.utils.data.BatchSampler(Counting(), 2, drop_last=True)
        options = Options().deviceIterations(di)
        return DataLoader(options, numbers(12), batch_sampler=batches, **WAYS[way])

    assert_resumes(make, (2, 8 // di))


@pytest.mark.parametrize(("way", "cuts"), [("sync", (1, 6)), ("workers", (1,)), ("async", (6,))])
def test_a_stream_goes_on(way, cuts):
    assert_resumes(lambda: DataLoader(Options(), Stream(9), batch_size=2, **WAYS[way]), cuts)


def test_an_accessor_of_a_plain_iterable_goes_on():
    source = [torch.tensor([i]) for i in range(5)]
    assert_resumes(lambda: AsynchronousDataAccessor(source, **FORK), (0, 2, 5, 7))


@pytest.mark.parametrize("early_preload", [True, False])
def test_what_was_loaded_ahead_is_left(early_preload):
    def make():
        loader = DataLoader(Options(), numbers(10), batch_size=2, shuffle=True)
        return AsynchronousDataAccessor(loader, early_preload=early_preload, buffer_size=2, **FORK)

    assert_resumes(make, (2, 6))


@pytest.mark.parametrize("early_preload", [True, False])
def test_epochs_shorter_than_the_buffer_are_left(early_preload):
    source = [torch.tensor([i]) for i in range(2)]
    assert_resumes(
        lambda: AsynchronousDataAccessor(source, early_preload=early_preload, **FORK), (1, 2, 3)
    )


@pytest.mark.parametrize("way", ["sync", "workers", "async"])
def test_a_loader_in_use_goes_back(way):
    loader = DataLoader(Options(), numbers(10), batch_size=2, shuffle=True, **WAYS[way])
    first = itertools.islice(loader, 2)
    seen = read(first)
    state = saved(loader.state_dict())
    assert (state["epoch"], state["position"]) == (0, 2)
    others = read(loader)
    loader.load_state_dict(state)
    again = read(loader)
    assert len(again) == 3
    assert sorted(flat(seen + again)) == list(range(10))
    assert len(others) == 5
    assert loader.state_dict()["epoch"] == 1
    loader.terminate()


def test_an_epoch_that_was_left_and_begun_anew_has_a_state():
    loader = DataLoader(Options(), numbers(10), batch_size=2, **ASYNC)
    next(iter(loader))
    batches = iter(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert state["start"] is not None
    assert read(batches) == [[i, i + 1] for i in range(0, 10, 2)]
    loader.terminate()


def test_a_sampler_of_a_share_goes_on():
    share = shard(11, num_processes=2, process=1, step=2, drop_last=True)
    sampler = ShardSampler(range(11), share, 5)
    list(sampler)
    state = saved(sampler.state_dict())
    expected = [list(sampler) for _ in range(2)]
    other = ShardSampler(range(11), share, 6)
    other.load_state_dict(state)
    assert [list(other) for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("way", "before", "now", "rest"),
    [
        ("sync", 3, 1, 0),
        ("sync", 1, 3, 0),
        ("sync", 2, 3, 0),
        ("sync", 1, 2, 2),
        ("async", 2, 3, 0),
        pytest.param("workers", 2, 3, 0, marks=pytest.mark.sweep),
    ],
)
def test_other_device_iterations_go_on_after_as_many_elements(way, before, now, rest, caplog):
    """``rest`` elements of an incomplete batch are read again."""

    def made(iterations):
        options = Options().deviceIterations(iterations).randomSeed(7)
        return DataLoader(options, numbers(26), batch_size=2, shuffle=True, **WAYS[way])

    def of_one_epoch(loader):
        found = flat(read(loader))
        loader.terminate()
        return found

    whole = of_one_epoch(made(1))
    done = 3 if before == 1 else 6 // before
    first = made(before)
    seen = flat(read(itertools.islice(first, done)))
    state = saved(first.state_dict())
    first.terminate()
    assert seen == whole[: 2 * before * done]
    second = made(now)
    second.load_state_dict(state)
    assert saved(second.state_dict())["position"] == 2 * before * done // (2 * now)
    assert of_one_epoch(second) == whole[len(seen) - rest : 26 // (2 * now) * 2 * now]
    said = [record.message for record in caplog.records if "loaded state" in record.message]
    assert len(said) == bool(rest)
    if rest:
        assert (
            "not a multiple of 4, the number of elements in a batch: 2 elements are read again"
            in said[0]
        )


def test_another_number_of_instances_goes_on_after_as_many_elements():
    def made(instances, iterations):
        options = Options().deviceIterations(iterations)
        options.Distributed.configureProcessId(0, instances)
        return DataLoader(options, numbers(24), batch_size=2)

    loader = made(2, 1)
    read(itertools.islice(loader, 3))
    state = saved(loader.state_dict())
    for instances, iterations, position in [(1, 2, 3), (1, 1, 6), (2, 3, 1), (3, 2, 1)]:
        other = made(instances, iterations)
        other.load_state_dict(state)
        assert other.state_dict()["position"] == position
    del state["batch_elements"]  # as earlier versions saved it
    other.load_state_dict(state)
    assert other.state_dict()["position"] == 3


def test_resumes_with_any_numbers_of_instances_read_each_element_once():
    """Hypothesis chooses a seed, the numbers of instances, and where each of them stops."""
    replicas, micro_batch, elements = 8, 2, 150

    def made(instances, seed):
        loaders = []
        for process in range(instances):
            options = Options().replicationFactor(replicas // instances).randomSeed(seed)
            options.Training.gradientAccumulation(2)
            options.Distributed.configureProcessId(process, instances)
            loaders.append(DataLoader(options, numbers(elements), micro_batch, shuffle=True))
        return loaders

    def global_batches(loaders):
        """Join the rows of the instances in the order [accumulation step][replica][micro-batch]."""
        for parts in zip(*loaders, strict=True):
            rows = [torch.stack(part[0].chunk(2)) for part in parts]
            yield torch.cat(rows, 1).flatten().tolist()

    @settings(max_examples=20, deadline=None)
    @given(
        st.integers(0, 1000),
        st.lists(
            st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 5)), min_size=1, max_size=5
        ),
    )
    def check(seed, attempts):
        undisturbed = made(1, seed)
        expected = [batch for _ in range(4) for batch in global_batches(undisturbed)]
        state, found = None, []
        for instances, steps in [*attempts, (1, 4 * 4)]:
            loaders = made(instances, seed)
            for loader in loaders if state else ():
                loader.load_state_dict(state)
            while steps > 0 and len(found) < len(expected):
                part = list(itertools.islice(global_batches(loaders), steps))
                found += part
                steps -= len(part)
            state = saved(loaders[-1].state_dict())
        assert found == expected
        for epoch in range(4):
            read_in_epoch = flat(found[4 * epoch : 4 * epoch + 4])
            assert len(set(read_in_epoch)) == len(read_in_epoch) == 128

    check()


@pytest.mark.parametrize(
    "way",
    [
        {"num_workers": 2},
        ASYNC,
        {**REBATCHED, "rebatched_worker_size": 5},
        pytest.param({**ASYNC, "num_workers": 2}, marks=pytest.mark.sweep),
        pytest.param(
            {**REBATCHED, "rebatched_worker_size": 5, "num_workers": 2}, marks=pytest.mark.sweep
        ),
    ],
    ids=str,
)
def test_every_mode_goes_on_with_the_same_rows_of_another_number_of_instances(way):
    def made(process, processes, **arguments):
        options = Options().replicationFactor(4 // processes).deviceIterations(2).randomSeed(3)
        options.Distributed.configureProcessId(process, processes)
        return DataLoader(options, numbers(100), 2, shuffle=True, **arguments)

    alone = made(0, 1, **way)
    rows = [torch.tensor(batch).view(2, 4, 2) for batch in read(made(0, 1))]
    assert read(itertools.islice(alone, 2)) == [batch.flatten().tolist() for batch in rows[:2]]
    state = saved(alone.state_dict())
    second = made(1, 2, **way)
    second.load_state_dict(state)
    assert read(second) == [batch[:, 2:].flatten().tolist() for batch in rows[2:]]
    alone.terminate()
    second.terminate()


class Loaded(torch.utils.data.Dataset):
    """Counts the elements that are loaded, which draw random numbers of all kinds."""

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.loaded += 1
        return index + torch.rand(1) + random.random() + np.random.rand()


class InWorkers(Loaded):
    """Counts the elements that all worker processes load."""

    def __init__(self):
        self.all_loaded = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        self.loaded = 0
        self.all_loaded += 1
        return super().__getitem__(index)


def batches_of(data, processes=1, **arguments):
    options = Options().randomSeed(3)
    options.Distributed.configureProcessId(processes - 1, processes)
    arguments = {"num_workers": 1, **arguments}
    return DataLoader(options, data, 4, shuffle=True, **arguments)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_go_on_with_their_random_numbers_and_load_nothing_again(persistent):
    loader = batches_of(InWorkers(), persistent_workers=persistent)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert len({round(batch[0][0] % 1, 4) for epoch in epochs for batch in epoch}) == 30
    again = batches_of(InWorkers(), persistent_workers=persistent)
    for _ in range(2):
        list(again)
    list(itertools.islice(again, 6))
    state = saved(again.state_dict())
    resumed = batches_of(InWorkers(), persistent_workers=persistent)
    torch.manual_seed(4)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == epochs[2][6:]
    # Persistent workers begin an epoch when they start, and may load two batches of it.
    assert 16 <= resumed.dataset.all_loaded <= 16 + (8 if persistent else 0)


def test_random_numbers_are_the_same_for_any_number_of_workers():
    def read_with(workers):
        loader = batches_of(InWorkers(), num_workers=workers)
        return [batch.tolist() for batch in loader]

    assert read_with(1) == read_with(2)


def test_workers_of_each_instance_have_random_numbers_of_their_own():
    batches = [next(iter(batches_of(InWorkers(), processes=count))) for count in (1, 2)]
    first, second = (batch.flatten() % 1 for batch in batches)
    assert not torch.isclose(first, second, atol=1e-4).any()


def test_a_worker_init_fn_seeds_the_workers_alone():
    loader = batches_of(InWorkers(), worker_init_fn=seed_with_1, persistent_workers=False)
    epochs = [torch.stack([batch % 1 for batch in loader]) for _ in range(2)]
    torch.testing.assert_close(*epochs, atol=1e-4, rtol=0, msg="nothing else seeds them")
    list(itertools.islice(loader, 6))
    state = saved(loader.state_dict())
    resumed = batches_of(InWorkers(), worker_init_fn=seed_with_1)
    resumed.load_state_dict(state)
    rest = torch.stack([batch % 1 for batch in resumed])
    torch.testing.assert_close(rest, epochs[0][6:], atol=1e-4, rtol=0)
    assert resumed.dataset.all_loaded == 40


def seed_with_1(_):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("di", [1, 3])
def test_without_workers_nothing_is_loaded_again(shuffle, di):
    def made():
        options = Options().deviceIterations(di)
        return DataLoader(options, Loaded(), 3, shuffle=shuffle)

    loader = made()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = saved(loader.state_dict())
    randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = [batch.tolist() for batch in batches]
    resumed = made()
    resumed.load_state_dict(state)
    torch.set_rng_state(randoms[0])
    random.setstate(randoms[1])
    np.random.set_state(randoms[2])
    assert [batch.tolist() for batch in resumed] == expected
    assert resumed.dataset.loaded == 3 * di * len(expected)
    sampled = DataLoader(Options(), Loaded(), 3, sampler=list(range(40)))
    sampled.load_state_dict({**state, "batch_elements": 3})
    next(iter(sampled))
    assert sampled.dataset.loaded == 9, "a sampler of the program may draw random numbers too"


@pytest.mark.parametrize("before", ["global", "contiguous"])
def test_a_state_of_the_other_order_goes_on_in_the_present_order(before):
    def made(order, seed):
        options = Options().randomSeed(seed)
        options.Distributed.configureProcessId(1, 2)
        return DataLoader(options, numbers(24), 2, shuffle=True, distributed_order=order)

    loader = made(before, 3)
    read(loader)
    after = "global" if before == "contiguous" else "contiguous"
    resumed, expected = made(after, 4), made(after, 4)
    resumed.load_state_dict(saved(loader.state_dict()))
    if after == "global":
        read(expected)
    assert read(resumed) == read(expected)


def test_a_state_of_another_kind_of_sampler_is_no_error():
    shuffled = DataLoader(Options(), numbers(10), batch_size=2, shuffle=True)
    plain = DataLoader(Options(), numbers(10), batch_sampler=[[0, 1], [2, 3]])
    plain.load_state_dict(shuffled.state_dict())
    assert read(plain) == [[0, 1], [2, 3]]
