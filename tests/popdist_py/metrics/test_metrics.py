"""Metrics of one instance: what is accepted, reduced, kept, and handed to the sinks."""

from __future__ import annotations

import logging
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import popdist_py
from popdist_py.metrics.accumulated import Accumulated, merged

KINDS = {"samples": "sum", "fastest": "min", "slowest": "max", "lr": "last"}


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.rows = []
        self.closed = 0

    def write(self, step, values):
        self.rows.append((step, values))

    def close(self):
        self.closed += 1


class Broken:
    def write(self, step, values):
        values.clear()  # what a sink does with its values is its own matter
        raise OSError("disk full")

    def close(self):
        raise RuntimeError("no")


class Endless:
    """A sink without ``close``."""

    def write(self, step, values):
        pass


def test_means_are_weighted_and_all_else_is_not():
    metrics = popdist_py.Metrics(reductions=KINDS)
    for n in (1, 3):
        values = {"samples": n, "fastest": n, "slowest": n, "lr": n, "train/loss": n}
        metrics.update(values, loss=n, weight=n)
    expected = {
        "samples": 4, "fastest": 1, "slowest": 3, "lr": 3, "train/loss": 2.5, "loss": 2.5
    }  # fmt: skip
    assert metrics.compute() == expected
    assert metrics.compute() == expected  # it does not forget
    assert list(metrics.compute()) == list(expected)


@pytest.mark.parametrize(
    "value",
    [
        3, 3.0, Fraction(3), np.float32(3), np.array(3), np.array([2, 4]), torch.tensor(3),
        torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor([[2.0, 4.0]], requires_grad=True),
        torch.nn.Parameter(torch.tensor(3.0)), torch.tensor([True, True]) * 3,
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)  # fmt: skip
def test_what_counts_as_a_number(value):
    metrics = popdist_py.Metrics()
    metrics.update(x=value)
    (found,) = metrics.compute().values()
    assert (found, type(found)) == (3.0, float)


def test_elements_are_reduced_as_the_name_is():
    metrics = popdist_py.Metrics(reductions=KINDS)
    for array in (np.array([1, 2, 6]), torch.tensor([1, 2, 6])):
        metrics.update(samples=array, fastest=array, slowest=array, lr=array, loss=array)
        metrics.update(samples=array[:0], fastest=array[:0], loss=array[:0])  # an empty batch
        found = metrics.log(0)
        assert found == {"samples": 9, "fastest": 1, "slowest": 6, "lr": 3, "loss": 3}


def test_many_small_numbers_beside_a_large_one_are_counted_in_64_bits():
    metrics = popdist_py.Metrics(reductions={"sum": "sum"})
    metrics.update(sum=torch.tensor(2.0**25))
    for _ in range(2500):
        metrics.update(sum=torch.tensor(1.0))
    assert metrics.compute() == {"sum": 2.0**25 + 2500}


def test_a_tensor_on_a_device_is_not_read_before_it_is_needed():
    metrics = popdist_py.Metrics()
    lost = torch.empty(3, device="meta")  # reading it is an error
    metrics.update(loss=lost)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        metrics.compute()


def test_nothing_of_a_graph_is_kept():
    metrics = popdist_py.Metrics()
    metrics.update(loss=torch.ones(3, requires_grad=True).sum())
    assert all(type(number) is float for _, number, _ in metrics._waiting)


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_is_not_lost(reduction, order):
    metrics = popdist_py.Metrics(reductions={"x": reduction})
    for value in order:
        metrics.update(x=value)
    assert math.isnan(metrics.compute()["x"])


def test_what_has_no_weight_does_not_count():
    metrics = popdist_py.Metrics(reductions=KINDS)
    metrics.update(loss=math.nan, slowest=9, weight=0)
    assert metrics.compute() == {}
    metrics.update(loss=2)
    assert metrics.compute() == {"loss": 2}


def test_every_step_begins_anew():
    kept = Kept()
    metrics = popdist_py.Metrics(kept)
    metrics.update(loss=2)
    assert metrics.log(np.int64(10)) == {"loss": 2}
    assert metrics.log(11) == {}  # nothing was given: nothing is written
    metrics.update(loss=4)
    metrics.log(12)
    metrics.update(loss=5)
    metrics.reset()
    assert metrics.compute() == {}
    assert kept.rows == [(10, {"loss": 2}), (12, {"loss": 4})]


def test_a_sink_that_fails_is_told_once_and_harms_nobody(caplog):
    kept = Kept()
    with popdist_py.Metrics([Broken(), kept, Broken()]) as metrics:
        for step in range(3):
            metrics.update(loss=step)
            assert metrics.log(step) == {"loss": step}
    assert kept.rows == [(step, {"loss": step}) for step in range(3)]
    assert kept.closed == 1
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert all("failed to write step 0: OSError: disk full; training continues" in t for t in told)


def test_state_is_carried_over():
    metrics = popdist_py.Metrics(reductions=KINDS)
    metrics.update(loss=torch.tensor(1.0), samples=3, weight=3)
    state = metrics.state_dict()
    again = popdist_py.Metrics(reductions=KINDS)
    again.update(loss=100)
    again.load_state_dict(state)
    again.update(loss=5, samples=1, weight=1)
    assert again.compute() == {"loss": 2, "samples": 4}


def test_a_checkpoint_takes_the_state(tmp_path):
    torch.save(popdist_py.Metrics().state_dict(), tmp_path / "state")
    metrics = popdist_py.Metrics()
    metrics.update(loss=1)
    torch.save(metrics.state_dict(), tmp_path / "state")
    metrics.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert metrics.compute() == {"loss": 1}


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda m: m.update(name="abc"), TypeError, r"'name' is a str, 'abc': expected a number"),
        (lambda m: m.update(x=[1, 2]), TypeError, r"'x' is a list, \[1, 2\]: expected a number"),
        (lambda m: m.update(x=None), TypeError, "'x' is a NoneType, None: expected a number"),
        (lambda m: m.update(x=np.array(["a"])), TypeError, "'x' is a ndarray"),
        (lambda m: m.update(x=torch.ones(2) * 1j), TypeError, "not elements of the type torch.c"),
        (lambda m: m.update(x=np.ones(2) * 1j), TypeError, "not elements of the type complex128"),
        (lambda m: m.update(x=np.array([None])), TypeError, "not elements of the type object"),
        (lambda m: m.update(x=10**400), TypeError, "too large for a float$"),
        (lambda m: m.update(x=torch.eye(2).to_sparse()), TypeError, "with the layout torch.s"),
        (lambda m: m.update({"x": 1}, x=2), ValueError, "update: the metric 'x' is given twice"),
        (lambda m: m.update(3), TypeError, r"update\(3\): expected a mapping"),
        (lambda m: m.load_state_dict({}), ValueError, r"load_state_dict\({}\): expected a state"),
        (
            lambda m: m.load_state_dict({"so_far": {"x": [1]}}), ValueError,
            "expected a state from Metrics",
        ),
        (lambda m: m.update(x=1, weight=-1), ValueError, "weight=-1.: expected a finite number"),
        (lambda m: m.update(x=1, weight=math.nan), ValueError, "weight=nan"),
        (lambda m: m.update(x=1, weight="abc"), ValueError, "weight='abc'.: expected a finite"),
        (lambda m: m.update(x=1, weight=np.ones(2)), ValueError, r"weight=array\(\[1., 1.\]\)"),
        (lambda m: m.update(step=1), ValueError, "name 'step' is invalid: expected a string"),
        (lambda m: m.update({3: 1}), ValueError, "name 3 is invalid: expected a string"),
        (lambda m: m.log(1.5), TypeError, r"log\(step=1.5\): expected an integer"),
        (
            lambda _: popdist_py.Metrics(reductions={"x": "median"}), ValueError,
            r"reductions=\{'x': 'median'\}\): expected one of mean, sum, min, max, last",
        ),
        (lambda _: popdist_py.Metrics("metrics.csv"), TypeError, "'m' is not a sink: expected"),
        (lambda _: popdist_py.Metrics([popdist_py.CsvSink]), TypeError, "is not a sink"),
        (lambda _: popdist_py.Metrics(Endless()), TypeError, r"methods write\(\) and close\(\)"),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make(popdist_py.Metrics())


def test_an_update_that_is_refused_adds_nothing():
    metrics = popdist_py.Metrics()
    with pytest.raises(TypeError):
        metrics.update(loss=1, name="abc")
    assert metrics.compute() == {}


NUMBERS = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=1, max_size=20)


@given(NUMBERS, st.integers(1, 5), st.sampled_from(["mean", "sum", "min", "max"]))
def test_instances_together_give_what_one_would(numbers, instances, reduction):
    parts = []
    for instance in range(instances):
        own = [
            Accumulated.of(reduction, float(v), float(w)) for v, w in numbers[instance::instances]
        ]
        if own:
            parts.append(merged(own))
    values = [value for value, _ in numbers]
    expected = {
        "mean": np.average(values, weights=[weight for _, weight in numbers]),
        "sum": sum(values),
        "min": min(values),
        "max": max(values),
    }[reduction]
    assert merged(parts).result == pytest.approx(expected)
