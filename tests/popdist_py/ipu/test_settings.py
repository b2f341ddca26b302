"""Settings: errors for invalid values, and the micro-batches whose outputs a call returns."""

from __future__ import annotations

import pytest

from popdist_py.ipu.settings import Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation": 0}, "accumulation is 0"),
        ({"is_training": False, "accumulation": 2}, "expected 1 for inference"),
        ({"io_tiles": 33}, "an even number"),
        ({"io_tiles": 30}, "from 32 to 192"),
        ({"io_tiles": 1472}, "from 32 to 192"),
        ({"io_tiles": -32}, "io_tiles is -32"),
        ({"overlaps_io": True}, "io_tiles is 0"),
        (
            {"memory_proportion": (0.5, 0)},
            "memory_proportion is .*: expected numbers that are above 0",
        ),
        (
            {"matmul_proportion": (0.5, 1.5)},
            "matmul_proportion is .*: expected numbers that are above 0",
        ),
        ({"output_return_period": 0}, "output_return_period is 0"),
        (
            {"output_mode": "every n", "output_return_period": 3, "device_iterations": 4},
            "a divisor of device_iterations, which is 4",
        ),
    ],
    ids=str,
)
def test_invalid_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"accumulation": 5}, 1),
        ({"accumulation": 5, "output_mode": "all"}, 20),
        ({"accumulation": 5, "output_mode": "sum"}, 1),
        ({"accumulation": 5, "output_mode": "every n", "output_return_period": 2}, 10),
        ({"is_training": False}, 4),
        ({"is_training": False, "output_mode": "final"}, 1),
        ({"is_training": False, "output_mode": "every n", "output_return_period": 4}, 1),
    ],
    ids=str,
)
def test_micro_batches_whose_outputs_a_call_returns(options, count):
    assert Settings(device_iterations=4, **options).returned_micro_batches == count
