"""The function getIpuTensorId, which returns a number to identify a tensor of a running model."""

from __future__ import annotations

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing import current_forward

__all__ = ["getIpuTensorId"]


def getIpuTensorId(x: torch.Tensor) -> int:
    """Return a number that identifies the tensor ``x`` as long as ``x`` exists.

    Raises:
        Error: ``x`` is not a tensor, or the caller is outside the forward method of a
            wrapped model.
    """
    if not isinstance(x, torch.Tensor):
        raise Error(f"getIpuTensorId needs a torch.Tensor, got {type(x).__name__}")
    if not current_forward.is_running():
        raise Error(
            "getIpuTensorId works only for IPU tensors: call it inside the forward of a wrapped "
            "model"
        )
    return id(x)
