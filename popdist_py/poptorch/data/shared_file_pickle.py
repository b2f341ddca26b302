"""The class ``Parcel``, which sends a data set to a new process through one anonymous file.

The picklers of Python and torch send one file descriptor for each tensor, but a process cannot send
more than a few hundred file descriptors. Tensors that Python's or torch's pickler sends also need
space in /dev/shm, and containers limit the size of /dev/shm.
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

# The alignment of tensors in bytes. A cache line has 64 bytes, and vector instructions do not need
# a larger alignment.
_ALIGNMENT: Final = 64


def aligned(offset: int) -> int:
    """Return the smallest aligned offset for a tensor that is not less than ``offset``."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file without a name, in memory if possible.

    The kernel removes a file without a name when no process uses the file any more.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return _temporary_file()


def _temporary_file() -> int:
    # The ``with`` block closes only the first descriptor of the temporary file. The duplicated
    # descriptor keeps the temporary file alive.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _tensor_from(buffer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class _ParcelPickler(reduction.ForkingPickler):
    """A pickler that leaves the data of tensors and NumPy arrays out of the pickled bytes."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not plain or value.requires_grad or value.device.type != "cpu" or not value.numel():
            return NotImplemented
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.view(-1).view(torch.uint8).numpy()
        return _tensor_from, (pickle.PickleBuffer(data), tuple(value.shape), value.dtype)


class Parcel:
    """A wrapper that sends an object to a new process, where unpickling returns the object.

    Args:
        content: The object to send to the new process, such as a data set.
        on_disk: Whether to use a temporary file instead of memory.
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
        # The file with the pickled content must stay open until the new process has been started.
        self._files.append(file)
        os.ftruncate(file, sum(spans[-1]))
        with mmap.mmap(file, 0) as memory:
            for part, (start, size) in zip(parts, spans, strict=True):
                memory[start : start + size] = part
        return _opened, (reduction.DupFd(file), spans)

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)


def _opened(handle: Any, spans: list[tuple[int, int]]) -> Any:
    """Return the content of a ``Parcel``, whose tensors use a private memory map of its file."""
    file = handle.detach()
    memory = memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE))
    os.close(file)
    pickled, *buffers = (memory[start : start + size] for start, size in spans)
    return pickle.loads(pickled, buffers=buffers)


def _spans(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield an aligned start and the size for each of several consecutive parts of a file."""
    start = 0
    for size in sizes:
        yield start, size
        start = aligned(start + size)
