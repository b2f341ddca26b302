"""Hooks on gradients: the program's hooks, called with the gradients on the device.

A program registers them with ``register_hook`` and ``register_post_accumulate_grad_hook`` on the
parameters of its module, which are on the host. A hook gets the gradient of one replica's
micro-batch, as ``loss.backward()`` would make it: without loss scaling, and before it is added to
other gradients. So the result does not depend on how the replicas are split over instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["GradientHooks", "has_hooks"]


def has_hooks(host: Any) -> bool:
    """Tell whether a program registered a hook on the gradient of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():  # avoids fetching weights
        return bool(host._backward_hooks or host._post_accumulate_grad_hooks)


class GradientHooks:
    """Calls the hooks of host parameters for their parameters on the device.

    Args:
        hosts: the module's parameters.
        device_of: returns the device parameters of a host parameter.

    Attributes:
        scale: the factor on the gradients of the current backward pass, such as the loss scale.
        reach: whether any parameter has hooks.
    """

    def __init__(
        self,
        hosts: Iterable[torch.Tensor],
        device_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self.scale = 1.0
        trained = [(host, device) for host in hosts for device in device_of(host)]
        trained = [(host, device) for host, device in trained if device.requires_grad]
        hooked = [(host, device) for host, device in trained if has_hooks(host)]
        self.reach = bool(hooked)
        self._others: list[Any] = [host for host, _ in trained if not has_hooks(host)]
        self._handles = [
            device.register_hook(partial(self._changed, host, device)) for host, device in hooked
        ]

    @property
    def are_missing(self) -> bool:
        """Whether a parameter got its first hook after this object was made; read at each call."""
        with torch._C.DisableTorchFunctionSubclass():
            for host in self._others:
                if host._backward_hooks or host._post_accumulate_grad_hooks:
                    return True
        return False

    def remove(self) -> None:
        """Stop calling hooks."""
        for handle in self._handles:
            handle.remove()

    def _changed(
        self, host: Any, device: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the gradient of a parameter as its hooks have changed it.

        The hooks are read at each call, so a removed hook is not called.
        """
        with torch._C.DisableTorchFunctionSubclass():
            before = list((host._backward_hooks or {}).values())
            after = list((host._post_accumulate_grad_hooks or {}).values())
        own = gradient / self.scale
        for hook in before:
            changed = hook(own)
            own = own if changed is None else changed
        if after:
            own = _after(device, own, after)
        return own * self.scale


def _after(
    device: torch.Tensor, gradient: torch.Tensor, hooks: Sequence[Callable[[Any], None]]
) -> torch.Tensor:
    """Return a gradient after post-accumulate hooks, which may change the parameter's ``grad``.

    While the hooks run, ``grad`` holds this gradient alone, without the sum so far.
    """
    sum_so_far = device.grad
    device.grad = gradient.clone()
    try:
        for hook in hooks:
            hook(device)
        left = device.grad
    finally:
        device.grad = sum_so_far
    return torch.zeros_like(gradient) if left is None else left
