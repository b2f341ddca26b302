"""The names of the buffers that hold running statistics of batch norm and instance norm layers.

The function ``norm_statistics`` does not read or change the values of buffers. The compiler decides
whether each replica gets a separate copy of a buffer with running statistics.
"""

from __future__ import annotations

from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["norm_statistics"]

_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def norm_statistics(top: nn.Module) -> frozenset[str]:
    """Return the names of the running statistics of ``top``'s batch norms and instance norms."""
    found = {
        id(module._buffers.get(name))
        for module in top.modules()
        if isinstance(module, _NormBase)
        for name in _STATISTICS
    }
    return frozenset(name for name, buffer in top.named_buffers() if id(buffer) in found)
