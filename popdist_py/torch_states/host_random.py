"""The states of the random number generators of torch, Python and NumPy on the host."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "host_random",
    "load_host_random",
    "load_python_random",
    "python_random",
]


def host_random() -> dict[str, Any]:
    """Return the states of the random number generators of torch, Python and NumPy.

    Long tuples and lists become tensors, because each of their numbers would take time when a state
    is saved, and states in memory are saved at every step.
    """
    numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "python": python_random(),
        "numpy": {**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}},
    }


def load_host_random(state: Mapping[str, Any]) -> None:
    """Load the states that ``host_random`` returned, or those with lists in older checkpoints."""
    torch.set_rng_state(state["torch"])
    load_python_random(state["python"])
    numpy = state["numpy"]
    key = torch.as_tensor(numpy["state"]["key"]).numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})


def python_random() -> tuple[int, torch.Tensor, float | None]:
    """Return the state of Python's random generator, whose 625 numbers are a tensor."""
    version, numbers, gauss = random.getstate()
    return version, torch.from_numpy(np.array(numbers, np.int64)), gauss


def load_python_random(state: tuple[int, Sequence[int] | torch.Tensor, float | None]) -> None:
    """Load a state that ``python_random`` or ``random.getstate`` returned."""
    version, numbers, gauss = state
    random.setstate((version, tuple(map(int, numbers)), gauss))
