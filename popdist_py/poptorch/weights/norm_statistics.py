"""Which buffers of a model are the running statistics of its norm layers.

Nothing here reads or changes a value. What a replica owns is the compiler's decision.
"""

from __future__ import annotations

from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["norm_statistics"]

_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def norm_statistics(top: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that batch and instance norms under ``top`` update."""
    found = {
        id(module._buffers.get(name))
        for module in top.modules()
        if isinstance(module, _NormBase)
        for name in _STATISTICS
    }
    return frozenset(name for name, buffer in top.named_buffers() if id(buffer) in found)
