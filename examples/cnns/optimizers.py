"""The optimisers of the CNN programs, with their weight decay and the types of their state.

The optimisers are SGD, SGD with momentum, RMSProp as in TensorFlow, and LARS for large global
batches.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from popdist_py import poptorch

__all__ = ["make", "set_rate"]


def make(
    args: argparse.Namespace, module: nn.Module, learning_rate: float
) -> poptorch.optim.Optimizer:
    """Return the optimiser that the arguments describe.

    The weights of norms and biases do not decay, and LARS does not adapt their learning rate. With
    half-precision weights, the accumulated gradients and the velocities are in half precision too,
    as in the device's memory.

    Args:
        args: All options.
        module: The module with the parameters to train.
        learning_rate: The learning rate of the first update.
    """
    is_half = args.precision == "16.16"
    state = torch.float16 if is_half else torch.float32
    common = {
        "params": _groups(module, args),
        "lr": learning_rate,
        "momentum": 0.0 if args.optimiser == "SGD" else args.momentum,
        "loss_scaling": 1.0 if args.precision == "32.32" else args.loss_scaling,
        "accum_type": state,
    }
    if args.optimiser == "RMSProp":
        return poptorch.optim.RMSprop(
            **common,
            alpha=args.rmsprop_decay,
            eps=args.rmsprop_epsilon,
            use_tf_variant=True,
            # The mean square stays in single precision, because the squares of small gradients
            # would be 0 in half precision.
            first_order_momentum_accum_type=state,
        )
    if args.optimiser == "LARS":
        return poptorch.optim.LARS(
            **common,
            eeta=args.lars_eeta,
            epsilon=args.lars_epsilon,
            velocity_accum_type=state,
        )
    return poptorch.optim.SGD(**common, velocity_accum_type=state)


def set_rate(optimizer: poptorch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups. setOptimizer() passes it to the model."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _groups(module: nn.Module, args: argparse.Namespace) -> list[dict]:
    """Return two parameter groups: kernels and matrices with decay, norms and biases without."""
    parameters = list(module.parameters())
    kernels = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    if args.optimiser == "LARS":
        vectors["adapt"] = False
    return [kernels, vectors]
