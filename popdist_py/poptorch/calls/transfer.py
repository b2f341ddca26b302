"""The class ``Transfer``, which converts tensors that are copied between host and device.

The class ``Transfer`` converts the dtype and the memory layout of a tensor. Settings that depend on
the model, such as ``widen_integers``, are arguments of the methods of ``Transfer``.

The emulated device supports the same dtypes of tensors as PopTorch. PopTorch transfers 64-bit
integers as 32-bit integers, and float64 and bfloat16 as float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = ["Transfer", "forbid_backward"]

_SUPPORTED: Final = (
    torch.float32,
    torch.float16,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.float64,
    torch.bfloat16,
)
_NARROW: Final = (torch.int32, torch.int16, torch.int8)


class Transfer:
    """Converts a call's inputs to the device's dtypes, and its results to the host's dtypes.

    Args:
        double_precision: Whether the device computes with float64 tensors in float64. Without
            ``double_precision``, the device computes in float32.
    """

    def __init__(self, *, double_precision: bool) -> None:
        self._double = double_precision
        self._warned: set[str] = set()

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the device's dtype for a parameter or buffer that has ``dtype`` on the host."""
        if dtype == torch.float64:
            return dtype if self._double else torch.float32
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def check(self, tensor: torch.Tensor) -> None:
        """Check that the device supports an input tensor of a call.

        Raises:
            Error: The device does not support the dtype of the input, or the input has no elements.
        """
        if tensor.dtype not in _SUPPORTED:
            raise Error(
                f"Unsupported {tensor.dtype} input type: the type of an input tensor must be one "
                f"of {', '.join(str(dtype) for dtype in _SUPPORTED)}"
            )
        if tensor.numel() == 0:
            raise Error(
                "Zero-sized tensors are unsupported as inputs of a model (Got shape "
                f"{list(tensor.shape)})"
            )

    def inputs(
        self, tensors: Sequence[torch.Tensor], *, widen_integers: bool
    ) -> Sequence[torch.Tensor]:
        """Return the inputs of a call, each converted by the method ``to_device``."""
        return [self.to_device(tensor, widen_integers=widen_integers) for tensor in tensors]

    def to_device(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.Tensor:
        """Return an input with the dtype and the memory layout that the device needs.

        If an input needs no conversion, the method ``to_device`` returns the same tensor.

        Args:
            tensor: The input tensor of a call, which may need a conversion.
            widen_integers: Whether integers of 8, 16 and 32 bits are converted to 64 bits. Torch
                requires 64-bit integers as indices and labels.
        """
        if tensor.requires_grad:
            self.warn_once(
                "Input tensor has requires_grad=True set. The input tensor will be detached, "
                "because a model computes no gradients of its inputs."
            )
            tensor = tensor.detach()
        if tensor.is_inference():
            # The input is copied, because autograd rejects tensors that were made in inference
            # mode.
            tensor = tensor.clone()
        if not tensor.is_contiguous():
            self.warn_once(
                "At least one input tensor is not contiguous: each call copies all input "
                "tensors that are not contiguous"
            )
            tensor = tensor.contiguous()
        wanted = self._device_dtype(tensor, widen_integers=widen_integers)
        return tensor if tensor.dtype is wanted else tensor.to(wanted)

    def _device_dtype(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.dtype:
        """Return the dtype that an input has on the device."""
        if widen_integers and tensor.dtype in _NARROW:
            return torch.int64
        return self.dtype(tensor.dtype)

    def to_host(self, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of a model call, converted to the dtypes of the host.

        Each returned tensor is contiguous and does not share memory with the other results.
        """
        results_on_host: list[torch.Tensor] = []
        taken: set[int] = set()
        for result in results:
            is_long = result.dtype == torch.int64
            tensor = result.to(torch.int32 if is_long else self.dtype(result.dtype))
            if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() in taken:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            taken.add(tensor.untyped_storage().data_ptr())
            results_on_host.append(tensor)
        return results_on_host

    def write_back(
        self, changed: Iterable[int], host: Sequence[torch.Tensor], device: Sequence[torch.Tensor]
    ) -> None:
        """Copy the inputs that the forward pass changed in place from the device to the host.

        Args:
            changed: The indices of the inputs that the forward pass changed.
            host: The input tensors that the caller of the model passed.
            device: The converted input tensors that the model's forward method received.
        """
        for index in changed:
            if host[index].data_ptr() != device[index].data_ptr():
                host[index].detach().copy_(device[index])

    def warn_once(self, text: str) -> None:
        """Log a warning, unless this ``Transfer`` object has logged the same text before."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _explicit_backward(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise Error(
        "backward() cannot be called explicitly on the output of a training model: a call of the "
        "model runs the backward pass and the update of the weights. Remove the call of backward()"
    )


# If a program saves a result of a training model with torch.save(), the file refers to the function
# ``_explicit_backward``, which is an attribute of the result. By default, torch.load() rejects
# functions that are not registered as safe.
torch.serialization.add_safe_globals([_explicit_backward])


def forbid_backward(tensor: torch.Tensor) -> torch.Tensor:
    """Make ``tensor.backward()`` raise an Error with an explanation, and return ``tensor``."""
    tensor.backward = _explicit_backward  # type: ignore[method-assign]
    return tensor
