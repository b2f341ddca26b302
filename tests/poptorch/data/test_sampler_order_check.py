"""Samplers of the program's own that draw another order on each instance are noticed."""

from __future__ import annotations

import logging

import pytest
import torch
from poptorch.data.loading import ASYNC, numbers, read

from popdist_py.poptorch import DataLoader, Options
from popdist_py.poptorch.data import sampler_order_check, samplers


class Everyone:
    """Stands for the communicator of one instance: hands on what the others have noted."""

    num_instances, instances = 2, (0, 1)

    def __init__(self, index, others):
        self.instance_index = index
        self._others = others

    def all_gather_object(self, value, name):
        self._others[self.instance_index] = value
        return list(self._others)


class Shuffled(torch.utils.data.Sampler):
    """Draws from a generator that the loader does not know of."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 24

    def __iter__(self):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.seed))
        return iter(order.tolist())


def torchs(seed):
    return torch.utils.data.RandomSampler(
        numbers(24), generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture(autouse=True)
def nothing_is_noted(monkeypatch):
    monkeypatch.setattr(sampler_order_check, "_drawn", [])


def said(caplog, monkeypatch, seeds, make, mode):
    """Return the warnings after each of two instances has read an epoch, in this process."""
    caplog.set_level(logging.WARNING, "poptorch::python")
    noted = [(), ()]
    for process in (1, 0):
        monkeypatch.setattr(samplers, "_numbers", iter(range(10)))
        options = Options()
        options.Distributed.configureProcessId(process, 2)
        loader = DataLoader(options, numbers(24), 4, sampler=make(seeds[process]), **mode)
        for _ in range(2):
            read(loader)
        loader.terminate()
        sampler_order_check.check(Everyone(process, noted))
    return caplog.text


@pytest.mark.parametrize(("make", "mode"), [(Shuffled, ASYNC), (torchs, {})])
def test_another_order_on_each_instance_is_said(caplog, monkeypatch, make, mode):
    text = said(caplog, monkeypatch, (1, 2), make, mode)
    assert text.count("draws different orders on instance 0 and on instance 1") == 1
    assert ("Shuffled" if make is Shuffled else "RandomSampler") in text


@pytest.mark.parametrize("mode", [{}, ASYNC])
def test_one_order_is_right(caplog, monkeypatch, mode):
    assert said(caplog, monkeypatch, (3, 3), Shuffled, mode) == ""


def test_other_loaders_of_an_instance_are_not_taken_for_the_same(caplog):
    noted = [(), (sampler_order_check.DrawnOrder.of(0, Shuffled(1), [3, 1]),)]
    for other in (sampler_order_check.DrawnOrder.of(0, [], [1, 3]),
                  sampler_order_check.DrawnOrder.of(1, Shuffled(1), [1, 3]),
                  sampler_order_check.DrawnOrder.of(0, Shuffled(1), [1, 3, 2])):  # fmt: skip
        sampler_order_check.note(other)
        sampler_order_check.check(Everyone(0, noted))
    assert caplog.text == ""
