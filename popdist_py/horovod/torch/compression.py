"""Compressors, which make tensors smaller for communication, for example by float16."""

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
    """The base class of compressors, for ``DistributedOptimizer`` and ``allreduce``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, and the ``ctx`` argument for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a compressed tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor unchanged, and None as ``ctx``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor unchanged."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floats as float16. The collectives compute sums of float16 in float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its original dtype as ``ctx``."""
        is_float = tensor.dtype.is_floating_point
        return (tensor.to(torch.float16) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor with its original dtype ``ctx``."""
        return tensor.to(ctx)


def check_compression(compression: Any) -> None:
    """Raise TypeError unless ``compression`` has the methods of ``Compressor``."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression={compression!r:.40}: expected Compression.none, Compression.fp16, or a "
            "class with the methods compress and decompress"
        )


class Compression:
    """The compressors that Horovod defines."""

    none = NoneCompressor
    fp16 = FP16Compressor
