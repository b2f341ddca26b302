"""Slots: areas of shared memory that each contain the tensors of one item of a data set.

A slot is an anonymous file (memfd), which a process can map as memory. The kernel removes an
anonymous file even if its processes are killed. The size limit of /dev/shm does not apply to
anonymous files. The code of the loader process and of the accessor decides which of the two
processes may use a slot.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing import reduction
from typing import Any

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from popdist_py.poptorch.calls.custom_type_parsers import parser_of
from popdist_py.poptorch.calls.nested_values import map_tensors
from popdist_py.poptorch.data.shared_file_pickle import aligned, anonymous_file

__all__ = ["Leaf", "Slot", "SlotWriter", "read"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """The position of a tensor in a slot of shared memory, with the tensor's shape and dtype.

    Attributes:
        offset: The offset of the tensor's data in the slot, in bytes.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Custom:
    """The structure of an item of a custom type, for which the program has registered a parser.

    Attributes:
        original: The pickled item, without the data of its tensors.
        leaves: The positions of the item's tensors in the slot.
    """

    original: bytes
    leaves: list[Leaf]


class Slot:
    """An area of shared memory for one item of a data set, which grows to the size of the item.

    A process can receive a slot only when the process is started.
    """

    def __init__(self) -> None:
        self._file = anonymous_file("popdist-slot")
        self._memory: mmap.mmap | None = None
        self._placed: list[tuple[torch.Tensor, Leaf]] = []

    def place(self, index: int, leaf: Leaf) -> torch.Tensor:
        """Return the tensor in shared memory with the position, shape and dtype of ``leaf``.

        If the previous item's tensor with the same index had an equal ``leaf`` (position, shape and
        dtype), the method ``place`` returns the same tensor object again.

        Args:
            index: The index of the tensor within the item.
            leaf: The position, shape and dtype of the tensor.
        """
        if index < len(self._placed) and self._placed[index][1] == leaf:
            return self._placed[index][0]
        tensor = self.tensor(leaf)
        self._placed[index:] = [(tensor, leaf)]
        return tensor

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        """Return a tensor that uses the slot's memory at ``leaf``; the slot grows if necessary."""
        count = prod(leaf.shape)
        if count == 0:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        memory = self._mapped(leaf.offset + leaf.nbytes)
        flat = torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=leaf.offset)
        return flat.view(leaf.shape)

    def _mapped(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < nbytes:
            size = os.fstat(self._file).st_size
            if size < nbytes:
                size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self._file, size)
            # Tensors that use the earlier, smaller memory map stay valid, because both memory maps
            # contain the same pages of the file.
            self._memory = mmap.mmap(self._file, size)
        return self._memory

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = state["_file"].detach()
        self._memory = None
        self._placed = []

    def __del__(self) -> None:
        if isinstance(getattr(self, "_file", None), int):
            os.close(self._file)


class SlotWriter:
    """A writer that stores the tensors of one item in a slot of shared memory."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._end = 0
        self._placed: dict[int, tuple[torch.Tensor, Leaf]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor behind the tensors that the slot already contains."""
        leaf = Leaf(aligned(self._end), tuple(shape), dtype)
        tensor = self._slot.place(len(self._placed), leaf)
        self._end = leaf.offset + leaf.nbytes
        # The method ``put`` finds a tensor in the dictionary ``_placed`` by the tensor's ``id()``.
        # The reference in ``_placed`` keeps the tensor alive, so that another object cannot get the
        # same id.
        self._placed[id(tensor)] = (tensor, leaf)
        return tensor

    def collate(self, samples: list[Any]) -> Any:
        """Collate samples like torch's default collate function, with the result in the slot."""

        def stack(batch: list[torch.Tensor], **_: Any) -> torch.Tensor:
            first = batch[0]
            try:
                out = self.empty((len(batch), *first.shape), first.dtype)
                return torch.stack(batch, 0, out=out)
            except (
                RuntimeError,
                TypeError,
            ):
                # Tensors with different dtypes, or tensors that require gradients, cannot be
                # stacked in the slot. For tensors that cannot be stacked in the slot,
                # ``torch.stack`` without ``out`` returns the stacked tensors or raises torch's
                # usual error.
                return torch.stack(batch, 0)

        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})

    def concatenate(self, items: list[Any]) -> Any:
        """Concatenate items along dimension 0, and store the resulting tensors in the slot."""

        def join(*parts: torch.Tensor) -> torch.Tensor:
            rows = sum(part.shape[0] for part in parts)
            out = self.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
            return torch.cat(parts, 0, out=out)

        return map_tensors(join, *items)

    def put(self, item: Any) -> Any:
        """Copy the tensors of an item to the slot, except tensors that the slot contains already.

        Returns:
            The description of the item, for ``read``. A description is a copy of the item with a
            :class:`Leaf` in place of every tensor.

        Raises:
            AssertionError: The item contains an object that is not a dense tensor, a list, a tuple,
                a dict or a registered custom type.
        """
        if isinstance(item, torch.Tensor):
            if id(item) not in self._placed:
                assert item.layout == torch.strided, (
                    f"the data set returned a tensor of layout {item.layout}: expected a dense "
                    "tensor, such as the result of its to_dense()"
                )
                copy = self.empty(item.shape, item.dtype)
                copy.copy_(item.detach())
                item = copy
            return self._placed[id(item)][1]
        parser = parser_of(item)
        if parser is not None:
            leaves = [self.put(tensor) for tensor in parser.yieldTensors(item)]
            return _Custom(_without_data(item), leaves)
        if isinstance(item, dict):
            return {key: self.put(value) for key, value in item.items()}
        assert isinstance(item, (tuple, list)), (
            f"the data set returned a {type(item).__name__}: expected a tensor, a tuple, list or "
            "dict of tensors, or a type with a parser (poptorch.registerCustomArgParser)"
        )
        return [self.put(value) for value in item]


def read(slot: Slot, description: Any) -> Any:
    """Return the item in a slot, from a description that a :class:`SlotWriter` returned.

    The tensors of the returned item use the memory of the slot.
    """
    if isinstance(description, Leaf):
        return slot.tensor(description)
    if isinstance(description, dict):
        return {key: read(slot, value) for key, value in description.items()}
    if isinstance(description, _Custom):
        original = pickle.loads(description.original)
        parser = parser_of(original)
        assert parser is not None, (
            f"no parser is registered for the type {type(original).__name__}: register a parser "
            "with poptorch.registerCustomArgParser()"
        )
        tensors = map(slot.tensor, description.leaves)
        return parser.reconstruct(original, iter(tensors))
    return [read(slot, value) for value in description]


def _hollow(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


class _HollowPickler(pickle.Pickler):
    """A pickler that stores only the shape and the dtype of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _hollow, (tuple(value.shape), value.dtype)
        return NotImplemented


def _without_data(item: Any) -> bytes:
    buffer = io.BytesIO()
    _HollowPickler(buffer).dump(item)
    return buffer.getvalue()
