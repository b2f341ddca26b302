"""However 8 replicas are split over instances, training ends with a whole-batch loop's weights."""

from __future__ import annotations

import numpy as np
import pytest
from system import parity_program

pytestmark = pytest.mark.mpi
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("instances", [1, 2, 4, 8])
def test_split_ends_with_the_weights_of_one_process(poprun, warm, tmp_path, instances):
    import torch

    done = poprun(
        "--num-instances", instances, "--num-replicas", parity_program.REPLICAS, "--oversubscribe",
        *warm, parity_program.__file__, tmp_path, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for dtype, tolerance in TOLERANCE.items():
        expected = parity_program.reference(getattr(torch, dtype))
        found = [np.load(tmp_path / f"weights-{dtype}-{i}.npz") for i in range(instances)]
        for name, weights in expected.items():
            error = np.linalg.norm(found[0][name] - weights) / np.linalg.norm(weights)
            assert error <= tolerance, (dtype, name)
            for other in found[1:]:
                assert np.array_equal(found[0][name], other[name]), f"{name} differs"


def test_training_moves_the_weights_that_parity_compares():
    import torch

    net, _, _ = parity_program.model_and_data(torch.float64)
    trained = parity_program.reference(torch.float64)
    moved = [
        np.linalg.norm(trained[name] - p.detach().numpy()) for name, p in net.named_parameters()
    ]
    assert min(moved) > 1e-3
