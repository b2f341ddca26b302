"""The optimisers of the CNN programs: which weights decay, and in which format the state is.

SGD, SGD with momentum, RMSProp as TensorFlow computes it, and LARS for large global batches.
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

    Norms and biases do not decay; LARS does not adapt their rate either. With half weights,
    gradients are added up and velocities kept in half too, as in the device's memory.

    Args:
        args: All options.
        module: Whose parameters are trained.
        learning_rate: Of the first update.
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
            # The mean square stays in single precision: squares of small gradients are 0 in half.
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
    """Let ``rate`` be the learning rate of all groups; the model is told by setOptimizer()."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _groups(module: nn.Module, args: argparse.Namespace) -> list[dict]:
    """Return the kernels and matrices, which decay, and the vectors: norms and biases."""
    parameters = list(module.parameters())
    kernels = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    if args.optimiser == "LARS":
        vectors["adapt"] = False
    return [kernels, vectors]
