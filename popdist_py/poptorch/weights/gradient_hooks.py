"""The program's hooks on parameters: called with the gradients on the device.

A program registers them with ``register_hook`` and ``register_post_accumulate_grad_hook`` on the
parameters of its module, which are on the host. A hook gets the gradient of one replica's
micro-batch, as ``loss.backward()`` would make it: without loss scaling, and before it is added to
others. So the result does not depend on how the replicas are split over instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["GradientHooks", "has_hooks"]


def has_hooks(host: Any) -> bool:
    """Tell whether a program registered a hook on the gradient of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():  # of a watched parameter nothing is fetched
        return bool(host._backward_hooks or host._post_accumulate_grad_hooks)


class GradientHooks:
    """Calls the hooks of host parameters for their parameters on the device.

    Args:
        hosts: the module's parameters.
        device_of: the device parameters of a host parameter.

    Attributes:
        scale: the factor on the gradients of the backward that runs.
        reach: whether there are hooks to call.
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
        """Whether a parameter has got its first hook since; asked before each call."""
        with torch._C.DisableTorchFunctionSubclass():
            for host in self._others:
                if host._backward_hooks or host._post_accumulate_grad_hooks:
                    return True
        return False

    def remove(self) -> None:
        """Call no hooks any more."""
        for handle in self._handles:
            handle.remove()

    def _changed(
        self, host: Any, device: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Return what the hooks of a parameter make of its gradient.

        A hook that was removed is not called any more.
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
    """Return what hooks make of a parameter's ``grad`` that holds this gradient alone."""
    sum_so_far = device.grad
    device.grad = gradient.clone()
    try:
        for hook in hooks:
            hook(device)
        left = device.grad
    finally:
        device.grad = sum_so_far
    return torch.zeros_like(gradient) if left is None else left
