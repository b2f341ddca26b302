"""Functions that mark inputs and outputs for overlapped I/O (input and output), and checks.

IPU hardware transfers a marked input or output while the hardware computes. On emulated IPUs, the
marks for overlapped I/O are checked but have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from popdist_py.poptorch.calls.nested_values import flatten, tensors_of
from popdist_py.poptorch.enums import OutputMode, OverlapMode
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.current_forward import current_watch

__all__ = ["OverlapConditions", "OverlapMarks", "set_overlap_for_input", "set_overlap_for_output"]

_MIN_IO_TILES: Final = 32


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Mark inputs of the model whose transfer may overlap with computation.

    Args:
        input_tensors: A tensor, or nested tuples, lists and dictionaries of tensors.
        mode: The loop (over device iterations or over gradient accumulation) whose computation may
            overlap with the transfer of the inputs.

    Returns:
        The tensors of ``input_tensors`` in the same structure. The model's forward method must use
        the returned tensors instead of ``input_tensors``.

    Raises:
        Error: The argument contains an object that is not a tensor. The compilation of the model
            raises an Error if the marked tensors cannot be transferred while the IPU computes.
    """
    return _marked("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Mark outputs of the model whose transfer may overlap with computation.

    Args:
        output_tensors: A tensor, or nested tuples, lists and dictionaries of tensors.
        mode: The loop (over device iterations or over gradient accumulation) whose computation may
            overlap with the transfer of the outputs.

    Returns:
        The tensors of ``output_tensors`` in the same structure. The model's forward method must
        return these tensors instead of ``output_tensors``.

    Raises:
        Error: The argument contains an object that is not a tensor. The compilation of the model
            raises an Error if the marked tensors cannot be transferred while the IPU computes.
    """
    return _marked("set_overlap_for_output", output_tensors, mode)


@dataclass(frozen=True, slots=True)
class _Mark:
    function: str
    value: torch.Tensor
    result: torch.Tensor
    mode: OverlapMode


def _marked(function: str, values: Any, mode: OverlapMode) -> Any:
    assert isinstance(mode, OverlapMode), (
        f"{function}: mode must be a poptorch.OverlapMode, got {mode!r}"
    )

    watch = current_watch()
    marks: OverlapMarks | None = None if watch is None else watch.overlap

    def mark(value: torch.Tensor) -> torch.Tensor:
        if marks is None:
            return value
        result = marks.copy_of(value)
        marks.add(_Mark(function, value, result, mode))
        return result

    leaves: list[torch.Tensor] = []
    tree = flatten(values, leaves)
    for constant in tree.constants():
        raise Error(
            f"{function} accepts only tensors, got an object of the type {type(constant).__name__}"
        )
    return tree.rebuild(map(mark, leaves))


@dataclass(frozen=True, slots=True)
class OverlapConditions:
    """The options of a model that decide whether overlapped I/O is allowed.

    Attributes:
        is_pipelined: Whether the model runs as a pipeline, whose stages run at the same time.
        has_io_tiles: Whether the options reserve tiles for input and output.
        output_mode: The output mode, which selects the micro-batches whose outputs a call of the
            model returns. The output mode is never ``OutputMode.Default``.
    """

    is_pipelined: bool
    has_io_tiles: bool
    output_mode: OutputMode

    @property
    def allowed(self) -> bool:
        """Whether the options allow input and output transfers that overlap with computation."""
        return (
            self.has_io_tiles
            and not self.is_pipelined
            and self.output_mode in (OutputMode.All, OutputMode.Sum)
        )


class OverlapMarks:
    """The record of the overlap marks in one forward pass, and of the tensors that the pass uses.

    Args:
        module: The user's module.
        conditions: The options of the model that decide whether overlapped I/O is allowed.
        inputs: The tensors in the arguments of the forward method.
    """

    def __init__(
        self, module: torch.nn.Module, conditions: OverlapConditions, inputs: Sequence[torch.Tensor]
    ) -> None:
        self._module = module
        self._conditions = conditions
        self._is_copying = False
        self.inputs = list(inputs)
        self.outputs: list[torch.Tensor] = []
        # The ``id`` of each tensor that was an argument of an operation.
        self.used: list[int] = []
        self.marks: list[_Mark] = []

    def copy_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor ``value``, without recording a use of this tensor."""
        self._is_copying = True
        try:
            return value.view_as(value)
        finally:
            self._is_copying = False

    def add(self, mark: _Mark) -> None:
        """Record an overlap mark that the forward pass sets."""
        self.marks.append(mark)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Do nothing before a torch function: the method ``after`` records the uses of tensors."""

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the argument tensors of an operation, if the operation returns tensors."""
        is_operation = not self._is_copying and func is not torch.Tensor.view_as
        if is_operation and tensors_of(result):
            self.used += map(id, tensors_of((args, kwargs)))

    @contextmanager
    def following_outputs(self) -> Iterator[None]:
        """Record the outputs of the forward pass in the ``with`` block, and then check all marks.

        Raises:
            Error: The marks of the forward pass break a rule of overlapped I/O.
        """

        def after(_: Any, __: Any, outputs: Any) -> None:
            self.outputs = tensors_of(outputs)

        hook = self._module.register_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()
        self._check()

    def _check(self) -> None:
        for mark in self.marks:
            if mark.function == "set_overlap_for_input":
                _check_input(self, mark)
            else:
                _check_output(self, mark)
        for mark in self.marks:
            if mark.mode != OverlapMode.NoOverlap:
                _check_conditions(mark, self._conditions)


def _check_input(found: OverlapMarks, mark: _Mark) -> None:
    number = _index(found.inputs, mark.value)
    if number is None:
        raise Error(
            f"poptorch.{mark.function} applied on a node which is not a tensor input to the "
            "model: apply it to a tensor argument of the model's forward"
        )
    others = sum(other.value is mark.value for other in found.marks) - 1
    if others or id(mark.value) in found.used or _index(found.outputs, mark.value) is not None:
        raise Error(
            f"poptorch.{mark.function} must be the only op applied to an input, but another op "
            f"also uses input {number}. Pass the result of poptorch.{mark.function} to the other "
            "op"
        )


def _check_output(found: OverlapMarks, mark: _Mark) -> None:
    returned = sum(output is mark.result for output in found.outputs)
    if not returned:
        raise Error(
            f"poptorch.{mark.function} applied on a node which is not a tensor output of the "
            f"model: return the result of poptorch.{mark.function} from the model's forward"
        )
    if returned > 1 or _index(found.outputs, mark.value) is not None:
        raise Error(
            f"poptorch.{mark.function}: the model's forward returns the tensor twice. Return only "
            f"the result of poptorch.{mark.function}"
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
            f"No IO tiles allocated: poptorch.{mark.function} needs at least {_MIN_IO_TILES} IO "
            "tiles. Allocate IO tiles with poptorch.Options.TensorLocations.numIOTiles()"
        )
    if conditions.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"poptorch.{mark.function} needs the output mode All or Sum: set the output mode with "
            "poptorch.Options.outputMode()"
        )
