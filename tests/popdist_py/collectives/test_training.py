"""Training has equal bits over any split of the replicas, and calls overlap with computation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("training_program.py")
TWELVE = "TEST_REPLICAS=12"
BRIEFLY = "TEST_REPLICAS=4,TEST_STEPS=6,TEST_DETERMINISTIC=no"
OVERLAPPED = f"{BRIEFLY},POPDIST_GRADIENT_OVERLAP=1"


def train(poprun, warm, folder, instances, *ways):
    """Train in each way; return the weights of every instance by way, and the output."""
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe",
        *warm, PROGRAM, folder, *ways, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        way: [dict(np.load(folder / f"weights-{number}-{i}.npz")) for i in range(instances)]
        for number, way in enumerate(ways)
    }
    return found, done.stdout


@pytest.fixture(scope="module")
def alone(shared_poprun, warm, tmp_path_factory):
    """The weights of one instance with all replicas."""
    found, _ = train(shared_poprun, warm, tmp_path_factory.mktemp("one"), 1, "", BRIEFLY)
    return {way: weights for way, (weights,) in found.items()}


@pytest.fixture(scope="module")
def of_two(shared_poprun, warm, tmp_path_factory):
    """The weights and the output of two instances."""
    ways = ("", "POPDIST_SHARED_MEMORY=0", OVERLAPPED, f"{OVERLAPPED},TEST_NUM_HOSTS=2")
    return train(shared_poprun, warm, tmp_path_factory.mktemp("two"), 2, *ways)


@pytest.fixture(scope="module")
def of_four(shared_poprun, warm, tmp_path_factory):
    """The weights of four instances on one host and on two hosts."""
    folder = tmp_path_factory.mktemp("four")
    return train(shared_poprun, warm, folder, 4, "", "TEST_NUM_HOSTS=2")[0]


def assert_equal_bits(instances, expected):
    for found in instances:
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert np.array_equal(found[name], values), name
    assert not np.array_equal(expected["sgd body.5.weight"], expected["adam body.5.weight"])


@pytest.mark.sweep
def test_bits_do_not_depend_on_the_split(of_two, alone):
    assert_equal_bits(of_two[0][""], alone[""])


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["", "TEST_NUM_HOSTS=2"], ids=["one host", "two hosts"])
def test_bits_of_four_instances_do_not_depend_on_hosts(of_four, alone, way):
    assert_equal_bits(of_four[way], alone[""])


@pytest.mark.sweep
def test_bits_do_not_depend_on_shared_memory(of_two, alone):
    assert_equal_bits(of_two[0]["POPDIST_SHARED_MEMORY=0"], alone[""])


@pytest.mark.long
def test_eight_instances_end_with_the_bits_of_one(poprun, warm, tmp_path, alone):
    assert_equal_bits(train(poprun, warm, tmp_path, 8, "")[0][""], alone[""])


@pytest.fixture(scope="module")
def alone_with_12(shared_poprun, warm, tmp_path_factory):
    """The weights of one instance with twelve replicas."""
    found, _ = train(shared_poprun, warm, tmp_path_factory.mktemp("one"), 1, TWELVE)
    return found[TWELVE][0]


@pytest.mark.long
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    "instances",
    [
        3,
        6,
        *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4, 12)),
    ],
)
def test_bits_do_not_depend_on_any_split_of_12(poprun, warm, tmp_path, alone_with_12, instances):
    assert_equal_bits(train(poprun, warm, tmp_path, instances, TWELVE)[0][TWELVE], alone_with_12)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "way", [OVERLAPPED, f"{OVERLAPPED},TEST_NUM_HOSTS=2"], ids=["one host", "two hosts"]
)
def test_overlap_reduces_in_backward_and_changes_nothing(of_two, alone, way):
    found, printed = of_two[0][way], of_two[1]
    for name, values in alone[BRIEFLY].items():
        # Adam divides by gradients that are zero but for rounding (a bias before BatchNorm).
        if name.startswith("sgd"):
            assert np.allclose(found[0][name], values, rtol=1e-3, atol=1e-5), name
        assert np.array_equal(found[0][name], found[1][name]), name
    counts = re.findall(rf"\[{way}\] (\d+) of (\d+) buckets in backward", printed)
    assert len(counts) == 2
    for early, everything in counts:
        # These are all calls except those of each optimiser's first step, which records the order.
        assert int(early) == int(everything) * 5 // 6 > 0
