"""The optimisers LAMB and LARS, as subclasses of torch.optim.Optimizer.

An emulated device computes the same weight updates as LAMB and LARS, on its own copy of the
weights. The module ``optim.py`` adds PopTorch's arguments to LAMB, LARS and torch's optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["LAMB", "LARS"]


class _LayerWise(torch.optim.Optimizer):
    """An optimiser whose weight updates depend on the norms of whole parameters."""

    def __init__(self, params: Iterable[Any], settings: Mapping[str, Any]) -> None:
        super().__init__(params, dict(settings))
        # Torch adds the key ``differentiable`` to the settings of every optimiser that loads a
        # state. The constructor also adds the key ``differentiable``. Without the key
        # ``differentiable`` in the defaults, loading a state would look like a change of settings
        # by the program.
        self.defaults.setdefault("differentiable", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Update the parameters of a parameter group, with one torch call per kind of operation."""
        raise NotImplementedError


class LAMB(_LayerWise):
    """The optimiser LAMB (layer-wise adaptive moments for batch training)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        max_weight_norm: float = 65500.0,
    ) -> None:
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
        }
        super().__init__(params, settings)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        step = int(states[0]["step"])
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        first_scale = 1 - beta1**step if group["bias_correction"] else 1.0
        second_scale = 1 - beta2**step if group["bias_correction"] else 1.0
        divisors = torch._foreach_sqrt(torch._foreach_div(seconds, second_scale))
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(firsts, first_scale), divisors)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)
        limit = group["max_weight_norm"]
        for parameter, update, (weight, size) in zip(parameters, updates, norms, strict=True):
            ratio = weight.clamp(max=limit) / size
            trust = torch.where((weight == 0) | (size == 0), torch.ones_like(ratio), ratio)
            parameter.sub_(update * (trust * group["lr"]))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


class LARS(_LayerWise):
    """The optimiser LARS, which is SGD with layer-wise adaptive learning rates.

    Raises:
        ValueError: A numeric setting of a parameter group is below 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eeta: float = 1e-3,
        epsilon: float = 0.0,
        adapt: bool = True,
    ) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eeta": eeta,
            "epsilon": epsilon,
        }
        super().__init__(params, {**numbers, "adapt": adapt})
        for group in self.param_groups:
            for name in numbers:
                if not group[name] >= 0:
                    raise ValueError(
                        f"The argument {name} of the LARS optimizer is {group[name]}: expected 0 "
                        "or more"
                    )

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        decayed = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        updates = list(torch._foreach_mul(decayed, group["lr"]))
        if group["adapt"]:
            torch._foreach_mul_(updates, _trust_ratios(group, parameters, gradients))
        if group["momentum"]:
            velocities = [self._velocity_of(parameter) for parameter in parameters]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, updates)
            updates = velocities
        torch._foreach_sub_(parameters, updates)

    def _velocity_of(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def _trust_ratios(
    group: Mapping[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return LARS's factor on each parameter's learning rate, which is 1 if a norm is 0."""
    decay, epsilon = group["weight_decay"], group["epsilon"]
    ratios = []
    norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(gradients), strict=True)
    for weight, gradient in norms:
        ratio = group["eeta"] * weight / (gradient + decay * weight + epsilon)
        ratios.append(torch.where((weight > 0) & (gradient > 0), ratio, torch.ones_like(ratio)))
    return ratios
