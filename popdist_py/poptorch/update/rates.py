"""Learning rates and weight decays as the device keeps them: names, and how to come and go.

Functions of values. SGD has a learning rate that is divided by the loss scaling, and a factor on
the weights; all others have learning rate and weight decay as the program gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

__all__ = ["LOSS_SCALING", "device_rates", "given", "name_of", "of_parameter"]

LOSS_SCALING: Final = "lossScaling_FLOAT"
_SGD: Final = ("scaledLearningRate0", "weightDecayScaleFactor0")
_OTHERS: Final = ("learningRate", "weightDecay")


def name_of(rate: str, parameter: str) -> str:
    """Return the device's name of a parameter's rate."""
    return f"{rate}___specific___{parameter}"


def of_parameter(parameter: str, rates: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return those of the rates that are a parameter's."""
    names = {rate: name_of(rate, parameter) for rate in (*_SGD, *_OTHERS)}
    return {rate: float(rates[name]) for rate, name in names.items() if name in rates}


def device_rates(
    settings: Mapping[str, Any], loss_scaling: float, *, is_sgd: bool
) -> dict[str, torch.Tensor]:
    """Return what the device keeps of the settings of a group."""
    lr, decay = float(settings["lr"]), float(settings["weight_decay"])
    if is_sgd:
        rate = lr * (1 - float(settings["dampening"]))
        values = (rate / loss_scaling, 1 - rate * decay)
    else:
        values = (lr, decay)
    return dict(zip(_SGD if is_sgd else _OTHERS, map(torch.tensor, values), strict=True))


def given(
    settings: Mapping[str, Any], loaded: Mapping[str, float], loss_scaling: float, *, is_sgd: bool
) -> tuple[Any, Any]:
    """Return learning rate and weight decay that make the device's rates.

    Args:
        settings: the program's own of the group.
        loaded: rates of one parameter that differ from what the settings make.
        loss_scaling: on the device.
        is_sgd: whether the optimiser is SGD.
    """
    lr, decay = settings["lr"], settings["weight_decay"]
    if not loaded:
        return lr, decay
    if not is_sgd:
        return loaded.get("learningRate", lr), loaded.get("weightDecay", decay)
    share = 1 - float(settings["dampening"])
    # The factor on the weights is a value of its own on the device, whatever the learning rate.
    factor = loaded.get("weightDecayScaleFactor0", 1 - float(lr) * share * float(decay))
    if share and "scaledLearningRate0" in loaded:
        lr = loaded["scaledLearningRate0"] * loss_scaling / share
    rate = float(lr) * share
    return lr, (1 - factor) / rate if rate else 0.0
