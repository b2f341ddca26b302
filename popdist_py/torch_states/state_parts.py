"""The tensors of a state, apart from its other values, and the bytes of states without code.

A state consists of tensors and plain values in dictionaries, lists and tuples. Its tensors are
stored as they are, and only the small rest is pickled. torch.load with ``weights_only`` unpickles
the rest, so a state cannot run code.
"""

from __future__ import annotations

import codecs
import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from popdist_py.memory_slots import Bytes

__all__ = ["bytes_of", "from_bytes", "is_plain", "joined", "split", "storable", "to_bytes"]

# In a state without its tensors, a pair of _TENSOR and an index stands for a tensor.
_TENSOR = "popdist tensor"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN_TYPES = frozenset((int, float, bool, str, type(None)))

# torch.save stores a bytes object as text and a call of ``codecs.encode``. From torch 2.5 on,
# torch.load permits the call of ``codecs.encode``. Versions of torch before 2.5 do not have the
# attribute ``safe_globals``. For versions of torch without ``safe_globals``, ``add_safe_globals``
# registers ``codecs.encode`` for torch.load.
if not hasattr(torch.serialization, "safe_globals"):
    torch.serialization.add_safe_globals([codecs.encode])


def to_bytes(state: Any) -> bytes:
    """Return a state as bytes, for ``from_bytes``."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Unpickle only tensors and plain values, so that a checkpoint file cannot run code."""
    return torch.load(io.BytesIO(data), weights_only=True)


def is_plain(value: Any, *, any_tensor: bool = False) -> bool:
    """Tell whether a checkpoint can contain a value, without a trial.

    The answer True is reliable. A value with the answer False may still be accepted.

    Args:
        value: A part of a state.
        any_tensor: Whether to accept tensors that are pickled, such as those with gaps in memory.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    is_accepted = partial(is_plain, any_tensor=any_tensor)
    if kind in (list, tuple):
        return all(map(is_accepted, value))
    if kind in (dict, OrderedDict):
        return all(map(is_accepted, value)) and all(map(is_accepted, value.values()))
    return kind is torch.Tensor and (any_tensor or _is_storable(value))


def _is_storable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.is_cpu
        and tensor.dtype in _NAMES
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def split(state: Any, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
    """Separate the tensors of a state from its other values.

    A tensor that cannot be stored as its bytes, such as a sparse tensor, remains in the rest.

    Args:
        state: The state.
        tensors: The list to which the tensors are appended. Two tensors that share their memory are
            appended once, and not if the list already contains them.

    Returns:
        The rest of the state, and whether the rest is plain. A plain rest shares no values with the
        state that can change, and a checkpoint can contain the rest.
    """
    is_plain_rest = True
    kinds = list(map(_kind, tensors))
    index_of = {_place(each): index for index, each in enumerate(tensors)}

    def walk(value: Any) -> Any:
        nonlocal is_plain_rest
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if kind is torch.Tensor and _is_storable(value):
            place = _place(value)
            if not value.numel() or place not in index_of:
                index_of[place] = len(tensors)
                tensors.append(value)
                kinds.append(_kind(value))
            return _TENSOR, index_of[place]
        if kind in (dict, OrderedDict):
            if not _PLAIN_TYPES.issuperset(map(type, value)):
                is_plain_rest = False
            items = {name: walk(each) for name, each in value.items()}
            return items if kind is dict else _ordered(value, items)
        if kind in (list, tuple):
            return kind(map(walk, value))
        is_plain_rest = False
        return value

    rest = walk(state), kinds
    return rest, is_plain_rest


def storable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that can be stored as their bytes, without their gradients."""
    return [each for each in (tensor.detach() for tensor in tensors) if _is_storable(each)]


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _kind(tensor: torch.Tensor) -> str:
    # One text takes less time to pickle than a tuple of numbers.
    return " ".join([_NAMES[tensor.dtype], *map(str, tensor.shape)])


def joined(rest: Any, arrays: Sequence[Bytes]) -> Any:
    """Return the state whose rest ``split`` returned, with tensors in the memory of ``arrays``."""
    state, kinds = rest
    tensors = [_tensor(kind, array) for kind, array in zip(kinds, arrays, strict=True)]

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is tuple and len(value) == 2 and value[0] == _TENSOR:
            return tensors[value[1]]
        if kind is dict:
            return {name: walk(each) for name, each in value.items()}
        if kind is OrderedDict:
            return _ordered(value, {name: walk(each) for name, each in value.items()})
        if kind in (list, tuple):
            return kind(map(walk, value))
        return value

    return walk(state)


def _tensor(kind: str, array: Bytes) -> torch.Tensor:
    """Return a tensor in the memory of ``array``, with the dtype and the shape in ``kind``."""
    name, *sizes = kind.split()
    shape = [int(size) for size in sizes]
    if not len(array):
        return torch.empty(shape, dtype=_DTYPES[name])
    # Arrays from another instance may be read-only, which torch does not support.
    flat = torch.from_numpy(array if array.flags.writeable else array.copy())
    return flat.view(_DTYPES[name]).view(shape)


def _ordered(like: Any, items: dict[Any, Any]) -> OrderedDict[Any, Any]:
    """Return a copy of ``like`` with other items, and with the versions of a module's state."""
    result: Any = OrderedDict(items)
    if hasattr(like, "_metadata"):
        result._metadata = like._metadata
    return result  # type: ignore[no-any-return]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor as a flat array, which shares the tensor's memory."""
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat
