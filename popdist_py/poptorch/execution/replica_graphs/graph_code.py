"""From a recorded graph to a Python function that makes its calls.

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

from popdist_py.poptorch.execution.replica_graphs.passes import simplify
from popdist_py.poptorch.execution.replica_graphs.recording import RecordedGraph
from popdist_py.poptorch.execution.replica_order import KERNELS
from popdist_py.poptorch.group_norms import exchange

__all__ = ["function_of"]

_ATEN: Final = torch.ops.aten


def function_of(recorded: RecordedGraph, num_outputs: int) -> Callable[..., list[Any]]:
    """Return the function of a recorded graph, which is simplified in place.

    The function maps positional tensors to the list of the first ``num_outputs`` results. The other
    results are gradients. Its last argument is a function that is called with the index and the
    value of each gradient that is not None, as soon as the gradient is computed.
    """
    simplify(recorded.graph)
    return _compiled(recorded, num_outputs)


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


def _compiled(recorded: RecordedGraph, num_outputs: int) -> Callable[..., list[Any]]:
    """Return a function that makes the calls of the graph and drops what is no longer needed.

    They stand in a generator, whose variables Python keeps outside its stack. Thousands of them in
    there fill a piece of it, so that every call of a Python function takes memory from the system
    for the next piece and gives it back.
    """
    names: dict[str, Any] = {}
    (results,) = next(node for node in recorded.graph.nodes if node.op == "output").args
    assert isinstance(results, list | tuple)
    early = _early(recorded.graph, results[num_outputs:])
    late = [r for r in results if not (isinstance(r, fx.Node) and r in early)]
    ends = _ends(recorded.graph, [*results[:num_outputs], *late])
    lines: list[str] = []
    parameters: list[str] = []
    for node in recorded.graph.nodes:
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "get_attr":
            names[node.name] = recorded.constants[str(node.target)]
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
    exec(compile(source, "<recorded graph>", "exec"), names)
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
