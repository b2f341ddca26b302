"""The function ``function_of``, which generates a Python function from a recorded graph.

The code generation of torch.fx (CSEPass, ``GraphModule.recompile()``) is not used, because the code
that torch.fx generates is slower. With torch.fx, the forward and backward passes of three linear
layers take 1.20 times as long at a width of 16, and 1.06 times as long at a width of 256. The
ratios 1.20 and 1.06 are medians of 30 interleaved repetitions of 300 runs on one thread. Code that
torch.fx generates looks up each operation as ``torch.ops.aten.name``. Code that the module
``graph_code`` generates calls each operation as a global function, without a look-up of attributes.
Torch.fx also cannot generate calls of torch's direct Python bindings, which are faster than
operator overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from popdist_py.poptorch.execution.replica_graphs.passes import simplify
from popdist_py.poptorch.execution.replica_graphs.recording import RecordedGraph
from popdist_py.poptorch.execution.replica_order import KERNELS
from popdist_py.poptorch.group_norms import statistics_exchange

__all__ = ["function_of"]

_ATEN: Final = torch.ops.aten


def function_of(recorded: RecordedGraph, num_outputs: int) -> Callable[..., list[Any]]:
    """Simplify a recorded graph in place, and return a Python function that runs the graph.

    The returned function takes the arguments of the graph, and returns the list of the outputs. The
    last argument of the returned function must be a function ``arrived(index, gradient)``. The
    returned function calls ``arrived`` for each gradient as soon as the gradient is computed. The
    function ``arrived`` is not called for a gradient of None.

    Args:
        recorded: The recorded graph.
        num_outputs: The number of the model's outputs. The first ``num_outputs`` results of the
            graph are outputs of the model, and all later results are gradients.
    """
    simplify(recorded.graph)
    return _compiled(recorded, num_outputs)


def _fast_calls() -> dict[Any, Callable[..., Any]]:
    """Return torch's direct Python bindings of common operations, with operations as keys.

    Calling a direct binding is faster than calling the operator overload.
    """
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
    calls.update(KERNELS | statistics_exchange.KERNELS)
    calls[_ATEN.transpose.int] = torch.transpose
    calls[_ATEN.ne.Scalar] = torch.ne
    calls[_ATEN.where.self] = torch.where
    calls[_ATEN.sum.dim_IntList] = torch.sum
    calls[_ATEN.select.int] = torch.select
    return calls


_FAST: Final = _fast_calls()
_CASTS: Final = {torch.float16: torch.Tensor.half, torch.float32: torch.Tensor.float}


def _call(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return the fastest function call that computes the result of a graph node.

    Returns:
        The function to call, its positional arguments and its keyword arguments.
    """
    target: Any = node.target
    first: Any = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    if target is _ATEN._to_copy.default and value is not None and list(node.kwargs) == ["dtype"]:
        dtype: Any = node.kwargs["dtype"]
        # ``_to_copy`` always returns a new tensor, but half() and float() return the same tensor if
        # the dtype does not change.
        if dtype in _CASTS and dtype != value.dtype:
            return _CASTS[dtype], [first], {}
    if target is _ATEN.repeat.default and value is not None and value.dim() == 1:
        repeats: Any = node.args[1]
        if len(repeats) == 1 and repeats[0] > 0:
            return torch.cat, [[first] * repeats[0]], {}
    return _FAST.get(target) or getattr(target, "_op", target), node.args, node.kwargs


def _compiled(recorded: RecordedGraph, num_outputs: int) -> Callable[..., list[Any]]:
    """Return a function that computes a recorded graph, and frees tensors after their last use.

    The Python code that is generated from the graph is a generator function, because Python stores
    the variables of a generator outside the stack. Thousands of variables on the stack would fill
    one chunk of the stack's memory. If one chunk of the stack were full, every further call of a
    Python function would allocate another chunk of stack memory and free this chunk again.
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
    """Return the gradients that no later operation of the graph changes.

    Returns:
        For each node that computes gradients which no later operation changes, the indices of these
        gradients.
    """
    early: dict[fx.Node, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, fx.Node) and gradient.op == "call_function":
            early.setdefault(gradient, []).append(index)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            # An operation that changes tensors in place may change any gradient that was computed
            # before the operation.
            for before in [other for other in early if other < node]:
                del early[before]
        if node.target is _ATEN.scalar_tensor.default:
            early.pop(node, None)
    return early


def _ends(graph: fx.Graph, kept: Sequence[Any]) -> dict[fx.Node, list[str]]:
    """Return for each operation the names of its arguments that no later operation uses.

    Args:
        graph: The graph.
        kept: The results of the graph that the caller still uses after the graph's last operation.
            The names of these results are left out.
    """
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
    """Return an operation's argument as Python source code.

    Args:
        value: The value of the operation's argument. A value that is neither a graph node, a list,
            a tuple, None, an int, a bool nor a string becomes a global variable of the generated
            code.
        names: The global variables of the generated code. ``_text`` adds the new global variables
            to ``names``.
    """
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
