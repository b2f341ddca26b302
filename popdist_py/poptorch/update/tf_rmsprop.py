"""The update rule of TensorFlow's RMSprop, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["TensorFlowRMSprop"]


class TensorFlowRMSprop(torch.optim.Optimizer):
    """An optimiser: RMSprop with the arithmetic of TensorFlow.

    The mean of the squared gradients starts at one, and eps is added before the square root. The
    momentum buffer sums updates that are already multiplied by the learning rate. The parameter
    groups must contain lr, alpha, eps, weight_decay, momentum and centered.
    """

    FIRST_SQUARE: Final = 1.0  # The initial value of the mean of the squared gradients.

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._state_of(parameter, group) for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        squares = [state["square_avg"] for state in states]
        torch._foreach_mul_(squares, group["alpha"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        variance = list(squares)
        if group["centered"]:
            means = [state["grad_avg"] for state in states]
            torch._foreach_lerp_(means, gradients, 1 - group["alpha"])
            variance = list(torch._foreach_addcmul(squares, means, means, -1.0))
        roots = list(torch._foreach_sqrt(torch._foreach_add(variance, group["eps"])))
        updates = list(torch._foreach_div(gradients, roots))
        torch._foreach_mul_(updates, group["lr"])
        if group["momentum"]:
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers
        torch._foreach_sub_(parameters, updates)

    def _state_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["square_avg"] = torch.full_like(parameter, self.FIRST_SQUARE)
            if group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            if group["centered"]:
                state["grad_avg"] = torch.zeros_like(parameter)
        return state
