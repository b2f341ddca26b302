"""Convolutions of a captured graph, in the words that torch computes fastest. Values stay."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

__all__ = ["prefer_onednn"]

_ATEN: Final = torch.ops.aten
# Where in the arguments the kernels are; what stands how many places after them.
_KERNELS: Final = {_ATEN.convolution.default: 1, _ATEN.convolution_backward.default: 2}
_DILATION, _IS_TRANSPOSED = 4, 5


def prefer_onednn(node: fx.Node) -> None:
    """Let oneDNN compute a convolution with kernels of one element, which torch may not ask for it.

    With one thread and fewer than 16 images torch computes these itself, one image after the other,
    which takes up to ten times as long. Dilation moves the elements of a kernel apart: it changes
    nothing where there is one, but what is dilated is left to oneDNN (``use_mkldnn`` in torch's
    Convolution.cpp).

    Args:
        node: any node; what is no such convolution stays as it is.
    """
    first = _KERNELS.get(node.target)
    if first is None or not torch.backends.mkldnn.is_available():
        return
    kernels: Any = node.args[first]
    value = kernels.meta["val"]
    has_one_element = all(size == 1 for size in value.shape[2:])
    if has_one_element and value.dtype == torch.float32 and not node.args[first + _IS_TRANSPOSED]:
        node.update_arg(first + _DILATION, [2] * (value.dim() - 2))
