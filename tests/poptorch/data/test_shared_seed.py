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
    torch.manual_seed(3 + 4 * popdist_py.getInstanceIndex())
    shared_seed._announced.clear()

    def make(**arguments):
        return DataLoader(options, DATA, batch_size=2, mode=mode, **arguments)

    with Said() as messages:
        found = {"seed": shared_seed.shared_seed(options)}
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
    return found | {"said": messages}


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
    text = f"the instances share the seed {first['seed']}; set options.randomSeed({first['seed']})"
    assert sum(text in line for line in first["said"] + second["said"]) == 1
    for process, found in enumerate((first, second)):
        options = Options().randomSeed(first["seed"])
        options.Distributed.configureProcessId(process, 2)
        assert epochs_of(DataLoader(options, DATA, 2, shuffle=True)) == found["shuffled"]


@pytest.mark.mpi
def test_a_single_instance_with_the_random_state_of_instance_0_has_the_same_order(job):
    torch.manual_seed(3)
    loader = DataLoader(Options(), DATA, 4, shuffle=True)
    both = [
        [x for i in range(0, 14, 2) for found in job for x in found["shuffled"][epoch][i : i + 2]]
        for epoch in range(2)
    ]
    assert epochs_of(loader) == both


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
    with pytest.raises(AssertionError, match=r"2 processes that nothing connects.*randomSeed\(\)"):
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


def order_of(make, seed):
    torch.manual_seed(seed)
    return epochs_of(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Options(), DATA, shuffle=True),
        lambda: DataLoader(Options(), DATA, sampler=torch.utils.data.RandomSampler(DATA)),
    ],
    ids=["shuffle", "sampler"],
)
def test_the_random_state_decides_the_order_of_a_single_instance(make):
    assert order_of(make, 1) == order_of(make, 1) != order_of(make, 2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), state), "weights made later stay the same"
    assert epochs_of(make()) != epochs_of(make()), "a loader for each epoch has new orders"
