"""A random order without a seed: the instances of a job agree on one, and say so once."""

from __future__ import annotations

import logging

import pytest
import torch

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch import DataLoader, Options
from popdist_py.poptorch.data import shared_seed

DATA = torch.utils.data.TensorDataset(torch.arange(30))


def epochs_of(loader):
    return [[int(x) for (batch,) in loader for x in batch] for _ in range(2)]


class Said(logging.Handler):
    """Keeps the messages of the library's log while it is entered."""

    def __enter__(self):
        self.messages = []
        logging.getLogger("poptorch::python").addHandler(self)
        return self.messages

    def __exit__(self, *_):
        logging.getLogger("poptorch::python").removeHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def _found(mode):
    """Read shuffled data without a seed of its own; return what was read and said."""
    options = poptorch.DistributedOptions()
    mode = poptorch.DataLoaderMode[mode]
    own_state = 3 + 4 * popdist_py.getInstanceIndex()
    shared_seed._announced.clear()

    def make(**arguments):
        return DataLoader(options, DATA, batch_size=2, mode=mode, **arguments)

    with Said() as messages:
        torch.manual_seed(own_state)
        found = {"seed": shared_seed.shared_seed(options)}
        torch.manual_seed(own_state)
        loaders = [make(shuffle=True) for _ in range(3)]
        found["several"] = [epochs_of(loader) for loader in loaders]
        torch.manual_seed(own_state)
        loader = make(shuffle=True)
        saved = loader.state_dict()
        found["shuffled"] = epochs_of(loader)
        found["sampler"] = epochs_of(make(sampler=torch.utils.data.RandomSampler(DATA)))
    # Like a later run: it draws another seed, and goes on with the order that was saved.
    torch.manual_seed(8)
    resumed = make(shuffle=True)
    resumed.load_state_dict(saved)
    found |= {"later seed": shared_seed.shared_seed(options), "resumed": epochs_of(resumed)}
    # One instance that is alone in a call agrees with itself, and waits for nobody.
    found["alone"] = popdist_py.execute_on_instances({1}, shared_seed.shared_seed, options)
    return found | {"said": messages, "mode": mode}


@pytest.fixture(scope="module", params=["Sync", pytest.param("Async", marks=pytest.mark.sweep)])
def job(request, instances):
    return instances.run(_found, request.param)


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["shuffled", "sampler"])
def test_instances_share_one_order(job, what):
    first, second = (found[what] for found in job)
    for epoch in range(2):
        assert len(first[epoch]) == len(second[epoch]) == 14
        assert not set(first[epoch]) & set(second[epoch]), "every element is read once"
    assert first[0] != first[1], "every epoch has an order of its own"


@pytest.mark.mpi
def test_the_seed_is_said_once_and_repeats_the_order(job):
    first, second = job
    assert first["seed"] == second["seed"]
    text = f"instances use the seed {first['seed']}, which instance 0 has drawn"
    assert sum(text in line for line in first["said"] + second["said"]) == 1
    for process, found in enumerate((first, second)):
        options = Options().randomSeed(first["seed"])
        options.Distributed.configureProcessId(process, 2)
        assert epochs_of(DataLoader(options, DATA, 2, shuffle=True)) == found["shuffled"]


@pytest.mark.mpi
def test_a_single_instance_with_the_random_state_of_instance_0_has_the_same_orders(job):
    torch.manual_seed(3)
    loaders = [DataLoader(Options(), DATA, 4, shuffle=True, mode=job[0]["mode"]) for _ in range(3)]
    for number, loader in enumerate(loaders):
        shares = [found["several"][number] for found in job]
        both = [
            [x for i in range(0, 14, 2) for share in shares for x in share[epoch][i : i + 2]]
            for epoch in range(2)
        ]
        assert epochs_of(loader) == both


@pytest.mark.mpi
def test_instances_read_each_of_several_loaders_in_another_order(job):
    for found in job:
        first, *_ = found["several"]
        assert first == found["shuffled"]
        epochs = [tuple(epoch) for loader in found["several"] for epoch in loader]
        assert len(set(epochs)) == 6


@pytest.mark.mpi
def test_a_saved_order_goes_on_whatever_a_later_run_draws(job):
    for found in job:
        assert found["later seed"] != found["seed"]
        assert found["resumed"] == found["shuffled"]


@pytest.mark.mpi
def test_an_instance_that_is_called_alone_waits_for_nobody(job):
    first, second = job
    assert first["alone"] is None
    assert isinstance(second["alone"], int)


def test_processes_that_nothing_connects_need_a_seed():
    options = Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match=r"2 processes, .* not connected.*randomSeed\(\)"):
        DataLoader(options, DATA, shuffle=True)
    # A sampler's order is the program's own matter then.
    sampler = torch.utils.data.RandomSampler(DATA)
    DataLoader(options, DATA, sampler=sampler)
    assert sampler.generator is None


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_holds_for_samplers_whatever_an_instance_draws_besides(seed):
    shares = []
    for process in range(2):
        options = Options().randomSeed(seed)
        options.Distributed.configureProcessId(process, 2)
        loader = DataLoader(options, DATA, sampler=torch.utils.data.RandomSampler(DATA))
        epochs = []
        for _ in range(2):
            torch.rand(1 + process)  # such as for samples that one instance shows
            epochs.append([int(x) for (batch,) in loader for x in batch])
        assert epochs[0] != epochs[1]
        shares.append(epochs)
    for first, second in zip(*shares, strict=True):
        assert sorted(first + second) == list(range(30))


MODES = [poptorch.DataLoaderMode.Sync, poptorch.DataLoaderMode.Async]
SINGLE = {
    "shuffle": lambda mode: DataLoader(Options(), DATA, mode=mode, shuffle=True),
    "sampler": lambda mode: DataLoader(
        Options(), DATA, mode=mode, sampler=torch.utils.data.RandomSampler(DATA)
    ),
}


@pytest.mark.parametrize("mode", MODES, ids=["Sync", "Async"])
@pytest.mark.parametrize("what", SINGLE)
def test_the_random_state_decides_the_orders_of_a_single_instance(what, mode):
    def orders_from(seed):
        torch.manual_seed(seed)
        loaders = [SINGLE[what](mode) for _ in range(2)]
        made_anew = [epochs_of(SINGLE[what](mode)) for _ in range(2)]
        return [tuple(epoch) for loader in loaders for epoch in epochs_of(loader)] + [
            tuple(epoch) for epochs in made_anew for epoch in epochs
        ]

    orders = orders_from(1)
    assert orders == orders_from(1)
    assert len({*orders, *orders_from(2)}) == 16, "each epoch of each loader has its own order"


def test_a_loader_with_a_seed_or_without_shuffle_leaves_the_random_state_as_it_is():
    seeded = Options().randomSeed(1)  # seeds torch, too
    state = torch.get_rng_state()
    DataLoader(seeded, DATA, shuffle=True)
    DataLoader(Options(), DATA)
    assert torch.equal(torch.get_rng_state(), state), "weights made later stay the same"


@pytest.mark.parametrize("resumes_in", [1, 2])
@pytest.mark.parametrize("number", [0, 1])
def test_a_resume_goes_on_with_the_order_of_an_interrupted_epoch(number, resumes_in):
    torch.manual_seed(6)
    loaders = [DataLoader(Options(), DATA, 4, shuffle=True) for _ in range(2)]
    batches = iter(loaders[number])
    for _ in range(3):
        next(batches)
    saved = loaders[number].state_dict()
    expected = [int(x) for (batch,) in batches for x in batch]
    torch.manual_seed(7)
    shares = []
    for process in range(resumes_in):
        options = Options()
        if resumes_in > 1:
            # Another seed, which the state replaces, as the draw of another job does.
            options.randomSeed(5).Distributed.configureProcessId(process, resumes_in)
        resumed = DataLoader(options, DATA, 4 // resumes_in, shuffle=True)
        resumed.load_state_dict(saved)
        shares.append([[int(x) for x in batch] for (batch,) in resumed])
    rest = [x for batches in zip(*shares, strict=True) for batch in batches for x in batch]
    assert rest == expected
