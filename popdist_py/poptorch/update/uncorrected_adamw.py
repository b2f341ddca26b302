"""The update rule of AdamW without bias correction, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["UncorrectedAdamW"]


class UncorrectedAdamW(torch.optim.Optimizer):
    """An optimiser: AdamW without bias correction of the moments.

    Both moments begin at zero, so the first updates differ from those of torch.optim.AdamW. The
    parameter groups must contain lr, betas, eps, weight_decay and maximize.
    """

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
        (beta1, beta2), rate = group["betas"], group["lr"]
        states = [self._state_of(parameter) for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        divisors = list(torch._foreach_sqrt(seconds))
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, firsts, divisors, -rate)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
