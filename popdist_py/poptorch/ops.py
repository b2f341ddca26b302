"""PopTorch's operations: control flow, dynamic slices, hints for the compiler, host and custom ops.

Plain PyTorch code computes the same results as the operations on a device. The module ``ops``
imports printing, CTC decoding, point clouds, overlapped I/O, custom operations and MultiConv from
other modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popdist_py.errors import counted
from popdist_py.poptorch.enums import MatMulSerializationMode
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.operators.ctc_decoder import ctc_beam_search_decoder
from popdist_py.poptorch.operators.custom_ops import custom_op, registerCustomOp
from popdist_py.poptorch.operators.multi_conv import MultiConv
from popdist_py.poptorch.operators.point_clouds import fps, nearest
from popdist_py.poptorch.operators.printing import ipu_print_tensor
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.tracing.block_recorder import on_host
from popdist_py.poptorch.tracing.operator_limits import check_proportion
from popdist_py.poptorch.tracing.overlapped_io import (
    set_overlap_for_input,
    set_overlap_for_output,
)
from popdist_py.poptorch.tracing.recorded_operations import (
    note_checkpoint,
    note_proportion,
    serial_products,
)

__all__ = [
    "CPU",
    "MultiConv",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "registerCustomOp",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]


# --- Hints for the compiler -----------------------------------------------------------------------


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` unchanged; on real IPUs, ``nop`` is a barrier for optimisations.

    Raises:
        Error: ``tensor`` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"nop needs a torch.Tensor, got {type(tensor).__name__}")
    return tensor.view_as(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass, instead of recomputing them in the backward pass.

    Args:
        *tensors: The tensors to keep, or one list or tuple of these tensors.

    Returns:
        The given tensors, so that the program can use the results in place of the arguments. The
        result of the function is a single tensor for one argument, and a tuple for several
        arguments. For one list or tuple of tensors, the result is also a list or tuple.

    Raises:
        ValueError: One of the arguments is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        kept = [_checkpoint(tensor) for tensor in tensors[0]]
        kind = type(tensors[0])
        return kind(*kept) if hasattr(kind, "_fields") else kind(kept)
    results = tuple(_checkpoint(tensor) for tensor in tensors)
    return results[0] if len(results) == 1 else results


def _checkpoint(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"All inputs of recomputationCheckpoint must be tensors, got {type(tensor).__name__}"
        )
    note_checkpoint(tensor)
    return tensor.view_as(tensor)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Set the proportion of an IPU's memory that an operation may use on a real IPU.

    Args:
        tensor: The output tensor of the operation whose memory use is limited.
        available_memory_proportion: The proportion of each IPU tile's memory that the operation may
            use, from 0 to 1.

    Returns:
        A view of ``tensor``.

    Raises:
        Error: ``tensor`` is not a tensor.
        AssertionError: ``available_memory_proportion`` is not a number from 0 to 1.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"set_available_memory needs a torch.Tensor, got {type(tensor).__name__}")
    check_proportion(available_memory_proportion, "set_available_memory")
    note_proportion(tensor, available_memory_proportion)
    return tensor.view_as(tensor)


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Return the matrix product ``lhs @ rhs``, computed in parts on real IPUs to save memory.

    Args:
        lhs: The left matrix of the product, with the shape [..., M, K].
        rhs: The right matrix of the product, with the shape [..., K, N].
        mode: The dimension of the matrix product that is split into parts. For the shapes [M, K]
            and [K, N] of the matrices, InputChannels splits M, ReducingDim splits K, and
            OutputChannels splits N.
        factor: The number of parts of the matrix product, which must divide the size of the split
            dimension.
        keep_precision: Whether the parts of a float16 matrix product are added in float32.

    Raises:
        AssertionError: An argument has a wrong type.
        Error: The number ``factor`` of parts of the matrix product does not divide the size of the
            split dimension.
    """
    assert isinstance(keep_precision, bool), (
        f"serializedMatMul: keep_precision must be a bool, got {keep_precision!r}"
    )
    assert isinstance(factor, int), f"serializedMatMul: factor must be an int, got {factor!r}"
    assert isinstance(mode, MatMulSerializationMode), (
        f"serializedMatMul: mode must be a poptorch.MatMulSerializationMode, got {mode!r}"
    )
    parts = factor if factor and mode != MatMulSerializationMode.Disabled else 1
    if current_forward.is_running() and parts != 1:
        split = {
            MatMulSerializationMode.InputChannels: lhs.shape[-2:][0],
            MatMulSerializationMode.ReducingDim: lhs.shape[-1],
            MatMulSerializationMode.OutputChannels: rhs.shape[-1],
        }[mode]
        if split % factor:
            raise Error(
                f"Invalid serialization factor {factor} for mode {mode.name}: the factor must "
                f"divide the size of the split dimension, which is {split}"
            )
    with serial_products(parts):
        return torch.matmul(lhs, rhs)


# --- Control flow ---------------------------------------------------------------------------------


def for_loop(
    count: int, body: Callable[..., Any], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Call ``body`` repeatedly, each time with the tensors that the previous call returned.

    Args:
        count: The number of calls of ``body``.
        body: A function that takes the tensors as positional arguments, and returns the same number
            of tensors.
        inputs: The tensors for the first call of ``body``, which receives copies of them.

    Returns:
        The tensors that the last call of ``body`` returned.

    Raises:
        ValueError: ``inputs`` is not a list of tensors.
        Error: The model is a training model, or ``body`` returns another number of tensors than it
            takes.
    """
    _check_tensor_list("for_loop", "inputs", inputs)
    _check_inference("for_loop")
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        values = _results(body(*values))
        if len(values) != len(inputs):
            raise Error(
                f"poptorch.for_loop: the body takes {counted(len(inputs), 'tensor')}, but returned "
                f"{counted(len(values), 'tensor')}: return as many tensors as the body takes"
            )
    return values


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the results of ``then_body`` or ``else_body``, chosen by ``condition``.

    Args:
        condition: A tensor with one element, which chooses ``then_body`` (True) or ``else_body``
            (False). If ``condition`` is True, the function ``cond`` returns the results of
            ``then_body``.
        then_body: A function that takes ``then_inps`` as positional arguments. ``then_body`` may
            also use tensors of the surrounding code.
        then_inps: The list of tensors for ``then_body``, which receives copies of them.
        else_body: A function that takes ``else_inps`` as positional arguments, and returns the same
            number of tensors as ``then_body``.
        else_inps: The list of tensors for ``else_body``, which receives copies of them.

    Raises:
        ValueError: ``then_inps`` or ``else_inps`` is not a list of tensors.
        Error: The model is a training model, or ``then_body`` and ``else_body`` return different
            numbers of tensors.
    """
    _check_tensor_list("cond", "then_inps", then_inps)
    _check_tensor_list("cond", "else_inps", else_inps)
    _check_inference("cond")
    if not current_forward.is_running():
        body, inputs = (then_body, then_inps) if condition else (else_body, else_inps)
        return _results(body(*(tensor.clone() for tensor in inputs)))
    # Both ``then_body`` and ``else_body`` run, because the value of the condition is not known
    # while the model is traced. After ``then_body`` and ``else_body`` have run, ``torch.where``
    # chooses between their results.
    then_values = _results(then_body(*(tensor.clone() for tensor in then_inps)))
    else_values = _results(else_body(*(tensor.clone() for tensor in else_inps)))
    if len(then_values) != len(else_values):
        raise Error(
            "poptorch.cond: both branches must return the same number of tensors, but then_body "
            f"returned {len(then_values)} and else_body returned {len(else_values)}"
        )
    chosen = condition.reshape(()).bool()
    pairs = zip(then_values, else_values, strict=True)
    return [torch.where(chosen, value, other) for value, other in pairs]


def _check_tensor_list(name: str, argument: str, values: Any) -> None:
    text = f"poptorch.{name} expects input tensors ({argument}) to be a list of tensors."
    if not isinstance(values, list):
        raise ValueError(f"{text} (Object is not list but {type(values).__name__})")
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{text} (Object contained in list at index {index} is not torch.tensor but "
                f"{type(value).__name__})"
            )


def _check_inference(name: str) -> None:
    if current_forward.is_training():
        raise Error(f"poptorch.{name}() is only supported in inference models")


def _results(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


# --- Dynamic slices -------------------------------------------------------------------------------


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Return ``tensor[start : start + size : step]`` along a dimension.

    Args:
        tensor: A tensor of any shape.
        dim: The index of the dimension of ``tensor`` along which to slice.
        start: The index of the first element, as an integer tensor with one element. If the slice
            exceeds the end of the dimension, it continues at the beginning of the dimension.
        size: The extent of the slice, which must divide the size of the dimension ``dim``.
        step: The distance between two elements of the slice in ``tensor``.

    Returns:
        A tensor with ceil(size / step) elements along ``dim``. All other dimensions of the returned
        tensor have the same size as in ``tensor``.

    Raises:
        Error: An argument has a wrong type, or ``size`` does not divide the size of the dimension
            ``dim``.
    """
    _check_slice("dynamic_slice", tensor, dim, start, size)
    if not isinstance(step, int) or step < 1:
        raise Error(f"dynamic_slice: step must be an int of at least 1, got {step!r}")
    extent = tensor.shape[dim]
    if size > extent or extent % size:
        raise Error(
            f"dynamic_slice: the size of the slice ({size}) must divide the size of the sliced "
            f"dimension ({extent})"
        )
    return torch.index_select(tensor, dim, _indices(start, size, step, extent))


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """Return a copy of ``input``, where ``src`` replaces the elements from ``start`` on.

    Args:
        input: A tensor of any shape. ``dynamic_update`` does not change ``input``.
        src: A tensor of the new elements, with ``size`` elements along ``dim``. All other
            dimensions of ``src`` have the same size as in ``input``.
        dim: The index of the dimension of ``input`` along which to replace elements.
        start: The index of the first replaced element, as an integer tensor with one element.
        size: The number of replaced elements along ``dim``.

    Raises:
        Error: An argument has a wrong type, or ``src`` does not fit ``input`` in shape or dtype.
    """
    if not isinstance(src, torch.Tensor):
        raise Error(f"dynamic_update: src must be a torch.Tensor, got {type(src).__name__}")
    _check_slice("dynamic_update", input, dim, start, size)
    if input.dim() != src.dim():
        raise Error(
            "dynamic_update: input and src must have the same number of dimensions, but input "
            f"has {input.dim()} and src has {src.dim()}"
        )
    if input.dtype != src.dtype:
        raise Error(
            f"dynamic_update: input and src must have the same dtype, but input has {input.dtype} "
            f"and src has {src.dtype}"
        )
    if src.shape[dim] != size:
        raise Error(
            f"dynamic_update: src must have {counted(size, 'element')} in dimension {dim}, but "
            f"src has the shape {tuple(src.shape)}"
        )
    indices = _indices(start, size, 1, input.shape[dim])
    shape = [1] * input.dim()
    shape[dim] = size
    return torch.scatter(input, dim, indices.reshape(shape).expand(src.shape), src)


def _check_slice(name: str, tensor: Any, dim: Any, start: Any, size: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise Error(
            f"{name}: the first argument must be a torch.Tensor, got {type(tensor).__name__}"
        )
    if not isinstance(dim, int) or not isinstance(size, int):
        raise Error(f"{name}: dim and size must be ints, got {dim!r} and {size!r}")
    if not isinstance(start, torch.Tensor):
        raise Error(f"{name}: start must be a torch.Tensor, got {type(start).__name__}")
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise Error(
            f"{name}: start must be an integer tensor with one element, got a tensor of the dtype "
            f"{start.dtype} and the shape {tuple(start.shape)}"
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise Error(
            f"{name}: dimension {dim} is out of range for a tensor of the shape "
            f"{tuple(tensor.shape)}"
        )
    if size == 0:
        raise Error(f"{name}: size is 0, but the start and end of a slice must be different")
    if size < 0:
        raise Error(
            f"{name}: size is {size}, but taking a slice with the end less than the start is not "
            "supported"
        )


def _indices(start: torch.Tensor, size: int, step: int, extent: int) -> torch.Tensor:
    offsets = torch.arange(0, size, step, device=start.device)
    return (start.reshape(()).long() + offsets) % extent


# --- Operations on the host -----------------------------------------------------------------------


class CPU:
    """Runs a part of an inference model on the host instead of the device.

    Args:
        layer_to_call: A callable that takes tensors. If ``layer_to_call`` is a module, its
            parameters get ``requires_grad=False``.
        ID: A name for the callable ``layer_to_call``.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        self._ID = ID
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``layer_to_call`` on the host.

        Raises:
            Error: The model is a training model.
        """
        _check_inference("CPU")
        with on_host():
            return self._layer_to_call(*args, **kwargs)
