"""How tensors are made smaller before they travel: not at all, or as float16.

Nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "check_compression",
]


class Compressor:
    """What ``DistributedOptimizer`` and ``allreduce`` take; subclass it for another way."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a tensor like the one before ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floats as float16; they are added up in float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype."""
        is_float = tensor.dtype.is_floating_point
        return (tensor.to(torch.float16) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor with its first dtype."""
        return tensor.to(ctx)


def check_compression(compression: Any) -> None:
    """Refuse what cannot compress, such as a name: with a TypeError."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression={compression!r:.40}: expected Compression.none, Compression.fp16 or a "
            "class like them"
        )


class Compression:
    """The two ways that Horovod names."""

    none = NoneCompressor
    fp16 = FP16Compressor
