"""Conversions of learning rates and weight decays between an optimiser's settings and the device.

For SGD, the device stores two numbers made from the settings of a parameter group. The first number
is the learning rate lr * (1 - dampening) / loss_scaling. The second number is 1 - lr * (1 -
dampening) * weight_decay, by which the weights are multiplied. For all other optimisers, the device
stores lr and weight_decay.
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
    """Return the device's name for a rate (such as the learning rate) of one parameter."""
    return f"{rate}___specific___{parameter}"


def of_parameter(parameter: str, rates: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the rates (learning rate and weight decay) of one parameter from ``rates``."""
    names = {rate: name_of(rate, parameter) for rate in (*_SGD, *_OTHERS)}
    return {rate: float(rates[name]) for rate, name in names.items() if name in rates}


def device_rates(
    settings: Mapping[str, Any], loss_scaling: float, *, is_sgd: bool
) -> dict[str, torch.Tensor]:
    """Convert the settings of a parameter group to the rates that the device stores."""
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
    """Convert the device's rates of a parameter to a learning rate and a weight decay.

    Args:
        settings: The settings of the parameter's group in the user's optimiser.
        loaded: The rates of one parameter that the program loaded and that differ from
            ``settings``.
        loss_scaling: The loss scaling on the device.
        is_sgd: Whether the optimiser is SGD.
    """
    lr, decay = settings["lr"], settings["weight_decay"]
    if not loaded:
        return lr, decay
    if not is_sgd:
        return loaded.get("learningRate", lr), loaded.get("weightDecay", decay)
    share = 1 - float(settings["dampening"])
    # For SGD, the device stores the learning rate and the factor that multiplies the weights (for
    # weight decay) as separate numbers. Therefore loading only a learning rate does not change the
    # factor that multiplies the weights.
    factor = loaded.get("weightDecayScaleFactor0", 1 - float(lr) * share * float(decay))
    if share and "scaledLearningRate0" in loaded:
        lr = loaded["scaledLearningRate0"] * loss_scaling / share
    rate = float(lr) * share
    return lr, (1 - factor) / rate if rate else 0.0
