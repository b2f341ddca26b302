"""Checks that a torch function and its arguments are supported by the operators of IPU hardware.

A ``BlockRecorder`` calls the checks while the recorder traces a forward pass. Without the checks, a
program could run on emulated IPUs and then fail on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from popdist_py.poptorch.errors import Error

__all__ = [
    "check_limits",
    "check_proportion",
    "proportions_of_ipus",
    "refuse_reading",
    "values_needed",
]

_Arguments = Sequence[Any]
_Keywords = Mapping[str, Any]


def check_limits(name: str, args: _Arguments, kwargs: _Keywords) -> None:
    """Check that the device supports one call of the torch function ``name``.

    Raises:
        Error: The device does not support the function with the given arguments.
    """
    check = _CHECKS.get(name)
    if check is not None:
        check(name, args, kwargs)


def check_proportion(value: Any, where: str) -> None:
    """Check an available memory proportion (the share of tile memory that an operator may use).

    Raises:
        AssertionError: The available memory proportion is not a number from 0 to 1.
    """
    assert isinstance(value, (int, float)), (
        f"The available memory proportion for {where} is {value!r}: expected a number"
    )
    assert 0 <= value <= 1, (
        f"The available memory proportion for {where} is {value!r}: expected a share of the tile "
        "memory, from 0.0 to 1.0"
    )


def proportions_of_ipus(given: Mapping[str, float]) -> dict[int, float]:
    """Check memory proportions of IPUs, and return the proportion for each IPU number.

    Args:
        given: A dictionary from IPU names to memory proportions, such as ``{"IPU0": 0.5}``.

    Raises:
        AssertionError: A key is not the name of an IPU, or a memory proportion is not from 0 to 1.
    """
    assert isinstance(given, Mapping), (
        f"setAvailableMemoryProportion needs a dictionary such as {{'IPU0': 0.5}}, got {given!r}"
    )
    proportions: dict[int, float] = {}
    for key, value in given.items():
        ipu = re.fullmatch(r"IPU(\d+)", str(key))
        assert ipu is not None, (
            f"Invalid key {key!r} for setAvailableMemoryProportion: expected the name of an IPU, "
            "such as "
            "IPU0 or IPU1"
        )
        check_proportion(value, f"{key} in setAvailableMemoryProportion")
        proportions[int(ipu[1])] = value
    return proportions


def values_needed(name: str, args: _Arguments) -> list[torch.Tensor]:
    """Return the tensors whose values a call of the torch function ``name`` reads in Python."""
    read: list[Any] = []
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        for one in index:
            if isinstance(one, slice):
                read += [one.start, one.stop, one.step]
            elif name == "__getitem__" and getattr(one, "dtype", None) == torch.bool:
                read.append(one)
    elif name in _READS and (name != "where" or len(args) == 1):
        read.append(args[0])
    return [value for value in read if isinstance(value, torch.Tensor)]


def refuse_reading(name: str) -> NoReturn:
    """Raise an error: the torch function ``name`` reads a value that only the device can compute.

    Raises:
        Error: In every call, because only the device can compute the value.
    """
    raise Error(
        f"{_READS.get(name, name)} needs the value of a tensor while the model is compiled, but "
        "only the device knows the value. Use torch.where, poptorch.cond, "
        "poptorch.dynamic_slice, or masks of a fixed shape"
    )


_READS: Final = {
    "item": "Tensor.item()",
    "tolist": "Tensor.tolist()",
    "__bool__": "a Python condition on a tensor",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__index__": "a tensor as a Python index",
    "nonzero": "nonzero()",
    "argwhere": "argwhere()",
    "masked_select": "masked_select()",
    "__getitem__": "indexing with a boolean mask or with a slice whose bound is a tensor",
    "__setitem__": "assigning to a slice whose bound is a tensor",
    "where": "where() with only a condition",
}


def _argument(
    args: _Arguments, kwargs: _Keywords, position: int, name: str, default: Any = None
) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _interpolate(_: str, args: _Arguments, kwargs: _Keywords) -> None:
    mode = _argument(args, kwargs, 3, "mode", "nearest")
    if mode in ("linear", "trilinear"):
        raise Error(
            f"interpolate: the mode {mode!r} is not supported on IPUs. For this number of "
            "dimensions, use the mode 'nearest'"
        )


def _one_hot(_: str, args: _Arguments, kwargs: _Keywords) -> None:
    if _argument(args, kwargs, 1, "num_classes", -1) < 0:
        raise Error(
            "one_hot: give num_classes, because the classes are not known when the model is "
            "compiled"
        )


def _bincount(_: str, args: _Arguments, kwargs: _Keywords) -> None:
    if not _argument(args, kwargs, 2, "minlength", 0):
        raise Error(
            "bincount: give minlength, because the values are not known when the model is compiled"
        )


def _no_indices(name: str, args: _Arguments, kwargs: _Keywords) -> None:  # noqa: ARG001
    raise Error(
        f"{name.removesuffix('_with_indices')}: return_indices=True is not supported on IPUs"
    )


def _recurrent(name: str, args: _Arguments, kwargs: _Keywords) -> None:  # noqa: ARG001
    settings = [one for one in args if isinstance(one, (bool, int, float))]
    biases, layers, dropout, train, bidirectional = settings[:5]
    if layers != 1:
        raise Error(f"{name}: IPUs support only one layer, got num_layers={layers}")
    if bidirectional:
        raise Error(f"{name}: bidirectional=True is not supported on IPUs")
    if dropout and train:
        raise Error(f"{name}: dropout is not supported on IPUs, got dropout={dropout}")
    if not biases and name != "gru":
        raise Error(f"{name}: bias=False is not supported on IPUs")


def _topk(_: str, args: _Arguments, kwargs: _Keywords) -> None:
    if not _argument(args, kwargs, 4, "sorted", True):
        raise Error("topk: sorted=False is not supported on IPUs")


def _ctc_loss(_: str, args: _Arguments, kwargs: _Keywords) -> None:
    reduction = _argument(args, kwargs, 5, "reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise Error(f"ctc_loss: reduction must be 'mean' or 'sum', got {reduction!r}")
    targets = _argument(args, kwargs, 1, "targets")
    if targets.dim() != 2:
        raise Error(f"ctc_loss: only 2-D targets are supported, got {targets.dim()}-D targets")


def _backward(*_: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly inside the forward of a wrapped model: remove "
        "the call. A training model itself runs the backward pass and the weight update, from "
        "the loss that its forward returns"
    )


def _set_item(_: str, args: _Arguments, kwargs: _Keywords) -> None:  # noqa: ARG001
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(one, slice) and one.step not in (None, 1) for one in index):
        raise Error("Assigning to a slice with a step other than 1 is not supported on IPUs")


_CHECKS: Final[dict[str, Callable[[str, _Arguments, _Keywords], None]]] = {
    "interpolate": _interpolate,
    "one_hot": _one_hot,
    "bincount": _bincount,
    **{f"max_pool{n}d_with_indices": _no_indices for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d_with_indices": _no_indices for n in (1, 2, 3)},
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
    "topk": _topk,
    "ctc_loss": _ctc_loss,
    "__setitem__": _set_item,
    "backward": _backward,
}
