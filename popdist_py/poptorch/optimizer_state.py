"""An optimiser's state as programs save, change and load it: values, without any optimiser's code.

The objects that programs hold are in ``optim.py``; the device's own state is in ``update/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["LoadedState", "Rates", "copied", "writers_of"]

# Settings of a group that one optimiser alone has.
_OWN_SETTINGS: Final = {
    "max_weight_norm": "LAMB",
    "eeta": "LARS",
    "alpha": "RMSprop",
    "dampening": "SGD",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """A program's own values of what the device keeps in ``ipu_param``.

    Attributes:
        groups: learning rate, weight decay and dampening of each parameter group.
        loss_scaling: of the optimiser.
    """

    groups: tuple[tuple[float, ...], ...]
    loss_scaling: float

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Rates:
        """Return the present ones of any optimiser."""
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
    """What a program gave to load_state_dict(), on its way to the device.

    Attributes:
        state: the state tensors by the device's names.
        settings: the rates by the device's names; none where the program set its own since.
    """

    state: Mapping[str, torch.Tensor]
    settings: Mapping[str, torch.Tensor]


def copied(tensors: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
    """Return tensors of the device's state that the program does not hold."""
    if tensors is None:
        return None
    return {name: torch.as_tensor(value).detach().clone() for name, value in tensors.items()}


def writers_of(state_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the optimisers that may have written a state; none if nothing tells."""
    groups = state_dict.get("param_groups") or [{}]
    settings = groups[0]
    for name, writer in _OWN_SETTINGS.items():
        if name in settings:
            return (writer,)
    if "betas" in settings:
        decoupled = settings.get("decoupled_weight_decay")  # earlier torchs do not tell
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
