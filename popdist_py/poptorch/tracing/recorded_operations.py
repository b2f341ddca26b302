"""The class Observer, which records the torch operations of a forward pass and their memory use.

The record of an operation contains the sizes of tensors and the numbers of their storages, but not
the values of tensors. An ``Observer`` does not change the results of the operations that it
records. The package ``on_ipu`` decides how an IPU would run a recorded operation.
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

# The names of two PopTorch functions whose calls are recorded. An ``Observer`` records a call of
# ``recomputationCheckpoint`` or ``set_available_memory`` as an operation of this name.
CHECKPOINT = "recomputationCheckpoint"
PROPORTION = "set_available_memory"


@dataclass(frozen=True, slots=True)
class Seen:
    """The shape, dtype and storage of a tensor at the time of a recorded operation.

    Attributes:
        storage: The number that identifies the tensor's storage. Each storage in a forward pass has
            a different number.
        shape: The size of each dimension of the tensor.
        strides: The strides of the tensor, in elements.
        offset: The position of the tensor's first element in the storage, in elements.
        dtype: The dtype of the tensor.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """The number of elements that the tensor has in memory.

        A dimension with stride 0 counts as one element, because all its elements share memory.
        """
        count = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            count *= size if stride or not size else 1
        return count


@dataclass(frozen=True, slots=True)
class SeenWeight:
    """The record of a parameter or buffer of a model.

    Attributes:
        name: The name of the parameter or buffer in the model.
        value: The shape, dtype and storage of the parameter or buffer.
        is_trained: Whether an optimizer step changes the parameter.
    """

    name: str
    value: Seen
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """The record of one torch operation in a forward pass.

    Attributes:
        operator: The name of the operator without its overload, such as ``addmm``.
        arguments: The arguments of the operation, with tensors replaced by :class:`Seen` objects.
        outputs: The records of the tensors that the operation returned.
        written: The arguments that the operation changed in place.
        module: The path of the submodule whose forward method called the operation.
        function: The name of the torch function that called the operation, and the number of the
            function's call.
        place: The phase number and the IPU index of the block that contains the operation.
        serial: The number of parts into which the operation is split if the operation is a matrix
            product. An IPU computes the parts of the matrix product one after the other.
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
        """The records of the tensors in the operation's arguments, including tensors in lists."""
        return tuple(_seen_in(self.arguments))


def _seen_in(values: Sequence[Any]) -> Iterator[Seen]:
    for value in values:
        if isinstance(value, Seen):
            yield value
        elif isinstance(value, tuple):
            yield from _seen_in(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The record of one forward pass of one micro-batch.

    Attributes:
        operations: The operations, in the order of their execution.
        inputs: The name and the record of each input tensor that comes from the host.
        weights: The records of the parameters and buffers. A parameter that several modules share
            occurs only once.
        outputs: The records of the tensors that the forward method returned, and of the loss of a
            training model. If the forward method returned the loss, the loss occurs only once.
    """

    operations: tuple[Observation, ...]
    inputs: tuple[tuple[str, Seen], ...]
    weights: tuple[SeenWeight, ...]
    outputs: tuple[Seen, ...]


class Observer(TorchDispatchMode):
    """A dispatch mode that records the operations of the forward pass inside its ``with`` block.

    The observer holds weak references to the storages of tensors. A weak reference does not keep
    the data of a storage alive, but prevents torch from giving the same address to another storage.

    Args:
        blocks: The recorder that stores the IPU and phase of the current operation.
        losses: The recorder of a training model's losses; None for inference.
    """

    # Without ``supports_higher_order_operators``, torch raises an error for a higher-order operator
    # in the forward pass. With the attribute ``supports_higher_order_operators``, a higher-order
    # operator ends the recording, and the forward pass continues.
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
        """Return the record of the forward pass.

        Raises:
            Exception: An error occurred during the recording of the forward pass.
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
        """Record the weights of ``model``, and the input tensors with their names.

        An error while the weights are recorded does not stop the forward pass.
        """
        self._guarded(self._begin, model, names, inputs)

    def finish(self, result: Any) -> None:
        """Record the result of the forward pass, and delete all references to tensors."""
        self._guarded(self._end, result)
        self._losses = None

    def mark(self, name: str, tensor: torch.Tensor, *values: Any) -> None:
        """Record a call of a poptorch function, such as a checkpoint, for ``tensor``."""
        self._guarded(lambda: self._note(name, (self._seen(tensor), *values), ()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap ``__torch_dispatch__``.

        The wrapper of torch would exclude ``__torch_dispatch__`` from torch.compile. A call of the
        wrapper takes longer than the recording of an operation.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, and record the call."""
        result = func(*args, **(kwargs or {}))
        self._guarded(self._operation, func, args, kwargs or {}, result)
        return result

    def _guarded(self, note: Callable[..., None], *arguments: Any) -> None:
        """Call ``note``; if ``note`` raises an exception, store the exception in ``failure``.

        An error during the recording must not stop the forward pass.
        """
        if self.failure is not None:
            return
        try:
            # The function ``note`` reads the shapes of tensors. A ``ForwardWatch`` must not record
            # the calls that read shapes.
            with torch._C.DisableTorchFunction():
                note(*arguments)
        except Exception as error:
            # The traceback of the stored error is removed, because the traceback would keep the
            # tensors of the forward pass in memory.
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
    """Return an operation's name, and which of its arguments the operation changes in place.

    The function ``_kind`` returns None for operations that only query a tensor, for example for the
    tensor's device.

    Raises:
        TypeError: The operation is a higher-order operator. An observer cannot observe the
            functions that a higher-order operator calls.
    """
    if isinstance(func, HigherOrderOperator):
        raise TypeError(
            f"The operations inside the higher-order operator {func.name()} cannot be recorded"
        )
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
    """Record that ``tensor`` is kept for the backward pass, in the current ``Observer``."""
    observer = _current_observer()
    if observer is not None:
        observer.mark(CHECKPOINT, tensor)


def note_proportion(tensor: torch.Tensor, proportion: float) -> None:
    """Record the proportion of tile memory that the operation with the result ``tensor`` may use.

    The ``Observer`` of the current forward pass stores the memory proportion.
    """
    observer = _current_observer()
    if observer is not None:
        observer.mark(PROPORTION, tensor, proportion)


@contextmanager
def serial_products(parts: int) -> Iterator[None]:
    """Record that each matrix product in the ``with`` block is computed in ``parts`` parts.

    The ``Observer`` of the current forward pass stores the number of parts of each matrix product.
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
