"""A dispatch mode of torch that runs a forward pass on tensors without values.

In the mode ``UnknownValues``, most tensors have only a shape and a type, but no elements in memory.
Small constant tensors also have elements with values, because a forward pass may read these values.
For example, torchvision's ``Normalize`` checks whether a standard deviation is 0, and random
transforms read the numbers that they draw. In this mode, inputs and weights do not have values. An
operation raises an error if it reads the elements of an input or a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["UnknownValues"]

# The largest number of elements of a tensor whose elements have values in the mode
# ``UnknownValues``. The constants that a forward pass reads (means, kernels and random numbers)
# have fewer elements. An operation on two tensors of ``_MOST_ELEMENTS`` elements has a result of
# about a million elements at most.
_MOST_ELEMENTS: Final = 1024


class UnknownValues(FakeTensorMode):
    """A dispatch mode of torch that computes the shapes and types of results, but not the values.

    If all tensors of an operation are small and have values, the values of the operation's result
    are also computed.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The storages (memory) of tensors that operations allocated in the mode ``UnknownValues``.
        # Operations may write values only to storages in ``_own``, so that the user's own tensors
        # do not change.
        self._own: set[StorageWeakRef] = set()
        # The storages (memory) of tensors whose values are unknown, because an operation without
        # values changed the tensor.
        self._lost: set[StorageWeakRef] = set()
        # ``_keeps_data`` is False while an operation runs on tensors that have no values. If an
        # operation runs on tensors without values, all operations that it calls also run on tensors
        # without values.
        self._keeps_data = True

    def unknown(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that has a shape and a type, but no values."""
        before, self._keeps_data = self._keeps_data, False
        try:
            return torch.empty(shape, dtype=dtype)
        finally:
            self._keeps_data = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each operation for ``torch.compile``.

        A call of torch's wrapper would take longer than the operation, because the operation does
        not compute values.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on its tensors' values if all values are known, or on their shapes."""
        named = dict(kwargs or {})
        if not self._keeps_data:
            return super().__torch_dispatch__(func, types, args, named)
        written = _written(func, args, named)
        if FakeTensor in types and not written:
            return self._without_data(func, types, args, named)
        tensors = list(_tensors((args, named)))
        is_known = bool(tensors) and all(map(self._is_known, tensors))
        if is_known and all(_memory(each) in self._own for each in written):
            return self._with_data(func, args, named)
        if written:
            # The operation runs on copies that have shapes but no values, so that the user's own
            # tensors keep their values.
            self._lost.update(_memory(each) for each in written if not _is_fake(each))
            args, named = tree_map_only(torch.Tensor, self._as_fake, (args, named))
        result = self._without_data(func, types, args, named)
        if not tensors and all(map(_could_be_known, _tensors(result))):
            return self._with_data(func, args, named)
        return result

    def _without_data(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        before, self._keeps_data = self._keeps_data, False
        try:
            if func in _SHAPES:
                with self:
                    return _SHAPES[func](*args, **kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._keeps_data = before

    def _with_data(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        known = {_memory(each) for each in _tensors((args, kwargs))}
        self._own.update(m for m in map(_memory, _tensors(result)) if m not in known)
        return result

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if _is_fake(tensor) else self.from_tensor(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
        return is_plain and _could_be_known(tensor) and _memory(tensor) not in self._lost


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a CTC loss for each sample, and the probabilities that its backward pass reads.

    If ``targets`` has one dimension, the length of the longest target is not known. The function
    then returns probabilities for one target that has the length of all targets together.
    """
    steps, samples = log_probs.shape[:2]
    states = 2 * targets.shape[-1] + 1
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, states)


# For operations of torch that always need values, a function that computes the results' shapes.
# The mode of torch for tensors without values refuses these operations, because the shapes of some
# of their results depend on values. No later operation of a forward pass reads these results.
_SHAPES: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the arguments of an operation that the operation changes in place."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return []
    given = dict(enumerate(args)) | dict(kwargs)
    changed = [
        given.get(position, given.get(argument.name))
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(_tensors(changed))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def _could_be_known(tensor: torch.Tensor) -> bool:
    is_small = tensor.numel() <= _MOST_ELEMENTS
    return is_small and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
