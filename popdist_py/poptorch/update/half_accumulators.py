"""Rounding of float32 gradients and optimiser state to the precision of float16.

An IPU can store accumulated gradients and optimiser state in float16, but torch computes and stores
both in float32. Therefore the gradients and optimiser state that torch computes are rounded to the
nearest float16 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from popdist_py.poptorch.update.device_optimizer import kind_of
from popdist_py.poptorch.update.gradients import Gradients

__all__ = ["keep_half_state", "round_gradients"]


def round_gradients(gradients: Gradients) -> None:
    """Round the gradients that have been accumulated so far to float16 precision."""
    for local in gradients.local_sums():
        _round_to_half(local)


def keep_half_state(optimizer: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` round its state after each step, if ``source`` has float16 state.

    Args:
        optimizer: The optimiser whose state is rounded.
        source: The user's optimiser, whose settings name the state tensors with float16 precision.
    """
    type_of = getattr(source, "_state_type", None)
    if type_of is None:
        return
    keys = [key for key, name in kind_of(source).state.items() if type_of(name) == torch.float16]
    if not keys:
        return

    def round_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = optimizer.state.values()
        _round_to_half(state[key] for state in states for key in keys if key in state)

    optimizer.register_step_post_hook(round_state)


@torch.no_grad()
def _round_to_half(tensors: Iterable[torch.Tensor]) -> None:
    wider = [tensor for tensor in tensors if tensor.dtype != torch.float16]
    if wider:
        torch._foreach_copy_(wider, [tensor.to(torch.float16) for tensor in wider])
