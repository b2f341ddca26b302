"""A random order without a seed: the instances of a job agree on one, and say so once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from poptorch.data.loading import flat, read

from popdist_py.poptorch import DataLoader, Options

PROGRAM = Path(__file__).with_name("seed_program.py")


@pytest.fixture(scope="module", params=["Sync", pytest.param("Async", marks=pytest.mark.sweep)])
def job(request, shared_poprun):
    done = shared_poprun("--num-instances", 2, "--num-replicas", 4, PROGRAM, request.param)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("<stdout>:", 1) for line in done.stdout.splitlines())
    return [json.loads(lines[f"[1,{index}]"]) for index in range(2)], done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["shuffled", "sampler"])
def test_instances_share_one_order(job, what):
    first, second = (found[what] for found in job[0])
    for epoch in range(2):
        assert len(first[epoch]) == len(second[epoch]) == 14
        assert not set(first[epoch]) & set(second[epoch]), "every element is read once"
    assert first[0] != first[1], "every epoch has an order of its own"


@pytest.mark.mpi
def test_the_seed_is_said_once_and_repeats_the_order(job):
    (first, second), stderr = job
    assert first["seed"] == second["seed"]
    text = f"the instances share the seed {first['seed']}; set options.randomSeed({first['seed']})"
    assert stderr.count(text) == 1
    for process, found in enumerate((first, second)):
        options = Options().randomSeed(first["seed"])
        options.Distributed.configureProcessId(process, 2)
        data = torch.utils.data.TensorDataset(torch.arange(30))
        loader = DataLoader(options.replicationFactor(2), data, shuffle=True)
        assert [flat(read(loader)), flat(read(loader))] == found["shuffled"]


@pytest.mark.mpi
def test_a_saved_order_goes_on_whatever_a_later_run_draws(job):
    for found in job[0]:
        assert found["later seed"] != found["seed"]
        assert found["resumed"] == found["shuffled"]


@pytest.mark.mpi
def test_an_instance_that_is_called_alone_waits_for_nobody(job):
    first, second = job[0]
    assert first["alone"] is None
    assert isinstance(second["alone"], int)


def test_processes_that_nothing_connects_need_a_seed():
    options = Options()
    options.Distributed.configureProcessId(0, 2)
    data = torch.utils.data.TensorDataset(torch.arange(30))
    with pytest.raises(AssertionError, match=r"2 processes that nothing connects.*randomSeed\(\)"):
        DataLoader(options, data, shuffle=True)
    # A sampler's order is the program's own matter then.
    sampler = torch.utils.data.RandomSampler(data)
    DataLoader(options, data, sampler=sampler)
    assert sampler.generator is None


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_holds_for_samplers_whatever_an_instance_draws_besides(seed):
    data = torch.utils.data.TensorDataset(torch.arange(30))
    shares = []
    for process in range(2):
        options = Options().randomSeed(seed)
        options.Distributed.configureProcessId(process, 2)
        loader = DataLoader(options, data, sampler=torch.utils.data.RandomSampler(data))
        epochs = []
        for _ in range(2):
            torch.rand(1 + process)  # such as for samples that one instance shows
            epochs.append(flat(read(loader)))
        assert epochs[0] != epochs[1]
        shares.append(epochs)
    for first, second in zip(*shares, strict=True):
        assert sorted(first + second) == list(range(30))
