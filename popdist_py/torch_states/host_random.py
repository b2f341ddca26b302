"""The states of the random number generators of torch, Python and NumPy on the host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["host_random", "load_host_random"]


def host_random() -> dict[str, Any]:
    """Return the states of the random number generators of torch, Python and NumPy."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {
            **numpy,
            "state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]},
        },
    }


def load_host_random(state: Mapping[str, Any]) -> None:
    """Load the states that ``host_random`` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
