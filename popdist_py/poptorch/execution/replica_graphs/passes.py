"""Passes that simplify a recorded graph, so that the graph has fewer or cheaper operations.

A pass is a function that rewrites a graph of torch's operations in place. A pass does not change
the results that the graph computes. A ``NodePass`` is a pass that rewrites one node. A graph pass
is a pass that rewrites a whole graph. The ``meta["val"]`` of a node is a tensor on the device
"meta" with the shape, strides and dtype of the node's value. A pass that needs ``meta["val"]`` does
not change nodes without a ``meta["val"]``. Every pass is correct even if the other passes do not
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from popdist_py.poptorch.execution.replica_order import REPLICAS_FIRST

__all__ = [
    "GRAPH_PASSES",
    "NODE_PASSES",
    "NodePass",
    "compute_before_views",
    "eliminate_dead_code",
    "fuse_bias",
    "merge_repetitions",
    "prefer_onednn",
    "remove_unchanging",
    "rewrite_nodes",
    "shorten_view",
    "simplify",
]

# A function that rewrites one operation of a graph if possible. A NodePass may erase the node of
# the operation.
NodePass: TypeAlias = Callable[[fx.Graph, fx.Node], None]

_ATEN: Final = torch.ops.aten
# Element-wise operations, which compute each element of a tensor separately. An element-wise
# operation may run before a view instead of after the view.
_POINTWISE: Final = frozenset(
    {
        _ATEN.relu.default,
        _ATEN.tanh.default,
        _ATEN.sigmoid.default,
        _ATEN.gelu.default,
        _ATEN.silu.default,
        _ATEN.threshold_backward.default,
        _ATEN.tanh_backward.default,
        _ATEN.sigmoid_backward.default,
        _ATEN.gelu_backward.default,
        _ATEN.silu_backward.default,
    }
)
_VIEWS: Final = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default})
# Operations that return a view of a whole tensor with another order of its dimensions.
_REORDERED: Final = frozenset({_ATEN.permute.default, _ATEN.transpose.int, REPLICAS_FIRST})
# For each convolution, the positions of the arguments for the kernels, for the dilation, and for
# the flag ``transposed``.
_CONVOLUTIONS: Final = {
    _ATEN.convolution.default: (1, 5, 6),
    _ATEN.convolution_backward.default: (2, 6, 7),
}


def simplify(graph: fx.Graph) -> None:
    """Simplify a graph by applying all passes to it."""
    rewrite_nodes(graph, NODE_PASSES)
    for graph_pass in GRAPH_PASSES:
        graph_pass(graph)


def rewrite_nodes(graph: fx.Graph, passes: Sequence[NodePass]) -> None:
    """Apply passes to each operation, in the order of the operations in the graph.

    Because operations are rewritten in the order of the graph, the inputs of an operation are
    already simplified when a pass gets the operation. After a pass has replaced an operation, the
    remaining passes are not applied to the old operation.
    """
    for node in list(graph.nodes):
        for node_pass in passes:
            if node.op != "call_function" or node._erased:
                break
            node_pass(graph, node)


# -- Operations without effect -------------------------------------------------------------------


def remove_unchanging(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an operation that returns its first argument unchanged."""
    same = _unchanged_argument(node)
    if same is not None:
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def _unchanged_argument(node: fx.Node) -> Any:
    """Return the argument that ``node`` returns unchanged; None if its result is a new tensor."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.target in (_ATEN.detach.default, _ATEN.alias.default):
        return first
    if node.target is _ATEN.mul.Scalar and node.args[1] == 1:
        # The dtypes of the argument and of the result are compared, because the result of an
        # integer tensor times 1.0 is a floating-point tensor.
        return first if _dtype(node) == _dtype(first) else None
    if node.target is _ATEN.permute.default:
        dims = list(node.args[1])  # type: ignore[arg-type]
        return first if dims == sorted(dims) and min(dims, default=0) >= 0 else None
    if node.target is _ATEN.t.default and first.target is _ATEN.t.default:
        return first.args[0]
    return None


# -- Views of tensors ------------------------------------------------------------------------------


def shorten_view(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a view of a view by one view, and remove a view that does not change the shape.

    The pass ``shorten_view`` needs the shapes of the viewed tensors. The pass also needs the
    strides of the viewed tensors, to remove reorderings of dimensions that cancel each other out.
    """
    if node.target not in _VIEWS:
        return
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target in _VIEWS:
        source = source.args[0]
    before = _source_in_same_order(node)
    if before is not None:
        source = before
    shape = _shape(node)
    if shape is not None and shape == _shape(source):
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif source is not node.args[0] and shape is not None:
        _replace(graph, node, _ATEN.view.default, (source, list(shape)))


def _source_in_same_order(node: fx.Node) -> fx.Node | None:
    """Return the first tensor in a chain of views that has the same memory order as ``node``.

    The returned tensor and ``node`` are contiguous views of the same memory. Therefore the
    reorderings of dimensions between these two tensors cancel each other out.
    """
    found, source = None, node
    while source.target in _VIEWS | _REORDERED and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        if _is_contiguous(node) and _is_contiguous(source):
            found = source
    return found


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def compute_before_views(graph: fx.Graph, node: fx.Node) -> None:
    """Move an element-wise operation from behind its arguments' views to before the views.

    After the move, ``shorten_view`` can combine the view of the operation's result with later
    views. The pass ``compute_before_views`` needs the shapes of the views and of the viewed
    tensors.
    """
    if node.target not in _POINTWISE:
        return
    tensors = [argument for argument in node.args if isinstance(argument, fx.Node)]
    if not all(t.target in _VIEWS for t in tensors):
        return
    shape, sources = _shape(node), {_shape(t.args[0]) for t in tensors}
    if shape is None or len(sources) != 1 or None in sources:
        return
    if any(_shape(tensor) != shape for tensor in tensors):
        return
    arguments = tuple(a.args[0] if isinstance(a, fx.Node) else a for a in node.args)
    target: Any = node.target
    with graph.inserting_before(node):
        computed = graph.call_function(target, arguments, dict(node.kwargs))
    value = node.meta["val"]
    computed.meta = {"val": value.view(next(iter(sources)))} if value.is_contiguous() else {}
    _replace(graph, node, _ATEN.view.default, (computed, list(shape)))


# -- Matrix products and convolutions --------------------------------------------------------------


def fuse_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a matrix product, its view and the addition of a bias by one ``addmm``.

    The pass ``fuse_bias`` needs the shapes and dtypes of the matrix product, the view and the bias.
    The bias must have one number for each column of the matrix product, and the view must not
    change the columns.
    """
    if not _is_biased_product(node):
        return
    bias, view = node.args
    assert isinstance(view, fx.Node)
    product = view.args[0]
    assert isinstance(product, fx.Node)
    with graph.inserting_before(node):
        added = graph.call_function(_ATEN.addmm.default, (bias, *product.args))
    added.meta = dict(product.meta)
    _replace(graph, node, _ATEN.view.default, (added, view.args[1]))


def _is_biased_product(node: fx.Node) -> bool:
    """Tell whether ``node`` adds a bias to a reshaped matrix product without other uses."""
    if node.target is not _ATEN.add.Tensor or node.kwargs:
        return False
    bias, view = node.args
    if not isinstance(bias, fx.Node) or not isinstance(view, fx.Node):
        return False
    if view.target not in _VIEWS or len(view.users) != 1:
        return False
    product = view.args[0]
    if not isinstance(product, fx.Node) or product.target is not _ATEN.mm.default:
        return False
    columns = (_shape(product) or ())[-1:]
    return (
        len(product.users) == 1
        and columns == _shape(bias) == (_shape(view) or ())[-1:]
        and bias.meta["val"].dtype == product.meta["val"].dtype
        and not _is_written_between(product, node)
    )


def _is_written_between(first: fx.Node, last: fx.Node) -> bool:
    """Tell whether an operation between ``first`` and ``last`` changes a tensor in place."""
    node = first.next
    while node is not last:
        if _writes(node):
            return True
        node = node.next
    return False


def prefer_onednn(graph: fx.Graph, node: fx.Node) -> None:  # noqa: ARG001
    """Set a dilation for convolutions with one-element kernels, so that oneDNN computes them.

    With one thread and fewer than 16 images, torch does not use oneDNN for convolutions with
    one-element kernels. Torch's own code computes one image after the other and takes up to ten
    times as long. For dilated convolutions, torch always uses oneDNN (``use_mkldnn`` in torch's
    Convolution.cpp). A dilation is the distance between the elements of a kernel, so a dilation
    does not affect a kernel with one element. The pass ``prefer_onednn`` needs the shape and dtype
    of the kernels.
    """
    if node.target not in _CONVOLUTIONS or not torch.backends.mkldnn.is_available():
        return
    kernels, dilation, is_transposed = _CONVOLUTIONS[node.target]
    value: Any = node.args[kernels].meta["val"]  # type: ignore[union-attr]
    has_one_element = all(size == 1 for size in value.shape[2:])
    if has_one_element and value.dtype == torch.float32 and not node.args[is_transposed]:
        node.update_arg(dilation, [2] * (value.dim() - 2))


# -- Passes over whole graphs ----------------------------------------------------------------------


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove operations whose results are not used and that do not have side effects.

    The method ``eliminate_dead_code`` of torch.fx is not used, because before torch 2.5 it does not
    accept a function that detects side effects.
    """
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Tell whether ``node`` has to stay in the graph even if no operation uses its result."""
    return node.op in ("placeholder", "output") or _writes(node) or _draws(node)


def _writes(node: fx.Node) -> bool:
    """Tell whether an operation changes a tensor in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    # Batch norms change their running statistics, but torch's schema does not mark the statistics
    # as written.
    return node.target._schema.is_mutable or "batch_norm" in node.target._schema.name


def _draws(node: fx.Node) -> bool:
    """Tell whether an operation draws random numbers or exchanges data with other replicas."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if "scaled_dot_product" in node.target._schema.name:
        names = [argument.name for argument in node.target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return bool(arguments.get("dropout_p", 0.0) != 0.0)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def merge_repetitions(graph: fx.Graph) -> None:
    """Replace equal operations with equal arguments by the first of these operations.

    Two equal operations are not merged if an operation between them changes one of their arguments
    in place. A result that is changed in place later needs separate memory, so the operation that
    computes the result is not merged with another operation.
    """
    memory = _memory_of(graph)
    changed = {memory[node] for n in graph.nodes for node in _changed_arguments(n)}
    versions = dict.fromkeys(changed, 0)
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for argument in _changed_arguments(node):
            versions[memory[argument]] += 1
        if _draws(node) or _writes(node) or (memory[node] is node and node in changed):
            continue
        present = [versions.get(memory[argument], 0) for argument in node.all_input_nodes]
        first = seen.setdefault(f"{node.target} {node.args} {node.kwargs} {present}", node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _memory_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return, for each node, the node whose operation allocated the memory of its result.

    The schemas of torch's operations describe which results may share memory with an argument.
    """
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args and _looks_into_first(node) else None
        memory[node] = memory[source] if isinstance(source, fx.Node) else node
    return memory


def _looks_into_first(node: fx.Node) -> bool:
    """Tell whether the result of ``node`` may share memory with the first argument of ``node``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # The node selects one of several results of an operation.
    returns = node.target._schema.returns
    seen_through = _VIEWS | _REORDERED
    return node.target in seen_through or any(value.alias_info is not None for value in returns)


def _changed_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation changes in place."""
    if not _writes(node):
        return []
    schema = node.target._schema  # type: ignore[union-attr]
    changed = []
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in ("running_mean", "running_var"):
            values = value if isinstance(value, list | tuple) else [value]
            changed += [item for item in values if isinstance(item, fx.Node)]
    return changed


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], **kw: Any) -> None:
    with graph.inserting_before(node):
        other = graph.call_function(target, args, kw)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


NODE_PASSES: Final[tuple[NodePass, ...]] = (
    remove_unchanging,
    shorten_view,
    compute_before_views,
    fuse_bias,
    prefer_onednn,
)
GRAPH_PASSES: Final[tuple[Callable[[fx.Graph], None], ...]] = (
    eliminate_dead_code,
    merge_repetitions,
    eliminate_dead_code,
)
