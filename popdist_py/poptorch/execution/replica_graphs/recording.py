"""What a function does below autograd and ``vmap``, as a graph of torch's operations.

One run is recorded, in which large products are not computed where nothing may read their values.
Nothing here knows of models, replicas or gradients, and no tensor is kept but those that the graph
needs as constants: recording takes no more memory than the run.
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
# Some two seconds, and more code than a cache of instructions likes: a loop over single elements.
_MAX_NODES: Final = 50_000
# Products are most of a run's time.
_MATRIX_PRODUCTS: Final = frozenset(
    {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
)
# Where in the arguments images and kernels begin.
_CONVOLUTIONS: Final = {_ATEN.convolution.default: 0, _ATEN.convolution_backward.default: 1}
# Numbers in a product's largest argument from which on its shape alone is faster.
_LARGE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A recorded run.

    Attributes:
        graph: one placeholder for each argument; ``call_function`` nodes of torch's operations,
            each with a tensor on the device "meta" as ``meta["val"]`` that has the shape, strides
            and format of its result; ``get_attr`` nodes of constants; one list as output.
        constants: the tensors that came from elsewhere, by the target of their node.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]


class ZerosRefused(RuntimeError):
    """An operation failed after a large product that was not computed, and perhaps because of it.

    The inverse of a matrix is one that refuses zeros. Whether the function handled that does not
    count: with real values it might have gone another way.
    """


def record(
    function: Callable[..., Sequence[torch.Tensor | None]],
    arguments: Sequence[torch.Tensor],
    *,
    is_real: bool = False,
) -> RecordedGraph:
    """Run a function once and return what it did, so that it can be done with other values.

    Args:
        function: what runs; returns tensors, or None in place of some.
        arguments: tensors, each another one; what the function changes of them stays changed.
        is_real: whether large products are computed as well: else they are zeros.

    Raises:
        ZerosRefused: an operation failed where not all products were computed.
        RuntimeError: what happens depends on values of the arguments, cannot be recorded, or is
            more than some ten thousand operations.
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
    """Return how a product's results lie in memory; None if that is not known.

    A convolution's are channels last if that is the only order in which its images, or its kernels,
    lie: so it is for all of torch's ways on a CPU, forward and backward.
    """
    if product in _MATRIX_PRODUCTS:
        return torch.contiguous_format
    if product not in _CONVOLUTIONS:
        return None
    images, kernels = args[_CONVOLUTIONS[product] :][:2]
    if images.dim() == 4 and 1 in (*images.shape[1:], kernels.shape[0]):
        return None  # with one channel, row or column, orders are told apart by other rules
    others = [tensor for tensor in (images, kernels) if not tensor.is_contiguous()]
    if not others:
        return torch.contiguous_format
    is_last = all(
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in others
    )
    return torch.channels_last if is_last else None


def _blank(product: Any, args: Sequence[Any], memory_format: torch.memory_format) -> Any:
    """Return zeros of the shape of a product."""
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
    """What counts about an operation.

    Attributes:
        reads_values: whether its result is a Python value that depends on the tensors' values.
        values_decide_shape: whether the shape of its result does.
        may_vary: whether equal arguments do not make an equal result.
        writes: whether it changes an argument.
    """

    reads_values: bool
    values_decide_shape: bool
    may_vary: bool
    writes: bool


@cache
def _traits(operation: Any) -> _Traits:
    if not isinstance(operation, torch._ops.OpOverload):
        raise RuntimeError(f"{operation} cannot be recorded")
    tags = operation.tags
    return _Traits(
        reads_values=torch.Tag.data_dependent_output in tags,
        values_decide_shape=torch.Tag.dynamic_output_shape in tags,
        may_vary=torch.Tag.nondeterministic_seeded in tags,
        writes=operation._schema.is_mutable,
    )


class _Recorder(TorchDispatchMode):
    """Notes every operation of the enclosed code with its arguments.

    Tensors are told apart by identity: torch keeps the Python object of a tensor as long as
    anything holds the tensor, autograd's graph included.

    Attributes:
        graph: the operations so far.
        constants: the tensors that neither the arguments nor the operations explain.
        refused: what an operation failed with after a product that was not computed.

    Args:
        arguments: of the code.
        is_real: whether all products are computed.
    """

    def __init__(self, arguments: Sequence[torch.Tensor], *, is_real: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.refused: Exception | None = None
        self._is_real = is_real
        self._has_blanks = False
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        # Nodes whose values follow from constants alone, so that their values may be read.
        self._fixed: set[fx.Node] = set()
        # Whether a constant's memory may have been overwritten by what is none.
        self._are_constants_changed = False
        for index, argument in enumerate(arguments):
            self._note(argument, self.graph.placeholder(f"argument_{index}"))

    # -- tensors ------------------------------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return where a tensor comes from; one from elsewhere is a constant from now on."""
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
        """Return an argument with nodes in place of tensors."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._recorded, value))
        return value

    # -- operations ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do an operation and note it."""
        kwargs = kwargs or {}
        if len(self.graph.nodes) > _MAX_NODES:
            raise RuntimeError(f"more than {_MAX_NODES} operations are too many for a graph")
        traits = _traits(func)
        if func is _ATEN.lift_fresh.default:
            # The constant is used as it is and stays alive: what changes the result needs a copy.
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
        """Do an operation; of a large product only the shape, unless constants alone decide it."""
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
        """Refuse that other libraries see a tensor's memory, unless it follows from constants.

        Raises:
            RuntimeError: it does not.
        """
        if not self._is_fixed([self.node_of(tensor)]) or self._are_constants_changed:
            raise RuntimeError("what NumPy does with a tensor is no operation of torch")

    def _is_fixed(self, nodes: Sequence[fx.Node]) -> bool:
        return all(node in self._fixed for node in nodes)

    def _check_reading(self, func: Any, traits: _Traits, inputs: tuple[Any, ...]) -> None:
        """Refuse what depends on values, unless they follow from constants alone.

        Raises:
            RuntimeError: they do not.
        """
        deciding = inputs
        if not traits.reads_values and func is _ATEN.index.Tensor:
            deciding = tuple(node for node in inputs[1] if _is_mask(node))
        nodes = [node for node in _flat(deciding) if isinstance(node, fx.Node)]
        if not self._is_fixed(nodes) or (nodes and self._are_constants_changed):
            raise RuntimeError(f"{func} needs the value of a tensor, which is another in each run")


class _NumPy(TorchFunctionMode):
    """Tells the recorder of tensors that leave torch: no operation shows that."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function if its tensor may be read."""
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
