"""Several instances of one job: shared first weights, and the same bits for every split."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("instances_program.py")


def run(poprun, instances):
    """Return what the instances print: what follows the index, by the line's first word."""
    done = poprun(
        "--num-instances", instances, "--num-replicas", 4, "--oversubscribe", PROGRAM, timeout=150
    )
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for line in done.stdout.splitlines():
        name, index, *values = line.partition(">:")[2].split()
        found[name].append((int(index), *values))
    assert sorted(index for index, _ in found["float"]) == list(range(instances))
    return found


@pytest.fixture(scope="module")
def one(shared_poprun):
    return run(shared_poprun, 1)


@pytest.fixture(scope="module")
def two(shared_poprun):
    return run(shared_poprun, 2)


@pytest.mark.parametrize("dtype", ["float", "half"])
def test_every_split_ends_with_the_same_bits(one, two, dtype):
    assert len(two[dtype]) == 2
    assert len({bits for _, bits in one[dtype] + two[dtype]}) == 1


@pytest.mark.sweep
def test_four_instances_end_with_the_same_bits(poprun, one):
    four = run(poprun, 4)
    for dtype in ("float", "half"):
        assert len(four[dtype]) == 4
        assert len({bits for _, bits in one[dtype] + four[dtype]}) == 1


@pytest.mark.parametrize(
    ("grouping", "sums"),
    [("orthogonal", ("-2.5", "-5.0")), ("alone", ("-0.5", "-1.0", "-2.0", "-4.0"))],
)
def test_weights_grouped_over_the_replicas_of_several_instances(two, grouping, sums):
    assert sorted(two[grouping]) == [(0, *sums), (1, *sums)]
