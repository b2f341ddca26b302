"""The class GradientHooks, which calls the program's hooks with the gradients on the device.

A program registers hooks with ``register_hook`` and ``register_post_accumulate_grad_hook`` on the
parameters of its module, which are on the host. A gradient hook gets the gradient of one replica's
micro-batch, as in ``loss.backward()`` of plain torch. The gradient that a gradient hook gets is not
multiplied by the loss scale and not yet added to other gradients. Therefore the results of gradient
hooks do not depend on the number of instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from popdist_py.poptorch.weights.parameter_gradients import gradients_replaced

__all__ = ["GradientHooks", "has_hooks"]


def has_hooks(host: Any) -> bool:
    """Tell whether the program registered a gradient hook on a host parameter."""
    # Torch functions are disabled, because reading the hooks would otherwise copy newer weights
    # from the device.
    with torch._C.DisableTorchFunctionSubclass():
        return bool(host._backward_hooks or host._post_accumulate_grad_hooks)


class GradientHooks:
    """Calls the gradient hooks of host parameters with the gradients on the device.

    Args:
        hosts: The module's parameters on the host.
        device_of: A function that returns the device parameters of a host parameter.

    Attributes:
        scale: The factor that multiplies the gradients of the current backward pass, such as the
            loss scale.
        reach: Whether at least one trained parameter has gradient hooks, so that backward passes
            must call hooks.
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
        """Whether a parameter got its first gradient hook after the GradientHooks was made."""
        with torch._C.DisableTorchFunctionSubclass():
            for host in self._others:
                if host._backward_hooks or host._post_accumulate_grad_hooks:
                    return True
        return False

    def remove(self) -> None:
        """Stop calling the program's gradient hooks."""
        for handle in self._handles:
            handle.remove()

    def _changed(
        self, host: Any, device: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Call the hooks of a host parameter, and return the gradient that the hooks produce.

        The list of the parameter's hooks is read again for each gradient, so removed hooks are not
        called.
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
    """Call post-accumulate hooks, and return the gradient that the hooks produce.

    Post-accumulate hooks may change the ``grad`` attribute of the device parameter. While
    post-accumulate hooks run, ``grad`` contains only the new gradient, without the sum of earlier
    gradients.
    """
    with gradients_replaced([device], [gradient.clone()]):
        for hook in hooks:
            hook(device)
        left = device.grad
    return torch.zeros_like(gradient) if left is None else left
