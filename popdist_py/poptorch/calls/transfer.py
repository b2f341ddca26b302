"""Tensors on their way between host and device: dtypes, layout, warnings.

Decides nothing about a model: what the compiler found out is handed in.

Sources of the rules: PopTorch's supported types; 64-bit integers travel as 32-bit ones, doubles and
bfloat16 as floats.
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
    """What happens to a tensor between host and device.

    Args:
        double_precision: keep float64 instead of computing in float32.
    """

    def __init__(self, *, double_precision: bool) -> None:
        self._double = double_precision
        self._warned: set[str] = set()

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the device's dtype for state of a host dtype."""
        if dtype == torch.float64:
            return dtype if self._double else torch.float32
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def check(self, tensor: torch.Tensor) -> None:
        """Check an input.

        Raises:
            Error: a dtype that the device lacks, or a tensor without elements.
        """
        if tensor.dtype not in _SUPPORTED:
            raise Error(
                f"Unsupported {tensor.dtype} input type: expected one of "
                f"{', '.join(str(dtype) for dtype in _SUPPORTED)}"
            )
        if tensor.numel() == 0:
            raise Error(f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)})")

    def inputs(
        self, tensors: Sequence[torch.Tensor], *, widen_integers: bool
    ) -> Sequence[torch.Tensor]:
        """Return the inputs of a call as the device gets them."""
        return [self.to_device(tensor, widen_integers=widen_integers) for tensor in tensors]

    def to_device(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.Tensor:
        """Return the input as the device gets it; the same tensor if nothing has to change.

        Args:
            tensor: the input.
            widen_integers: whether narrow integers are widened, because torch takes indices and
                labels in 64 bits.
        """
        if tensor.requires_grad:
            self.warn_once(
                "Input tensor has requires_grad=True set. This tensor will be detached because "
                "backward pass via inputs is not supported."
            )
            tensor = tensor.detach()
        if tensor.is_inference():
            tensor = tensor.clone()  # else autograd refuses it
        if not tensor.is_contiguous():
            self.warn_once(
                "At least one input tensor is not contiguous: it is copied on every call"
            )
            tensor = tensor.contiguous()
        wanted = self._device_dtype(tensor, widen_integers=widen_integers)
        return tensor if tensor.dtype is wanted else tensor.to(wanted)

    def _device_dtype(self, tensor: torch.Tensor, *, widen_integers: bool) -> torch.dtype:
        """Return the device's dtype for an input."""
        if widen_integers and tensor.dtype in _NARROW:
            return torch.int64
        return self.dtype(tensor.dtype)

    def to_host(self, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return results as the host gets them: contiguous, each in memory of its own."""
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
        """Copy the inputs that the forward changed in place into the caller's tensors."""
        for index in changed:
            if host[index].data_ptr() != device[index].data_ptr():
                host[index].detach().copy_(device[index])

    def warn_once(self, text: str) -> None:
        """Log a warning, unless this wrapper has given it before."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _explicit_backward(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise Error(
        "backward() cannot be called explicitly on the output of a training model: the model "
        "runs the backward pass and the update itself"
    )


# Results that a program saves can be loaded by torch's default, which trusts few functions.
torch.serialization.add_safe_globals([_explicit_backward])


def forbid_backward(tensor: torch.Tensor) -> torch.Tensor:
    """Let ``tensor.backward()`` explain itself."""
    tensor.backward = _explicit_backward  # type: ignore[method-assign]
    return tensor
