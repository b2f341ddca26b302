"""However replicas are split over instances, batch norms of groups have the same statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from poptorch.group_norms import group_models
from poptorch.group_norms.group_models import Trained

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]
sweep, long = pytest.mark.sweep, pytest.mark.long
PROGRAM = Path(__file__).with_name("split_program.py")

# Replicas, instances, group sizes.
SPLITS = [
    pytest.param(8, 1, (2, 4, 8), marks=long, id="8 on 1"),
    pytest.param(8, 2, (8, 4, 2), marks=sweep, id="8 on 2"),
    pytest.param(8, 4, (2, 4, 8), marks=sweep, id="8 on 4"),
    pytest.param(8, 8, (2, 4, 8), marks=long, id="8 on 8"),
    pytest.param(12, 2, (4,), marks=long, id="12 on 2: a group of both"),
    pytest.param(6, 3, (3,), marks=sweep, id="6 on 3: groups of two"),
]


@pytest.mark.parametrize(("replicas", "instances", "sizes"), SPLITS)
def test_every_split_trains_alike(poprun, warm, tmp_path, replicas, instances, sizes):
    done = poprun(
        "--num-instances", instances, "--num-replicas", replicas, "--oversubscribe",
        *warm, PROGRAM, tmp_path, replicas, *sizes, timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    def found(what, size):
        files = [tmp_path / f"{what}-{size}-{index}.pt" for index in range(instances)]
        return [Trained(*torch.load(file, weights_only=False)) for file in files]

    for size in sizes:
        _assert_same_bits(found("exact", size), replicas, size)
    _assert_by_hand(found("fast", sizes[0]), replicas, sizes[0])


def _assert_same_bits(found, replicas, size):
    """Compare with one process that has all replicas."""
    options = group_models.options_for(
        size, replicas, accumulation=2, dtype=torch.float32, deterministic=True
    )
    alone = group_models.trained("random", options, torch.float32)
    parameters = alone.state.keys() - alone.buffers.keys()
    for each in found:
        assert all(torch.equal(each.state[key], alone.state[key]) for key in parameters)
    losses = torch.cat([each.losses for each in found], 2)
    assert torch.equal(losses, alone.losses)
    for key, buffer in alone.buffers.items():
        assert torch.equal(torch.cat([each.buffers[key] for each in found]), buffer), key


def _assert_by_hand(found, replicas, size):
    """Compare with a loop over groups, each of which is one batch."""
    state, scores = group_models.by_hand("residual", replicas, size)
    for each in found:
        if len(found) > 1:
            assert each.back_end not in ("loop", "fused")
        weights = {key: value for key, value in state.items() if key not in each.buffers}
        own = {key: each.state[key] for key in weights}
        assert group_models.distance(own, weights) < 1e-12
    assert group_models.distance(found[0].state, state) < 1e-12
    assert (torch.cat([each.scores for each in found], 1) - scores).abs().max() < 1e-12
