"""Dataclasses and functions for the optimiser state that programs save, change and load.

The module ``optim.py`` defines the optimisers that programs use. The package ``update`` contains
the optimiser state on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["LoadedState", "Rates", "copied", "writers_of"]

# For each setting of a parameter group that only one optimiser has, the name of the optimiser.
_OWN_SETTINGS: Final = {
    "max_weight_norm": "LAMB",
    "eeta": "LARS",
    "alpha": "RMSprop",
    "dampening": "SGD",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The program's values for the settings that the device stores, such as learning rates.

    Attributes:
        groups: The learning rate, weight decay and dampening of each parameter group.
        loss_scaling: The optimiser's loss scaling, a factor that multiplies the loss.
    """

    groups: tuple[tuple[float, ...], ...]
    loss_scaling: float

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Rates:
        """Return the current rates (such as lr) of an optimiser of torch or of PopTorch."""
        names = ("lr", "weight_decay", "dampening")
        return cls(
            tuple(
                tuple(float(group.get(name, 0.0)) for name in names)
                for group in optimizer.param_groups
            ),
            float(getattr(optimizer, "loss_scaling", 1.0)),
        )


@dataclass(frozen=True, slots=True)
class LoadedState:
    """An optimiser state from load_state_dict() that the device has not received yet.

    Attributes:
        state: The state tensors, by their names on the device.
        settings: The rates, such as learning rates, by their names on the device. The mapping
            ``settings`` is empty if the program has set new rates after it loaded the optimiser
            state.
    """

    state: Mapping[str, torch.Tensor]
    settings: Mapping[str, torch.Tensor]


def copied(tensors: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
    """Return copies of tensors, so that later changes by the program do not affect the copies."""
    if tensors is None:
        return None
    return {name: torch.as_tensor(value).detach().clone() for name, value in tensors.items()}


def writers_of(state_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the optimiser classes whose ``state_dict()`` may have returned a state.

    The returned tuple is empty if the optimiser state does not contain enough information.
    """
    groups = state_dict.get("param_groups") or [{}]
    settings = groups[0]
    for name, writer in _OWN_SETTINGS.items():
        if name in settings:
            return (writer,)
    if "betas" in settings:
        # Old versions of torch do not have the key ``decoupled_weight_decay``.
        decoupled = settings.get("decoupled_weight_decay")
        if decoupled is None:
            return ("Adam", "AdamW")
        return ("AdamW",) if decoupled else ("Adam",)
    kinds = {name.partition("___")[0] for name in state_dict["ipu_param"] or ()}
    if "scaledLearningRate0" in kinds:
        return ("SGD",)
    if "learningRate" in kinds:
        state = {name.partition("___")[0] for name in state_dict["ipu_state"] or ()}
        if "Step" in state:
            return ("Adam", "AdamW", "LAMB")
        return ("LARS", "RMSprop") if state <= {"Accl1"} else ("RMSprop",)
    return ()
