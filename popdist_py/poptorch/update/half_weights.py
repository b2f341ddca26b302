"""Updates of float16 weights, which are computed in float32 and rounded to float16.

New weights are rounded to the nearest float16 number, or up or down at random. With rounding to the
nearest number, the weights are updated in blocks (runs of weight elements), if torch has a fused
update function. The float32 copies of the weights and gradients of one block of elements fit into
the cache of a CPU core. An update of the weights in blocks (runs of elements) gives the same bits
as an update of all elements at once. The module ``half_weights`` does not depend on the user's
optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from popdist_py.poptorch.weights.parameter_gradients import clear_gradients, set_gradients

__all__ = ["HalfWeights", "stochastic_half"]

# The number of mantissa bits in float32 minus the number of mantissa bits in float16.
_DROPPED = 13
# The number of elements in a block of weights. The size of a block of weights is a multiple of the
# number of elements that torch's kernels process at a time. Therefore torch's kernels divide a
# block of weights in the same way as a whole parameter.
_BLOCK: Final = 1 << 17

Kernel = Callable[..., None]


def stochastic_half(values: torch.Tensor) -> torch.Tensor:
    """Return float32 ``values`` as float16, rounded up or down at random.

    Each number is rounded to one of the two nearest float16 numbers. The nearer float16 number is
    more likely, so that the expected result equals the number before rounding. Numbers below the
    normal range of float16 (6.1e-5) are rounded to a multiple of 2^-24, the smallest float16
    number.
    """
    noise = torch.rand_like(values)
    # Random bits are added to the mantissa bits that float16 does not have. The addition of random
    # bits carries into the mantissa bits that float16 keeps, with the probability of rounding up.
    bits = values.view(torch.int32) + (noise * (1 << _DROPPED)).to(torch.int32)
    normal = (bits & ~((1 << _DROPPED) - 1)).view(torch.float32)
    small = torch.floor(values * 2.0**24 + noise) * 2.0**-24
    return torch.where(values.abs() < 2.0**-14, small, normal).to(torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class _Shadow:
    """A float16 parameter, and the float32 tensor that torch's optimiser updates instead."""

    half: torch.Tensor
    single: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a float16 parameter that is updated in one block.

    Attributes:
        shadow: The float16 parameter with its float32 tensor.
        part: The slice of the parameter's elements that the block contains; None if the block
            contains the whole parameter.
        weights: The memory for the float32 copy of the weights of these elements.
        gradients: The memory for the float32 copy of the gradients of these elements.
    """

    shadow: _Shadow
    part: slice | None
    weights: torch.Tensor
    gradients: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor that are at the same positions as ``part``."""
        return tensor if self.part is None else tensor.view(-1)[self.part]


class HalfWeights:
    """The float16 parameters that one optimiser updates in float32.

    Args:
        at_random: Whether updated weights are rounded up or down at random, instead of to the
            nearest float16 number.
    """

    def __init__(self, *, at_random: bool) -> None:
        self._at_random = at_random
        # The pairs of float16 parameter and float32 tensor, keyed by the ``id`` of the float32
        # tensor.
        self._shadows: dict[int, _Shadow] = {}
        # The pairs of float16 parameter and float32 tensor that are not updated in blocks in the
        # present step. Torch's optimiser updates their float32 tensors.
        self._rest: list[_Shadow] = []
        # Torch's optimiser state of each float32 tensor, keyed by the ``id`` of the tensor.
        # References to the state are stored here, because a look-up in torch's optimiser takes
        # longer than a small update.
        self._states: dict[int, dict[str, Any]] = {}
        # For each parameter group, the pairs of float16 parameter and float32 tensor that the last
        # step updated in blocks, and the memory and slice of each block.
        self._blocks: dict[int, tuple[list[_Shadow], list[list[_Piece]]]] = {}

    def __len__(self) -> int:
        return len(self._shadows)

    def add(self, half: torch.Tensor) -> torch.Tensor:
        """Return a new float32 tensor, for torch's optimiser, in place of a float16 parameter."""
        single = half.detach().float().requires_grad_()
        self._shadows[id(single)] = _Shadow(half, single)
        return single

    def begin_step(
        self, optimizer: torch.optim.Optimizer, loss_scale: float, *, each_alone: bool
    ) -> None:
        """Update parameters in blocks, and prepare all other parameters for ``optimizer``.

        To prepare a parameter, ``begin_step`` copies the weights and gradients of the parameter to
        float32 tensors.

        Args:
            optimizer: The optimiser of the float32 tensors.
            loss_scale: The factor that multiplied the loss in the backward passes. The weight
                update divides the gradients by ``loss_scale``.
            each_alone: Whether the update of each weight element is independent of all other
                elements.
        """
        if len(self._states) != len(self._shadows):
            self._states = {key: optimizer.state[s.single] for key, s in self._shadows.items()}
        done: set[int] = set()
        if each_alone and not self._at_random:
            for index, group in enumerate(optimizer.param_groups):
                found = _kernel(type(optimizer), group)
                if found is not None:
                    done |= self._update_in_blocks(index, group["params"], *found, loss_scale)
        self._rest = [s for key, s in self._shadows.items() if key not in done]
        for shadow in self._rest:
            gradient = shadow.half.grad
            shadow.single.copy_(shadow.half)
            single = None if gradient is None else gradient.to(torch.float32)
            set_gradients([shadow.single], [single])

    def end_step(self) -> None:
        """Round the float32 weights that the optimiser has updated, and store them as float16."""
        for shadow in self._rest:
            single = shadow.single
            shadow.half.copy_(stochastic_half(single) if self._at_random else single)
        clear_gradients(shadow.single for shadow in self._rest)

    def _update_in_blocks(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        kernel: Kernel,
        keys: Sequence[str],
        loss_scale: float,
    ) -> set[int]:
        """Update, in blocks, a parameter group's parameters with gradients and optimiser state.

        Returns:
            The ``id`` of the float32 tensor of each updated parameter.
        """
        states = self._states
        own = [self._shadows[id(p)] for p in parameters if id(p) in self._shadows]
        ready = [shadow for shadow in own if _is_ready(shadow, states[id(shadow.single)], keys)]
        before, blocks = self._blocks.get(index, ([], []))
        if ready != before:
            blocks = list(_blocks(ready))
            self._blocks[index] = (ready, blocks)
        done = {id(shadow.single) for shadow in ready}
        if "step" in keys and ready:
            torch._foreach_add_([states[key]["step"] for key in done], 1)
        for block in blocks:
            _update(block, kernel, [states[id(p.shadow.single)] for p in block], keys, loss_scale)
        return done


def _update(
    block: Sequence[_Piece],
    kernel: Kernel,
    states: Sequence[Mapping[str, torch.Tensor]],
    keys: Sequence[str],
    loss_scale: float,
) -> None:
    """Update the weights of one block of elements with torch's fused update function."""
    halves = [piece.of(piece.shadow.half) for piece in block]
    weights = [piece.weights for piece in block]
    gradients = [piece.gradients for piece in block]
    torch._foreach_copy_(weights, halves)
    given = [piece.of(grad) for piece in block if (grad := piece.shadow.half.grad) is not None]
    torch._foreach_copy_(gradients, given)
    if loss_scale != 1.0:
        torch._foreach_div_(gradients, loss_scale)
    kept = [
        [
            state[key] if key == "step" else piece.of(state[key])
            for piece, state in zip(block, states, strict=True)
        ]
        for key in keys
    ]
    kernel(weights, gradients, *kept)
    torch._foreach_copy_(halves, weights)


def _kernel(kind: type, group: Mapping[str, Any]) -> tuple[Kernel, tuple[str, ...]] | None:
    """Return torch's fused update function for a parameter group, and its state tensors' names.

    The arguments of the fused update function are a list of weights, a list of gradients, and one
    list of state tensors for each name of a state tensor.

    Returns:
        The fused update function and the names of the state tensors that it needs; None if torch
        lacks a fused update function for the optimiser's settings.
    """
    settings = {name: group[name] for name in ("lr", "weight_decay", "maximize") if name in group}
    if kind is torch.optim.SGD:
        settings.update({name: group[name] for name in ("momentum", "dampening", "nesterov")})
        return partial(_sgd, **settings), ("momentum_buffer",) if group["momentum"] else ()
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        # Before torch 2.7, parameter groups do not contain decoupled_weight_decay, and the
        # optimiser's class determines the value.
        decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
        function = torch._fused_adamw_ if decoupled else torch._fused_adam_
        settings.update(beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"])
        return partial(_adam, function, **settings), ("exp_avg", "exp_avg_sq", "step")
    return None


def _sgd(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    buffers: Sequence[torch.Tensor] = (),
    **settings: Any,
) -> None:
    torch._fused_sgd_(weights, gradients, list(buffers), is_first_step=False, **settings)


def _adam(
    function: Callable[..., None],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    averages: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[torch.Tensor],
    **settings: Any,
) -> None:
    function(weights, gradients, averages, squares, [], steps, amsgrad=False, **settings)


def _is_ready(shadow: _Shadow, state: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Tell whether a parameter's gradient and optimiser state exist and are contiguous.

    The optimiser state of a parameter does not exist before the first step of torch's optimiser.
    """
    half = shadow.half
    for tensor in (half, half.grad, *map(state.get, keys)):
        if tensor is None or not tensor.is_contiguous():
            return False
    return True


def _blocks(shadows: Sequence[_Shadow]) -> Iterator[list[_Piece]]:
    """Yield the pieces of parameters in each block; all blocks use the same float32 memory."""
    weights, gradients = torch.empty(2, _BLOCK).unbind()
    block: list[_Piece] = []
    used = 0
    for shadow in shadows:
        size, shape = shadow.half.numel(), shadow.half.shape
        for start in range(0, size, _BLOCK):
            count = min(size - start, _BLOCK)
            if used + count > _BLOCK:
                yield block
                block, used = [], 0
            room = slice(used, used + count)
            whole = count == size
            block.append(
                _Piece(
                    shadow,
                    None if whole else slice(start, start + count),
                    weights[room].view(shape) if whole else weights[room],
                    gradients[room].view(shape) if whole else gradients[room],
                )
            )
            used += count
    if block:
        yield block
