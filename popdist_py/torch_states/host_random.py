"""The states of the random number generators of torch, Python and NumPy on the host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["host_random", "host_random_tensors", "load_host_random"]


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


def host_random_tensors() -> dict[str, Any]:
    """Return the same states as ``host_random``, with tensors in place of long tuples and lists.

    Each number in a tuple takes time when a state is saved, and states in memory are saved at every
    step.
    """
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "python": (version, torch.from_numpy(np.array(numbers, np.int64)), gauss),
        "numpy": {**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}},
    }


def load_host_random(state: Mapping[str, Any]) -> None:
    """Load the states that ``host_random`` or ``host_random_tensors`` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(map(int, numbers)), gauss))
    numpy = state["numpy"]
    key = torch.as_tensor(numpy["state"]["key"]).numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
