"""A device of another kind, as one file: tensors of the CPU behind a wall of two copy functions.

The wrapper class refuses what a GPU refuses too: operations with tensors of the CPU, and NumPy.
It also refuses to draw random numbers, because those of a GPU are not those of the CPU.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from popdist_py.poptorch.compilation.backends import Backend, why_not_copied
from popdist_py.poptorch.execution.copying_replicas import CopyingReplicas

# The number of calls of each copy function.
CROSSINGS: Counter[str] = Counter()
# The factor on the results of each operation; a device that computes correctly has none.
ERRORS: dict[object, float] = {}


class ForeignTensor(torch.Tensor):
    """A tensor of the foreign device."""

    @staticmethod
    def __new__(cls, memory):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=memory.device,
        )

    def __init__(self, memory):
        self._memory = memory

    def __repr__(self):
        return f"ForeignTensor({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func}: the random numbers would not be those of the CPU")
        for value in tree_leaves((args, kwargs or {})):
            # A GPU reads numbers of the CPU too, but not tensors with dimensions.
            if isinstance(value, torch.Tensor) and not isinstance(value, cls) and value.dim():
                raise RuntimeError(f"{func}: expected all tensors to be on the foreign device")
        result = func(*tree_map(_inside, args), **tree_map(_inside, kwargs or {}))
        if func in ERRORS:
            result = result * ERRORS[func]
        return args[0] if func._schema.name.endswith("_") else tree_map(_wrapped, result)


def _inside(value):
    return value._memory if isinstance(value, ForeignTensor) else value


def _wrapped(value):
    return ForeignTensor(value) if isinstance(value, torch.Tensor) else value


def to_device(tensor):
    assert not isinstance(tensor, ForeignTensor)
    CROSSINGS["to the device"] += 1
    return ForeignTensor(tensor.clone())


def from_device(tensor):
    assert isinstance(tensor, ForeignTensor)
    CROSSINGS["from the device"] += 1
    return tensor._memory.clone()


class OnDevice(TorchFunctionMode):
    """Makes ``torch.zeros()`` and the like allocate there, as ``torch.device("cuda")`` does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _device_constructors() and not isinstance(result, ForeignTensor):
            return ForeignTensor(result)
        return result


ROW = Backend(
    name="foreign",
    option="foreign",
    can_run=why_not_copied,
    make=lambda model, *_: CopyingReplicas(model, to_device, from_device, OnDevice),
)
