"""A training ends with the same bits for any number of instances, also where it resumes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
TRAINING = Path(__file__).with_name("any_split_program.py")
# The last step of a short and of a long training. An epoch has 3 steps.
SHORT, LONG = 5, 19


@pytest.fixture(scope="module")
def train(shared_poprun, warm, tmp_path_factory):
    """Run a training as jobs of (instances, last step, workers); return digest and losses."""

    def run(*jobs):
        folder = tmp_path_factory.mktemp("any-split")
        for instances, last_step, workers in jobs:
            counts = ("--num-instances", str(instances), "--num-replicas", "8", "--oversubscribe")
            done = shared_poprun(
                *counts, *warm, TRAINING, folder, str(last_step), str(workers), timeout=200
            )
            assert done.returncode == 0, done.stderr
        return (folder / "digest").read_text(), losses_in(folder)

    return run


def losses_in(folder):
    """Return the losses of every step, with one row for all replicas per micro-batch."""
    parts = {}
    for path in folder.glob("losses-*.json"):
        step, index, count = re.findall(r"\d+", path.stem)
        rows = json.loads(path.read_text())
        assert all(len(row) == 8 // int(count) for row in rows)
        parts.setdefault(int(step), {})[int(index)] = rows
    return {step: joined([of[index] for index in sorted(of)]) for step, of in parts.items()}


def joined(instances):
    """Join the losses of each micro-batch over all instances, in the order of the replicas."""
    return [list(itertools.chain(*rows)) for rows in zip(*instances, strict=True)]


@pytest.fixture(scope="module")
def short(train):
    digest, losses = train((1, SHORT, 0))
    assert sorted(losses) == list(range(1, SHORT + 1))
    assert len({loss for rows in losses.values() for row in rows for loss in row}) > 100
    return digest, losses


@pytest.fixture(scope="module")
def long(train):
    return train((1, LONG, 0))


@pytest.mark.parametrize(
    ("instances", "workers"),
    [(2, 1), *(pytest.param(count, 1, marks=pytest.mark.long) for count in (4, 8))],
)
def test_every_number_of_instances_ends_with_the_same_bits(train, short, instances, workers):
    assert train((instances, SHORT, workers)) == short


def test_other_numbers_of_instances_go_on_within_an_epoch(train, short):
    assert train((2, 1, 1), (1, 2, 0), (4, 4, 0), (1, SHORT, 1)) == short


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_number_of_instances_goes_on_from_every_other(train, long):
    """Each of 1, 2, 4 and 8 follows each other one, in the middle of an epoch."""
    numbers = (1, 2, 1, 4, 1, 8, 2, 4, 2, 8, 4, 8, 1)
    assert len(set(itertools.pairwise(numbers))) == 12
    stops = [step for step in range(1, LONG + 1) if step % 3]
    assert train(*zip(numbers, stops, (i % 2 for i in range(13)), strict=True)) == long
