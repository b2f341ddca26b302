"""Slots of memory that processes share, each for one item of a data set.

A slot is an anonymous file (memfd), which has no name: nothing can be left behind, even by a
process that is killed, and no limit of /dev/shm applies. Who may use a slot when, is decided by the
loader process and the accessor, not here.
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

from popdist_py.poptorch.calls.custom_types import parser_of
from popdist_py.poptorch.calls.nested_values import map_tensors
from popdist_py.poptorch.data.memory_pickle import aligned, anonymous_file

__all__ = ["Leaf", "Slot", "SlotWriter", "read"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where in a slot a tensor lies: offset in bytes, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Custom:
    """A registered custom type: the pickled original without its data, and its tensors."""

    original: bytes
    leaves: list[Leaf]


class Slot:
    """Shared memory that grows to what is written into it.

    It can be given to another process when that process is started.
    """

    def __init__(self) -> None:
        self._file = anonymous_file("popdist-slot")
        self._memory: mmap.mmap | None = None
        self._placed: list[tuple[torch.Tensor, Leaf]] = []

    def place(self, index: int, leaf: Leaf) -> torch.Tensor:
        """Return the tensor at ``leaf``, the one of the last time if that was the same.

        Args:
            index: number of the tensor within the item.
            leaf: where it lies.
        """
        if index < len(self._placed) and self._placed[index][1] == leaf:
            return self._placed[index][0]
        tensor = self.tensor(leaf)
        self._placed[index:] = [(tensor, leaf)]
        return tensor

    def tensor(self, leaf: Leaf) -> torch.Tensor:
        """Return the tensor at ``leaf``, without a copy; the slot grows to hold it."""
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
            # Tensors of an earlier, smaller mapping keep that one alive: it shows the same pages.
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
    """Places the tensors of one item one after the other into a slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._end = 0
        self._placed: dict[int, tuple[torch.Tensor, Leaf]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in the slot."""
        leaf = Leaf(aligned(self._end), tuple(shape), dtype)
        tensor = self._slot.place(len(self._placed), leaf)
        self._end = leaf.offset + leaf.nbytes
        self._placed[id(tensor)] = (tensor, leaf)  # holding the tensor keeps its id its own
        return tensor

    def collate(self, samples: list[Any]) -> Any:
        """Do what torch's default collate function does, and stack straight into the slot."""

        def stack(batch: list[torch.Tensor], **_: Any) -> torch.Tensor:
            first = batch[0]
            try:
                out = self.empty((len(batch), *first.shape), first.dtype)
                return torch.stack(batch, 0, out=out)
            except (
                RuntimeError,
                TypeError,
            ):  # mixed dtypes, gradients: let torch decide, or explain
                return torch.stack(batch, 0)

        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})

    def concatenate(self, items: list[Any]) -> Any:
        """Join items of one structure along dimension 0, straight into the slot."""

        def join(*parts: torch.Tensor) -> torch.Tensor:
            rows = sum(part.shape[0] for part in parts)
            out = self.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
            return torch.cat(parts, 0, out=out)

        return map_tensors(join, *items)

    def put(self, item: Any) -> Any:
        """Copy the tensors of ``item`` that are not in the slot yet; return its description.

        The description has the structure of the item, with a :class:`Leaf` for every tensor.

        Raises:
            AssertionError: something else than dense tensors, lists, tuples, dicts and registered
                types.
        """
        if isinstance(item, torch.Tensor):
            if id(item) not in self._placed:
                assert item.layout == torch.strided, (
                    f"the data set returned a tensor of layout {item.layout}: call to_dense() on it"
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
    """Return the item that a :class:`SlotWriter` described, its tensors still in the slot."""
    if isinstance(description, Leaf):
        return slot.tensor(description)
    if isinstance(description, dict):
        return {key: read(slot, value) for key, value in description.items()}
    if isinstance(description, _Custom):
        original = pickle.loads(description.original)
        parser = parser_of(original)
        assert parser is not None, f"no parser is registered for {type(original).__name__}"
        tensors = map(slot.tensor, description.leaves)
        return parser.reconstruct(original, iter(tensors))
    return [read(slot, value) for value in description]


def _hollow(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


class _HollowPickler(pickle.Pickler):
    """Pickles tensors as their shape and dtype only."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _hollow, (tuple(value.shape), value.dtype)
        return NotImplemented


def _without_data(item: Any) -> bytes:
    buffer = io.BytesIO()
    _HollowPickler(buffer).dump(item)
    return buffer.getvalue()
