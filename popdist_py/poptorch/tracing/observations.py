"""Watching a forward: which operations of torch run, on what memory, and where they stand.

What is noted has sizes and numbers of memory blocks, never a tensor or its values.
Nothing here decides what an operation means to the device, or changes what it computes.
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

# Named as the functions of poptorch that make the notes.
CHECKPOINT = "recomputationCheckpoint"
PROPORTION = "set_available_memory"


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as an operation saw it.

    Attributes:
        storage: number of its memory block, another one for each block of a forward.
        shape: its sizes.
        strides: distances of neighbours along each dimension, in elements.
        offset: of its first element in the block.
        dtype: of its elements.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of different elements: what is expanded counts once."""
        count = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            count *= size if stride or not size else 1
        return count


@dataclass(frozen=True, slots=True)
class SeenWeight:
    """A parameter or buffer.

    Attributes:
        name: in the model.
        value: its tensor.
        is_trained: whether an update changes it.
    """

    name: str
    value: Seen
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """One operation of torch.

    Attributes:
        operator: its name, without that of the overload: ``addmm``.
        arguments: what it was given, tensors as :class:`Seen`.
        outputs: tensors that it returned.
        written: tensors among the arguments that it changed in place.
        module: path of the submodule whose forward called it.
        function: name of torch's function that it is part of, and which call that was.
        place: phase and IPU of the block that it is in.
        serial: parts that a product is done in.
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
        """The tensors among its arguments, those in lists included."""
        return tuple(_seen_in(self.arguments))


def _seen_in(values: Sequence[Any]) -> Iterator[Seen]:
    for value in values:
        if isinstance(value, Seen):
            yield value
        elif isinstance(value, tuple):
            yield from _seen_in(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One forward of one micro-batch.

    Attributes:
        operations: in the order in which they ran.
        inputs: names and tensors of what the host sends.
        weights: parameters and buffers; tied ones once.
        outputs: what the forward returned, and the loss of a training model if it is another one.
    """

    operations: tuple[Observation, ...]
    inputs: tuple[tuple[str, Seen], ...]
    weights: tuple[SeenWeight, ...]
    outputs: tuple[Seen, ...]


class Observer(TorchDispatchMode):
    """Notes the operations of the forward that runs inside.

    It holds memory blocks weakly, so that none lives longer and no address means two of them.

    Args:
        blocks: Knows the place of the operation that runs.
        losses: Knows the loss of a training model; None for inference.
    """

    # torch refuses them inside a mode that does not say so; here they end the observing.
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
        """Return what was seen.

        Raises:
            Exception: what went wrong while observing: the forward itself goes on then.
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
        """Take note of the weights of ``model`` and of the inputs, which have these names.

        If the observer cannot do that, the forward runs all the same.
        """
        self._guarded(self._begin, model, names, inputs)

    def finish(self, result: Any) -> None:
        """Take note of what the forward returned. No tensor is referred to from here on."""
        self._guarded(self._end, result)
        self._losses = None

    def mark(self, name: str, tensor: torch.Tensor, *values: Any) -> None:
        """Take note of what a program says about ``tensor``."""
        self._guarded(lambda: self._note(name, (self._seen(tensor), *values), ()))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that its compiler needs no detour here: it takes longer than the note."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation and note it."""
        result = func(*args, **(kwargs or {}))
        self._guarded(self._operation, func, args, kwargs or {}, result)
        return result

    def _guarded(self, note: Callable[..., None], *arguments: Any) -> None:
        """Note something; what goes wrong then stays here: observing decides nothing."""
        if self.failure is not None:
            return
        try:
            # To ask a tensor its shape is nothing that a model does.
            with torch._C.DisableTorchFunction():
                note(*arguments)
        except Exception as error:
            # Its traceback would keep the tensors of the forward alive.
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
    """Return name and changed arguments of an operation; None of a question about a tensor.

    Raises:
        TypeError: an operation of higher order, whose functions run unseen.
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
    """Tell the observer of this forward that this value is kept for the backward."""
    observer = _current_observer()
    if observer is not None:
        observer.mark(CHECKPOINT, tensor)


def note_proportion(tensor: torch.Tensor, proportion: float) -> None:
    """Tell the observer of this forward how much memory may be taken by what made this value."""
    observer = _current_observer()
    if observer is not None:
        observer.mark(PROPORTION, tensor, proportion)


@contextmanager
def serial_products(parts: int) -> Iterator[None]:
    """Tell the observer of this forward that products inside are done in so many parts."""
    observer = _current_observer()
    if observer is None:
        yield
        return
    previous, observer.serial = observer.serial, parts
    try:
        yield
    finally:
        observer.serial = previous
