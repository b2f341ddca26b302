"""Parcels: carry a data set to a process that is being started, its data in one nameless file.

Nothing else lives here. Python's own way (and torch's) sends a file descriptor per tensor, of which
a few hundred are too many, and needs room in /dev/shm, which containers limit.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from typing import Any, Final

import torch

__all__ = ["Parcel", "aligned", "anonymous_file"]

_ALIGNMENT: Final = 64  # bytes; a cache line, and enough for every vector instruction


def aligned(offset: int) -> int:
    """Return the first good place for a tensor at or behind ``offset``."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file in memory that vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return _temporary_file()


def _temporary_file() -> int:
    with tempfile.TemporaryFile() as file:  # unlinked from the start; the duplicate stays open
        return os.dup(file.fileno())


def _tensor_from(buffer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class _ParcelPickler(reduction.ForkingPickler):
    """Keeps the data of tensors (and NumPy arrays) out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not plain or value.requires_grad or value.device.type != "cpu" or not value.numel():
            return NotImplemented
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.view(-1).view(torch.uint8).numpy()
        return _tensor_from, (pickle.PickleBuffer(data), tuple(value.shape), value.dtype)


class Parcel:
    """Any object on its way to a process; what arrives there is the object itself.

    Args:
        content: what to carry.
        on_disk: whether to use a temporary file instead of memory.
    """

    def __init__(self, content: Any, *, on_disk: bool = False) -> None:
        self._content = content
        self._on_disk = on_disk
        self._files: list[int] = []

    def __reduce__(self) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _ParcelPickler(stream, pickle.HIGHEST_PROTOCOL, True, buffers.append).dump(self._content)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        spans = list(_spans(part.nbytes for part in parts))
        file = _temporary_file() if self._on_disk else anonymous_file("popdist-parcel")
        self._files.append(file)  # must stay open until the process has been started
        os.ftruncate(file, sum(spans[-1]))
        with mmap.mmap(file, 0) as memory:
            for part, (start, size) in zip(parts, spans, strict=True):
                memory[start : start + size] = part
        return _opened, (reduction.DupFd(file), spans)

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)


def _opened(handle: Any, spans: list[tuple[int, int]]) -> Any:
    """Return the content; its tensors and arrays lie in a private mapping of the file."""
    file = handle.detach()
    memory = memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE))
    os.close(file)
    pickled, *buffers = (memory[start : start + size] for start, size in spans)
    return pickle.loads(pickled, buffers=buffers)


def _spans(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield start and size of parts that lie behind each other."""
    start = 0
    for size in sizes:
        yield start, size
        start = aligned(start + size)
