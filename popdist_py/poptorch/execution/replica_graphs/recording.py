"""The function ``record``, which runs a function once and records its operations as a graph.

The recorded operations are the calls of torch's kernels, including the calls that autograd and
``vmap`` make. To save time, zeros replace the results of large matrix products and convolutions
while the graph is recorded, except the results of products and convolutions of constants. The
module ``recording`` does not depend on models, replicas or gradients. The recorded graph keeps only
the tensors that it needs as constants, so recording a function does not take more memory than
running the function.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RecordedGraph", "ZerosRefused", "record"]

_ATEN: Final = torch.ops.aten
# The maximum number of operations in a graph. A graph with more operations usually comes from a
# Python loop over single elements. Recording 50,000 operations takes about two seconds, and the
# code of a larger graph exceeds a CPU's instruction cache.
_MAX_NODES: Final = 50_000
# Torch's operations that multiply matrices. While a graph is recorded, zeros may replace the
# results of these operations. Matrix products and convolutions take most of the time of a model's
# run.
_MATRIX_PRODUCTS: Final = frozenset(
    {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
)
# For each convolution operation, the index of the argument that contains the images. The argument
# after the images contains the kernels.
_CONVOLUTIONS: Final = {_ATEN.convolution.default: 0, _ATEN.convolution_backward.default: 1}
# A matrix product or convolution counts as large if its largest argument has at least _LARGE
# elements. For smaller matrix products and convolutions, computing the result is faster than
# computing only the shape of the result.
_LARGE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """The operations of one run of a function, recorded as a graph.

    Attributes:
        graph: A graph with one placeholder for each argument, ``call_function`` nodes for torch's
            operations, ``get_attr`` nodes for constants, and one list as output. A node's
            ``meta["val"]`` is a tensor on the device "meta" with the shape, strides and dtype of
            the node's value.
        constants: The tensors that are neither arguments of the recorded function nor results of
            operations, keyed by the target of their ``get_attr`` node.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]


class ZerosRefused(RuntimeError):
    """An operation failed, possibly because zeros had replaced the result of a matrix product.

    For example, the inverse of a matrix fails for zeros. ZerosRefused is also raised if the
    recorded function has caught the operation's error, because the function might call other
    operations if no zeros replaced results.
    """


def record(
    function: Callable[..., Sequence[torch.Tensor | None]],
    arguments: Sequence[torch.Tensor],
    *,
    is_real: bool = False,
) -> RecordedGraph:
    """Run a function once, and return a graph to repeat its operations with other arguments.

    Args:
        function: The function to record, which returns a sequence of tensors and None values.
        arguments: The arguments of the function, which must all be different tensors. If the
            recorded function changes its arguments, the changes are not undone.
        is_real: Whether the results of large matrix products and convolutions are computed. With
            False, zeros replace the results of large matrix products and convolutions.

    Raises:
        ZerosRefused: An operation failed after zeros had replaced the result of a large matrix
            product or convolution.
        RuntimeError: The sequence of operations depends on the numbers in the arguments, there are
            more than 50,000 operations, or an operation cannot be recorded.
    """
    recorder = _Recorder(arguments, is_real=is_real)
    try:
        with recorder, _NumPy(recorder):
            results = function(*arguments)
    except Exception as error:
        if recorder.refused is None:
            raise
        raise ZerosRefused(str(recorder.refused)) from error
    if recorder.refused is not None:
        raise ZerosRefused(str(recorder.refused)) from recorder.refused
    recorder.graph.output([None if r is None else recorder.node_of(r) for r in results])
    return RecordedGraph(recorder.graph, recorder.constants)


def _memory_format(product: Any, args: Sequence[Any]) -> torch.memory_format | None:
    """Return the memory format of the results of a matrix product or convolution.

    The function returns None if the memory format is unknown. The results of a convolution are
    channels last if its images or its kernels are channels last and not contiguous. The rule for
    channels last holds for all of torch's implementations of convolution on a CPU, for both the
    forward and the backward pass.
    """
    if product in _MATRIX_PRODUCTS:
        return torch.contiguous_format
    if product not in _CONVOLUTIONS:
        return None
    images, kernels = args[_CONVOLUTIONS[product] :][:2]
    if images.dim() == 4 and 1 in (*images.shape[1:], kernels.shape[0]):
        # For images or kernels with one channel, row or column, torch has other rules for memory
        # formats.
        return None
    others = [tensor for tensor in (images, kernels) if not tensor.is_contiguous()]
    if not others:
        return torch.contiguous_format
    is_last = all(
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in others
    )
    return torch.channels_last if is_last else None


def _blank(product: Any, args: Sequence[Any], memory_format: torch.memory_format) -> Any:
    """Return zeros with the shapes of the results of a matrix product or convolution."""
    results = product(*map(_shape_of, args))
    device = next(value.device for value in args if isinstance(value, torch.Tensor))

    def zeros(result: torch.Tensor | None) -> torch.Tensor | None:
        if result is None:
            return None
        is_image = result.dim() == 4 and result.shape[1] > 1
        own = memory_format if is_image else torch.contiguous_format
        shape, dtype = result.shape, result.dtype
        return torch.empty(shape, dtype=dtype, device=device, memory_format=own).zero_()

    return zeros(results) if isinstance(results, torch.Tensor) else tuple(map(zeros, results))


def _shape_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Traits:
    """The properties of an operation that affect how the operation is recorded.

    Attributes:
        reads_values: Whether the operation's result is a Python number that depends on the numbers
            in tensors.
        values_decide_shape: Whether the shape of the operation's result depends on the numbers in
            tensors.
        may_vary: Whether the operation can return different results for equal arguments.
        writes: Whether the operation changes an argument in place.
    """

    reads_values: bool
    values_decide_shape: bool
    may_vary: bool
    writes: bool


@cache
def _traits(operation: Any) -> _Traits:
    if not isinstance(operation, torch._ops.OpOverload):
        raise RuntimeError(f"the operation {operation} cannot be recorded in a graph")
    tags = operation.tags
    return _Traits(
        reads_values=torch.Tag.data_dependent_output in tags,
        values_decide_shape=torch.Tag.dynamic_output_shape in tags,
        may_vary=torch.Tag.nondeterministic_seeded in tags,
        writes=operation._schema.is_mutable,
    )


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records every operation in its ``with`` block with its arguments.

    The recorder identifies tensors by their Python objects. Torch keeps the Python object of a
    tensor as long as the tensor is in use, for example by autograd's graph.

    Attributes:
        graph: The graph to which the recorder adds the recorded operations.
        constants: The tensors that are neither arguments of the recorded function nor results of
            operations, keyed by the target of their ``get_attr`` node.
        refused: The first error of an operation after zeros had replaced the result of a large
            matrix product or convolution; None without an error.

    Args:
        arguments: The argument tensors of the recorded function.
        is_real: Whether the results of large matrix products and convolutions are computed. With
            False, zeros replace the results of large matrix products and convolutions.
    """

    def __init__(self, arguments: Sequence[torch.Tensor], *, is_real: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.refused: Exception | None = None
        self._is_real = is_real
        self._has_blanks = False
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        # The nodes of the graph that depend only on constants. The tensor of a node that depends
        # only on constants is the same in every run of the graph, so the recorded function may read
        # the tensor's numbers.
        self._fixed: set[fx.Node] = set()
        # Whether an operation may have overwritten a constant of the graph with numbers that differ
        # between runs of the graph.
        self._are_constants_changed = False
        for index, argument in enumerate(arguments):
            self._note(argument, self.graph.placeholder(f"argument_{index}"))

    # -- methods for the nodes of tensors ------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return a tensor's node in the graph. A tensor without a node becomes a constant."""
        entry = self._known.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        name = f"constant_{len(self.constants)}"
        node = self.graph.create_node("get_attr", name, name=name)
        self.constants[name] = tensor
        self._fixed.add(node)
        self._note(tensor, node)
        return node

    def _note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), node)
        if tensor.layout == torch.strided:
            node.meta["val"] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )

    def _recorded(self, value: Any) -> Any:
        """Return an operation's argument, in which graph nodes replace the tensors."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._recorded, value))
        return value

    # -- methods that record operations --------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch, and record it in the graph."""
        kwargs = kwargs or {}
        if len(self.graph.nodes) > _MAX_NODES:
            raise RuntimeError(
                f"the forward pass has more than {_MAX_NODES} operations, which are too many for a "
                "recorded graph"
            )
        traits = _traits(func)
        if func is _ATEN.lift_fresh.default:
            # Torch's operation ``lift_fresh`` returns its argument, which is a constant of the
            # graph. The constant tensor is copied, because an in-place change of the operation's
            # result would change the constant for all later runs of the graph.
            func = _ATEN.lift_fresh_copy.default
        inputs = tuple(map(self._recorded, args))
        named = {name: self._recorded(value) for name, value in kwargs.items()}
        if traits.reads_values or traits.values_decide_shape:
            self._check_reading(func, traits, inputs)
        try:
            result = self._result(func, args, kwargs)
        except Exception as error:
            if self._has_blanks:
                self.refused = self.refused or error
            raise
        if traits.reads_values:
            return result
        node = self.graph.create_node("call_function", func, inputs, named)
        if traits.writes:
            self._are_constants_changed |= not self._is_fixed(node.all_input_nodes)
        elif not traits.may_vary and self._is_fixed(node.all_input_nodes):
            self._fixed.add(node)
        self._note_results(result, node)
        return result

    def _result(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result, or zeros for a large product or convolution.

        If a large matrix product or convolution depends only on constants, its result is computed.
        """
        memory_format = None if self._is_real else _memory_format(func, args)
        if memory_format is None or kwargs:
            return func(*args, **kwargs)
        tensors = [value for value in _flat(args) if isinstance(value, torch.Tensor)]
        is_large = max(tensor.numel() for tensor in tensors) >= _LARGE
        if not is_large or self._is_fixed(list(map(self.node_of, tensors))):
            return func(*args, **kwargs)
        self._has_blanks = True
        return _blank(func, args, memory_format)

    def _note_results(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            self._note(result, node)
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor | list | tuple):
                    part = self.graph.create_node("call_function", operator.getitem, (node, index))
                    if node in self._fixed:
                        self._fixed.add(part)
                    self._note_results(item, part)

    def check_numpy(self, tensor: torch.Tensor) -> None:
        """Check that another library, such as NumPy, may read a tensor's memory during recording.

        Raises:
            RuntimeError: The numbers of the tensor do not depend only on constants of the graph, or
                an operation may have overwritten such constants.
        """
        if not self._is_fixed([self.node_of(tensor)]) or self._are_constants_changed:
            raise RuntimeError("a graph cannot record an operation of NumPy on a tensor")

    def _is_fixed(self, nodes: Sequence[fx.Node]) -> bool:
        return all(node in self._fixed for node in nodes)

    def _check_reading(self, func: Any, traits: _Traits, inputs: tuple[Any, ...]) -> None:
        """Check that a recorded operation may depend on the numbers in its argument tensors.

        Raises:
            RuntimeError: The numbers of the tensors do not depend only on constants of the graph,
                or an operation may have overwritten such constants.
        """
        deciding = inputs
        if not traits.reads_values and func is _ATEN.index.Tensor:
            deciding = tuple(node for node in inputs[1] if _is_mask(node))
        nodes = [node for node in _flat(deciding) if isinstance(node, fx.Node)]
        if not self._is_fixed(nodes) or (nodes and self._are_constants_changed):
            raise RuntimeError(
                f"the operation {func} depends on the values of a tensor, which differ in each run"
            )


class _NumPy(TorchFunctionMode):
    """A torch function mode that checks conversions of tensors to arrays of other libraries.

    Torch does not call a dispatch mode for conversions to arrays, because such conversions are not
    torch operations.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, but check a tensor before its conversion to an array."""
        if getattr(func, "__name__", "") in _LEAVING:
            self._recorder.check_numpy(args[0])
        return func(*args, **(kwargs or {}))


_LEAVING: Final = frozenset({"numpy", "__array__", "__dlpack__"})


def _is_mask(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.meta["val"].dtype in (torch.bool, torch.uint8)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in _flat(part)]
    return [value]
