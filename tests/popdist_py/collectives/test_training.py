"""Training over any split of the replicas: equal bits in deterministic mode, and overlap."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("training_program.py")


def weights(poprun, folder, instances, replicas, steps=20, deterministic="yes", **environment):
    """Run the program; return the weights of every instance, and what it printed."""
    folder.mkdir()
    done = poprun(
        "--num-instances", instances, "--num-replicas", replicas, "--oversubscribe", PROGRAM,
        replicas, steps, deterministic, folder, env=environment, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [dict(np.load(folder / f"weights-{i}.npz")) for i in range(instances)]
    return found, done.stdout


@pytest.fixture(scope="module")
def known():
    """The weights of one instance with all replicas, by number of replicas."""
    return {}


def assert_equal_bits(poprun, tmp_path, known, instances, replicas, **environment):
    if replicas not in known:
        known[replicas] = weights(poprun, tmp_path / "one", 1, replicas)[0][0]
    for found in weights(poprun, tmp_path / "split", instances, replicas, **environment)[0]:
        assert found.keys() == known[replicas].keys()
        for name, values in known[replicas].items():
            assert np.array_equal(found[name], values), name
    first = known[replicas]["sgd body.5.weight"]
    assert not np.array_equal(first, known[replicas]["adam body.5.weight"])


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("instances", "replicas", "hosts"), [(2, 8, 1), (4, 12, 1), (4, 8, 2)], ids=str
)
def test_bits_do_not_depend_on_the_split(poprun, tmp_path, known, instances, replicas, hosts):
    assert_equal_bits(poprun, tmp_path, known, instances, replicas, TEST_NUM_HOSTS=str(hosts))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("instances", "replicas"), [(4, 8), (8, 8), (2, 12), (3, 12), (6, 12), (12, 12)], ids=str
)
def test_bits_do_not_depend_on_any_split(poprun, tmp_path, known, instances, replicas):
    assert_equal_bits(poprun, tmp_path, known, instances, replicas)


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_bits_do_not_depend_on_shared_memory(poprun, tmp_path, known):
    assert_equal_bits(poprun, tmp_path, known, 2, 8, POPDIST_SHARED_MEMORY="0")


@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", ["1", "2"])
def test_overlap_reduces_in_backward_and_changes_nothing(poprun, tmp_path, known, hosts):
    expected = weights(poprun, tmp_path / "one", 1, 4, 6, "no")[0][0]
    found, printed = weights(
        poprun, tmp_path / "two", 2, 4, 6, "no", POPDIST_GRADIENT_OVERLAP="1", TEST_NUM_HOSTS=hosts
    )
    for name, values in expected.items():
        # Adam divides by gradients that are zero but for rounding (a bias before BatchNorm).
        if name.startswith("sgd"):
            assert np.allclose(found[0][name], values, rtol=1e-3, atol=1e-5), name
        assert np.array_equal(found[0][name], found[1][name]), name
    counts = re.findall(r"(\d+) of (\d+) buckets in backward", printed)
    assert len(counts) == 2
    for early, everything in counts:
        # All but those of each optimiser's first step, which learns the order.
        assert int(early) == int(everything) * 5 // 6 > 0
