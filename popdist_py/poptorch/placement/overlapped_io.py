"""Overlapped I/O: marks on a model's inputs and outputs, and the rules they have to keep.

A mark returns the value it is given; on hardware the transfer then runs beside the computation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch.calls.nested_values import flatten, tensors_of
from popdist_py.poptorch.enums import OutputMode, OverlapMode
from popdist_py.poptorch.errors import Error

__all__ = ["checked_overlap", "set_overlap_for_input", "set_overlap_for_output"]

_MIN_IO_TILES: Final = 32


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Mark inputs of the model: their transfer may overlap with computing.

    Args:
        input_tensors: a tensor, or any nesting of tensors in tuples, lists and dicts.
        mode: how far ahead the transfer may begin.

    Returns:
        The same values in the same structure; use these and not the inputs.

    Raises:
        Error: something else than a tensor; while compiling: a rule of overlapped I/O is broken.
    """
    return _marked("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Mark outputs of the model: their transfer may overlap with computing.

    Args:
        output_tensors: a tensor, or any nesting of tensors in tuples, lists and dicts.
        mode: how late the transfer may end.

    Returns:
        The same values in the same structure, to be returned from forward.

    Raises:
        Error: something else than a tensor; while compiling: a rule of overlapped I/O is broken.
    """
    return _marked("set_overlap_for_output", output_tensors, mode)


@dataclass(frozen=True, slots=True)
class _Mark:
    function: str
    value: torch.Tensor
    result: torch.Tensor
    mode: OverlapMode


@dataclass(slots=True)
class _Record:
    """What one forward did with its inputs, and which marks it set."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)  # ids of the tensors that operations took
    marks: list[_Mark] = field(default_factory=list)
    paused: bool = False


class _Current(threading.local):
    record: _Record | None = None


_current = _Current()


def _marked(function: str, values: Any, mode: OverlapMode) -> Any:
    assert isinstance(mode, OverlapMode), (
        f"{function}: mode is a poptorch.OverlapMode, got {mode!r}"
    )

    def mark(value: torch.Tensor) -> torch.Tensor:
        record = _current.record
        if record is None:
            return value
        record.paused = True
        result = value.view_as(value)
        record.paused = False
        record.marks.append(_Mark(function, value, result, mode))
        return result

    leaves: list[torch.Tensor] = []
    tree = flatten(values, leaves)
    for constant in tree.constants():
        raise Error(f"{function}: expected only tensors, got {type(constant).__name__}")
    return tree.rebuild(map(mark, leaves))


class _Uses(TorchFunctionMode):
    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = not self._record.paused and func is not torch.Tensor.view_as
        if operation and tensors_of(result):
            self._record.uses += map(id, tensors_of((args, kwargs)))
        return result


@dataclass(frozen=True, slots=True)
class OverlapConditions:
    """What a model's options say of overlapped I/O.

    Attributes:
        is_pipelined: whether its stages run at the same time.
        has_io_tiles: whether tiles are set apart for input and output.
        output_mode: which outputs return; the default is resolved.
    """

    is_pipelined: bool
    has_io_tiles: bool
    output_mode: OutputMode

    @property
    def allowed(self) -> bool:
        """Whether a transfer may overlap with computing."""
        return (
            self.has_io_tiles
            and not self.is_pipelined
            and self.output_mode in (OutputMode.All, OutputMode.Sum)
        )


@contextmanager
def checked_overlap(
    module: Any, conditions: OverlapConditions, inputs: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Check the marks that the enclosed forward of ``module`` sets.

    Args:
        module: the user's module; another callable is not checked.
        conditions: what the model's options say.
        inputs: the tensors of the forward's arguments.

    Raises:
        Error: a rule of overlapped I/O is broken.
    """
    if not isinstance(module, torch.nn.Module):
        yield
        return
    record = _Record(inputs=list(inputs))

    def after(_: Any, __: Any, outputs: Any) -> None:
        record.outputs = tensors_of(outputs)

    hook = module.register_forward_hook(after)
    previous, _current.record = _current.record, record
    try:
        with _Uses(record):
            yield
    finally:
        _current.record = previous
        hook.remove()
    _check(record, conditions)


def _check(record: _Record, conditions: OverlapConditions) -> None:
    for mark in record.marks:
        if mark.function == "set_overlap_for_input":
            _check_input(record, mark)
        else:
            _check_output(record, mark)
    for mark in record.marks:
        if mark.mode != OverlapMode.NoOverlap:
            _check_conditions(mark, conditions)


def _check_input(record: _Record, mark: _Mark) -> None:
    number = _index(record.inputs, mark.value)
    if number is None:
        raise Error(
            f"poptorch.{mark.function} applied on a node which is not a tensor input to the model"
        )
    others = sum(other.value is mark.value for other in record.marks) - 1
    if others or id(mark.value) in record.uses or _index(record.outputs, mark.value) is not None:
        raise Error(
            f"poptorch.{mark.function} must be the only op applied to an input: input {number} is "
            "used by another one. Use the result of the function instead"
        )


def _check_output(record: _Record, mark: _Mark) -> None:
    returned = sum(output is mark.result for output in record.outputs)
    if not returned:
        raise Error(
            f"poptorch.{mark.function} applied on a node which is not a tensor output of the model"
        )
    if returned > 1 or _index(record.outputs, mark.value) is not None:
        raise Error(
            f"poptorch.{mark.function}: the tensor is returned twice. Return only the result of "
            "the function"
        )


def _index(tensors: list[torch.Tensor], wanted: torch.Tensor) -> int | None:
    return next((i for i, tensor in enumerate(tensors) if tensor is wanted), None)


def _check_conditions(mark: _Mark, conditions: OverlapConditions) -> None:
    if conditions.is_pipelined:
        raise Error(
            f"poptorch.{mark.function} is not supported with poptorch.PipelinedExecution: use "
            "poptorch.ShardedExecution"
        )
    if not conditions.has_io_tiles:
        raise Error(
            f"No IO tiles allocated: poptorch.{mark.function} needs at least {_MIN_IO_TILES}, set "
            "by poptorch.Options.TensorLocations.numIOTiles()"
        )
    if conditions.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"poptorch.{mark.function} needs the output mode All or Sum: set it with "
            "poptorch.Options.outputMode()"
        )
