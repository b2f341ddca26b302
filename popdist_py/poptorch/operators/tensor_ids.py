"""Numbers that tell apart the tensors of a forward."""

from __future__ import annotations

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing import current_forward

__all__ = ["getIpuTensorId"]


def getIpuTensorId(x: torch.Tensor) -> int:
    """Return a number that belongs to the tensor ``x`` alone while it lives.

    Raises:
        Error: outside the forward of a wrapped model, where no tensor is on the device.
    """
    if not isinstance(x, torch.Tensor):
        raise Error(f"Expected a tensor, got {type(x)}")
    if not current_forward.is_running():
        raise Error("Expected an IPU tensor: this one is not inside the forward of a wrapped model")
    return id(x)
