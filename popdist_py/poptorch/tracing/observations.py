"""The class Observer, which records the torch operations of a forward and their memory blocks.

A record contains the sizes of tensors and the numbers of memory blocks, but not the values of
tensors. Recording does not change the results of operations. The package ``on_ipu`` decides how the
device would run an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.current_forward import current_watch
from popdist_py.poptorch.tracing.losses import Losses

__all__ = [
    "CHECKPOINT",
    "PROPORTION",
    "Observation",
    "Observed",
    "Observer",
    "Seen",
    "SeenWeight",
    "note_checkpoint",
    "note_proportion",
    "serial_products",
]

# The observer records a call of one of these poptorch functions like an operation with this name.
CHECKPOINT = "recomputationCheckpoint"
PROPORTION = "set_available_memory"


@dataclass(frozen=True, slots=True)
class Seen:
    """The shape, dtype and memory block of a tensor at the time of an operation.

    Attributes:
        storage: The number of the memory block. Each block of a forward has a different number.
        shape: The sizes of the tensor.
        strides: The distance between neighbours along each dimension, in elements.
        offset: The position of the first element in the memory block, in elements.
        dtype: The dtype of the elements.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """The number of elements in memory; an expanded dimension counts as one element."""
        count = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            count *= size if stride or not size else 1
        return count


@dataclass(frozen=True, slots=True)
class SeenWeight:
    """A parameter or buffer of a model.

    Attributes:
        name: The name of the parameter or buffer in the model.
        value: The description of the tensor.
        is_trained: Whether an optimizer step changes the tensor.
    """

    name: str
    value: Seen
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """One operation of torch.

    Attributes:
        operator: The name of the operator without its overload, such as ``addmm``.
        arguments: The arguments of the operation, with tensors replaced by :class:`Seen` objects.
        outputs: The tensors that the operation returned.
        written: The arguments that the operation changed in place.
        module: The path of the submodule whose forward called the operation.
        function: The name of torch's function that called the operation, and the number of the
            call.
        place: The phase and the IPU of the block that contains the operation.
        serial: The number of parts of a matrix product that are computed one after the other.
    """

    operator: str
    arguments: tuple[Any, ...]
    outputs: tuple[Seen, ...]
    written: tuple[Seen, ...] = ()
    module: str = ""
    function: tuple[str, int] = ("", 0)
    place: tuple[int, int] = (0, 0)
    serial: int = 1

    @property
    def inputs(self) -> tuple[Seen, ...]:
        """The tensors in the arguments of the operation, including tensors in lists."""
        return tuple(_seen_in(self.arguments))


def _seen_in(values: Sequence[Any]) -> Iterator[Seen]:
    for value in values:
        if isinstance(value, Seen):
            yield value
        elif isinstance(value, tuple):
            yield from _seen_in(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The record of one forward of one micro-batch.

    Attributes:
        operations: The operations, in the order of their execution.
        inputs: The names and the tensors of the inputs from the host.
        weights: The parameters and buffers. Tied parameters occur only once.
        outputs: The tensors that the forward returned, and the loss of a training model. A loss
            that the forward returned occurs only once.
    """

    operations: tuple[Observation, ...]
    inputs: tuple[tuple[str, Seen], ...]
    weights: tuple[SeenWeight, ...]
    outputs: tuple[Seen, ...]


class Observer(TorchDispatchMode):
    """Records the operations of the forward that runs inside this dispatch mode.

    The observer holds weak references to memory blocks. A weak reference does not keep the data of
    a block alive, but it prevents torch from giving the same address to another block.

    Args:
        blocks: The recorder with the place of the current operation.
        losses: The losses of a training model; None for inference.
    """

    # Without this attribute, torch raises an error for a higher-order operator in the forward. With
    # the attribute, a higher-order operator ends the recording, and the forward continues.
    supports_higher_order_operators = True

    def __init__(self, blocks: BlockRecorder, losses: Losses | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = blocks
        self._losses = losses
        self._numbers: dict[int, int] = {}
        self._held: list[StorageWeakRef] = []
        self._operations: list[Observation] = []
        self._inputs: tuple[tuple[str, Seen], ...] = ()
        self._weights: tuple[SeenWeight, ...] = ()
        self._outputs: tuple[Seen, ...] = ()
        self.serial = 1
        self.failure: Exception | None = None

    def observed(self) -> Observed:
        """Return the record of the forward.

        Raises:
            Exception: An error occurred while recording. The forward continued after the error.
        """
        if self.failure is not None:
            raise self.failure
        return Observed(
            operations=tuple(self._operations),
            inputs=self._inputs,
            weights=self._weights,
            outputs=self._outputs,
        )

    def begin(self, model: nn.Module, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> None:
        """Record the weights of ``model``, and the inputs with their names.

        An error while recording does not stop the forward.
        """
        self._guarded(self._begin, model, names, inputs)

    def finish(self, result: Any) -> None:
        """Record the result of the forward, and delete all references to tensors."""
        self._guarded(self._end, result)
        self._losses = None

    def mark(self, name: str, tensor: torch.Tensor, *values: Any) -> None:
        """Record a statement of the program about ``tensor``, such as a checkpoint."""
        self._guarded(lambda: self._note(name, (self._seen(tensor), *values), ()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap ``__torch_dispatch__``.

        Torch would wrap ``__torch_dispatch__`` to exclude it from torch.compile. A call of the
        wrapper takes longer than recording an operation.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation and record it."""
        result = func(*args, **(kwargs or {}))
        self._guarded(self._operation, func, args, kwargs or {}, result)
        return result

    def _guarded(self, note: Callable[..., None], *arguments: Any) -> None:
        """Call ``note``, and store an exception in ``failure`` instead of raising it.

        An error while recording must not stop the forward.
        """
        if self.failure is not None:
            return
        try:
            # A ``ForwardWatch`` must not record that ``note`` reads the shapes of tensors.
            with torch._C.DisableTorchFunction():
                note(*arguments)
        except Exception as error:
            # The traceback would keep the tensors of the forward alive.
            self.failure = error.with_traceback(None)

    def _begin(
        self, model: nn.Module, names: Sequence[str], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._inputs = tuple(
            (name, self._seen(tensor)) for name, tensor in zip(names, inputs, strict=True)
        )
        weights: dict[int, SeenWeight] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            seen = self._seen(tensor)
            weights.setdefault(seen.storage, SeenWeight(name, seen, tensor.requires_grad))
        self._weights = tuple(weights.values())

    def _end(self, result: Any) -> None:
        outputs = [self._seen(tensor) for tensor in tensors_of(result)]
        loss = self._losses.last if self._losses is not None else None
        if loss is not None:
            outputs.append(self._seen(loss))
        self._outputs = tuple(dict.fromkeys(outputs))

    def _operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        kind = _kind(func)
        if kind is None:
            return
        name, written = kind
        arguments = tuple(self._argument(value) for value in (*args, *kwargs.values()))
        changed: tuple[Seen, ...] = ()
        if written:
            given = dict(enumerate(args)) | dict(kwargs)
            tensors = (tensor for key in written for tensor in tensors_of(given.get(key)))
            changed = tuple([self._seen(tensor) for tensor in tensors])
        if isinstance(result, torch.Tensor):
            outputs: tuple[Seen, ...] = (self._seen(result),)
        else:
            outputs = tuple(self._seen(tensor) for tensor in tensors_of(result))
        self._note(name, arguments, outputs, changed)

    def _note(
        self,
        name: str,
        arguments: tuple[Any, ...],
        outputs: tuple[Seen, ...],
        written: tuple[Seen, ...] = (),
    ) -> None:
        block = self._blocks.place
        self._operations.append(
            Observation(
                name,
                arguments,
                outputs,
                written,
                module=self._blocks.names.module,
                function=(self._blocks.function, self._blocks.calls),
                place=(0, 0) if block is None else (block.phase, block.ipu),
                serial=self.serial,
            )
        )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._seen(value)
        if isinstance(value, list | tuple):
            return tuple([self._argument(item) for item in value])
        return value

    def _seen(self, tensor: torch.Tensor) -> Seen:
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._numbers)
            self._held.append(StorageWeakRef(storage))
        offset = int(tensor.storage_offset())
        return Seen(number, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)


@cache
def _kind(func: Any) -> tuple[str, tuple[int | str, ...]] | None:
    """Return the name of an operation, and the positions and names of arguments that it changes.

    For a query about a tensor, such as a query for its device, this function returns None.

    Raises:
        TypeError: The operation is a higher-order operator. An observer cannot observe the
            functions that a higher-order operator calls.
    """
    if isinstance(func, HigherOrderOperator):
        raise TypeError(f"{func.name()} calls functions that cannot be observed")
    if func.namespace == "prim":
        return None
    written: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [position, argument.name]
    name = func._schema.name.rpartition("::")[2]
    return name, tuple(written)


def _current_observer() -> Observer | None:
    watch = current_watch()
    return None if watch is None else watch.observer


def note_checkpoint(tensor: torch.Tensor) -> None:
    """Record in the current forward's observer that ``tensor`` is kept for the backward pass."""
    observer = _current_observer()
    if observer is not None:
        observer.mark(CHECKPOINT, tensor)


def note_proportion(tensor: torch.Tensor, proportion: float) -> None:
    """Record the proportion of tile memory that the operation with the result ``tensor`` may use.

    The observer of the current forward makes the record.
    """
    observer = _current_observer()
    if observer is not None:
        observer.mark(PROPORTION, tensor, proportion)


@contextmanager
def serial_products(parts: int) -> Iterator[None]:
    """Record that each enclosed matrix product is computed in ``parts`` parts.

    The observer of the current forward makes the record.
    """
    observer = _current_observer()
    if observer is None:
        yield
        return
    previous, observer.serial = observer.serial, parts
    try:
        yield
    finally:
        observer.serial = previous
