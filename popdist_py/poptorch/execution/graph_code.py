"""From a captured graph to a Python function with as few and as cheap operations as possible.

Every rewriting keeps the values; the choice of a back end tests whether the result is right.

torch.fx's own code generation (CSEPass, ``GraphModule.recompile()``) is not used because it is
slower: forward and backward of three linear layers take 1.20 times as long with it at a width of 16
and 1.06 times at 256 (medians of 30 interleaved repetitions of 300 runs, one thread). It looks
every operation up as ``torch.ops.aten.name``, where this code calls a bound local function, and it
cannot name the bindings below torch's overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from popdist_py.poptorch.execution.capture import Captured
from popdist_py.poptorch.execution.replica_order import KERNELS, REPLICAS_FIRST
from popdist_py.poptorch.group_norms import exchange

__all__ = ["function_of"]

_ATEN: Final = torch.ops.aten
# These work element by element, so that they may run before a view instead of after it.
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
# These show all of a tensor in another order of dimensions.
_REORDERED: Final = frozenset({_ATEN.permute.default, _ATEN.transpose.int, REPLICAS_FIRST})
# Where in the arguments the kernels are, the dilation, and whether all is transposed.
_CONVOLUTIONS: Final = {
    _ATEN.convolution.default: (1, 5, 6),
    _ATEN.convolution_backward.default: (2, 6, 7),
}


def function_of(captured: Captured, num_outputs: int) -> Callable[..., list[Any]]:
    """Return the function of a captured graph: positional tensors to a list.

    It returns the first ``num_outputs`` results. Of the others, which are gradients, it calls its
    last argument with the index and the value of each that is not None, as soon as that is there.
    """
    graph = captured.graph
    for node in list(graph.nodes):
        if node.op == "call_function":
            _simplify(graph, node)
    _eliminate_dead_code(graph)
    _merge_repetitions(graph)
    _eliminate_dead_code(graph)
    return _compiled(captured, num_outputs)


# -- rewriting ------------------------------------------------------------------------------------


def _simplify(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one operation by something cheaper with the same value, if there is any."""
    same = _unchanged_argument(node)
    if same is not None:
        node.replace_all_uses_with(same)
        graph.erase_node(node)
    elif node.target in _VIEWS:
        _shorten_views(graph, node)
    elif node.target in _POINTWISE:
        _move_before_views(graph, node)
    elif _is_biased_product(node):
        _fuse_bias(graph, node)
    else:
        _prefer_onednn(node)


def _unchanged_argument(node: fx.Node) -> Any:
    """Return the argument that ``node`` passes on unchanged; None if it computes something."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.target in (_ATEN.detach.default, _ATEN.alias.default):
        return first
    if node.target is _ATEN.mul.Scalar and node.args[1] == 1:
        return first if _dtype(node) == _dtype(first) else None  # int times 1.0 is a float
    if node.target is _ATEN.permute.default:
        dims = list(node.args[1])  # type: ignore[arg-type]
        return first if dims == sorted(dims) and min(dims, default=0) >= 0 else None
    if node.target is _ATEN.t.default and first.target is _ATEN.t.default:
        return first.args[0]
    return None


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


def _shorten_views(graph: fx.Graph, node: fx.Node) -> None:
    """Let a view of a view look at the first tensor, or vanish where the shape is the same."""
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
    """Return the first of the tensors seen through, reordered or not, that lies as ``node`` does.

    Both are contiguous, so that what reorders between them cancels out.
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


def _move_before_views(graph: fx.Graph, node: fx.Node) -> None:
    """Compute on the tensors behind the views, and view the result."""
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


def _is_biased_product(node: fx.Node) -> bool:
    """Tell whether ``node`` adds a bias to a reshaped matrix product without other users.

    The bias must have one value for each column of the product, and the view must keep the columns.
    """
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
    """Tell whether any operation between two others changes any tensor in place."""
    node = first.next
    while node is not last:
        if _writes(node):
            return True
        node = node.next
    return False


def _fuse_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Replace product, view and addition by torch's product with addition."""
    bias, view = node.args
    assert isinstance(view, fx.Node)
    product = view.args[0]
    assert isinstance(product, fx.Node)
    with graph.inserting_before(node):
        added = graph.call_function(_ATEN.addmm.default, (bias, *product.args))
    added.meta = dict(product.meta)
    _replace(graph, node, _ATEN.view.default, (added, view.args[1]))


def _prefer_onednn(node: fx.Node) -> None:
    """Let oneDNN compute a convolution with kernels of one element, which torch may not ask for it.

    With one thread and fewer than 16 images torch computes these itself, image by image, which
    takes up to ten times as long. Dilation moves the elements of a kernel apart: it changes nothing
    where there is one, but what is dilated is oneDNN's (``use_mkldnn`` in torch's Convolution.cpp).
    """
    if node.target not in _CONVOLUTIONS or not torch.backends.mkldnn.is_available():
        return
    kernels, dilation, is_transposed = _CONVOLUTIONS[node.target]
    value: Any = node.args[kernels].meta["val"]  # type: ignore[union-attr]
    has_one_element = all(size == 1 for size in value.shape[2:])
    if has_one_element and value.dtype == torch.float32 and not node.args[is_transposed]:
        node.update_arg(dilation, [2] * (value.dim() - 2))


def _eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase what nobody uses and has no effect; torch's own asks us only from 2.5 on."""
    for node in reversed(graph.nodes):
        if not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    """Tell whether ``node`` counts even if nobody uses its value."""
    return node.op in ("placeholder", "output") or _writes(node) or _draws(node)


def _writes(node: fx.Node) -> bool:
    """Tell whether an operation changes a tensor."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    # Batch norms change their statistics without a mark in their schema.
    return node.target._schema.is_mutable or "batch_norm" in node.target._schema.name


def _draws(node: fx.Node) -> bool:
    """Tell whether an operation draws random numbers, or hears of other replicas."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if "scaled_dot_product" in node.target._schema.name:
        names = [argument.name for argument in node.target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return bool(arguments.get("dropout_p", 0.0) != 0.0)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _merge_repetitions(graph: fx.Graph) -> None:
    """Do operations on equal arguments once, unless one of them is changed in between.

    What is changed in place later needs memory of its own, so that it is never merged.
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
    """Return for each node the one whose memory its value lies in, as far as torch tells."""
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args and _looks_into_first(node) else None
        memory[node] = memory[source] if isinstance(source, fx.Node) else node
    return memory


def _looks_into_first(node: fx.Node) -> bool:
    """Tell whether the value of ``node`` may lie in the memory of its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # a part of several results
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


# -- code -----------------------------------------------------------------------------------------


def _fast_calls() -> dict[Any, Callable[..., Any]]:
    """Return torch's own bindings of common operations, which cost less than the general call."""
    same_name = (
        "t", "mm", "addmm", "bmm", "relu", "tanh", "sigmoid", "neg", "gather", "unsqueeze",
        "permute", "convolution", "native_layer_norm", "_log_softmax", "_softmax", "clone",
        "transpose", "embedding", "scatter_add", "exp", "log", "sqrt", "rsqrt", "baddbmm",
    )  # fmt: skip
    calls = {getattr(_ATEN, name).default: getattr(torch, name) for name in same_name
             if hasattr(getattr(_ATEN, name), "default")}  # fmt: skip
    for name in ("add", "sub", "mul", "div"):
        calls[getattr(_ATEN, name).Tensor] = getattr(torch, name)
    for name in ("view", "expand", "new_zeros"):
        calls[getattr(_ATEN, name).default] = getattr(torch.Tensor, name)
    calls.update(KERNELS | exchange.KERNELS)
    calls[_ATEN.transpose.int] = torch.transpose
    calls[_ATEN.ne.Scalar] = torch.ne
    calls[_ATEN.where.self] = torch.where
    calls[_ATEN.sum.dim_IntList] = torch.sum
    calls[_ATEN.select.int] = torch.select
    return calls


_FAST: Final = _fast_calls()
_CASTS: Final = {torch.float16: torch.Tensor.half, torch.float32: torch.Tensor.float}


def _call(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return the cheapest call that does what a node does: function and arguments."""
    target: Any = node.target
    first: Any = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    if target is _ATEN._to_copy.default and value is not None and list(node.kwargs) == ["dtype"]:
        dtype: Any = node.kwargs["dtype"]
        if dtype in _CASTS and dtype != value.dtype:  # otherwise they return the tensor itself
            return _CASTS[dtype], [first], {}
    if target is _ATEN.repeat.default and value is not None and value.dim() == 1:
        repeats: Any = node.args[1]
        if len(repeats) == 1 and repeats[0] > 0:
            return torch.cat, [[first] * repeats[0]], {}
    return _FAST.get(target) or getattr(target, "_op", target), node.args, node.kwargs


def _compiled(captured: Captured, num_outputs: int) -> Callable[..., list[Any]]:
    """Return a function that makes the calls of the graph and drops what is no longer needed.

    They stand in a generator, whose variables Python keeps outside its stack. Thousands of them in
    there fill a piece of it, so that every call of a Python function takes memory from the system
    for the next piece and gives it back.
    """
    names: dict[str, Any] = {}
    (results,) = next(node for node in captured.graph.nodes if node.op == "output").args
    assert isinstance(results, list | tuple)
    early = _early(captured.graph, results[num_outputs:])
    late = [r for r in results if not (isinstance(r, fx.Node) and r in early)]
    ends = _ends(captured.graph, [*results[:num_outputs], *late])
    lines: list[str] = []
    parameters: list[str] = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "get_attr":
            names[node.name] = captured.constants[str(node.target)]
        elif node.op == "output":
            lines += [
                f"arrived({index}, {_text(result, names)})"
                for index, result in enumerate(results[num_outputs:])
                if result is not None and result not in early
            ]
            lines.append(f"yield {_text(list(results[:num_outputs]), names)}")
        elif node.target is _ATEN.scalar_tensor.default:
            names[node.name] = node.target(*node.args, **node.kwargs)
        else:
            function = f"call_{len(names)}"
            names[function], arguments, named = _call(node)
            words = [_text(argument, names) for argument in arguments]
            words += [f"{key}={_text(value, names)}" for key, value in named.items()]
            lines.append(f"{node.name} = {function}({', '.join(words)})")
            lines += [f"arrived({index}, {node.name})" for index in early.get(node, ())]
            if done := [name for name in ends.get(node, ()) if name not in names]:
                lines.append(" = ".join([*done, "None"]))
    parameters.append("arrived")
    source = f"def run({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<captured graph>", "exec"), names)
    steps: Callable[..., Iterator[list[Any]]] = names["run"]
    return lambda *arguments: next(steps(*arguments))


def _early(graph: fx.Graph, gradients: Sequence[Any]) -> dict[fx.Node, list[int]]:
    """Return the indices of the gradients that nothing changes once they are computed."""
    early: dict[fx.Node, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, fx.Node) and gradient.op == "call_function":
            early.setdefault(gradient, []).append(index)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            # The operation may write to the memory of these gradients.
            for before in [other for other in early if other < node]:
                del early[before]
        if node.target is _ATEN.scalar_tensor.default:
            early.pop(node, None)
    return early


def _ends(graph: fx.Graph, kept: Sequence[Any]) -> dict[fx.Node, list[str]]:
    """Return which values nobody needs any more after each operation; those ``kept`` always are."""
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last_use[node] = node
            last_use.update(dict.fromkeys(node.all_input_nodes, node))
    ends: dict[fx.Node, list[str]] = {}
    lasting = {result for result in kept if isinstance(result, fx.Node)}
    for used, node in last_use.items():
        if used not in lasting:
            ends.setdefault(node, []).append(used.name)
    return ends


def _text(value: Any, names: dict[str, Any]) -> str:
    """Return an argument as source code; what has no short text becomes a global name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        inner = "".join(f"{_text(item, names)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if value is None or type(value) in (int, bool, str):
        return repr(value)
    name = f"value_{len(names)}"
    names[name] = value
    return name
