"""The conversion of a forward pass's operations to the graph that IPU compilers would make.

The conversion follows the rules of the compiler PopART. PopART removes operations whose results are
not used, and adds a bias as a part of the matrix product. PopART merges a softmax with the loss,
and computes the gradient of the loss from the inputs of the softmax. An operation may overwrite an
input that no later operation needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from popdist_py.ipu.graph import BYTES, Graph, Operation, Placement, Tensor, stages_of
from popdist_py.ipu.runs.forward_steps import Forward, Step, Value
from popdist_py.ipu.runs.model_graph import ModelGraph

__all__ = ["graph_of_steps"]


def graph_of_steps(forward: Forward) -> ModelGraph:
    """Return the graph of a forward pass, with the stage and IPU of each operation."""
    forward = _with_marks(forward)
    steps = _merged(forward, forward.steps)
    if not steps:
        return graph_of_steps(_with_identity(forward))
    stages = stages_of(step.place for step in steps)
    steps = _with_own_memory(steps, stages)
    names = _names(steps)
    return ModelGraph(
        graph=_graph(forward, steps, stages, names),
        placement=Placement(tuple(stages), _ipus(steps, stages)),
    )


def _alive(steps: Sequence[Step], outputs: Sequence[int]) -> list[Step]:
    """Return the operations that an output of the forward pass depends on.

    The returned operations do not include those that only change a buffer of the model.
    """
    needed, kept = set(outputs), []
    for step in reversed(steps):
        if step.output in needed:
            kept.append(step)
            needed.update(step.inputs)
    return kept[::-1]


def _with_marks(forward: Forward) -> Forward:
    """Return a forward pass without unused operations, whose checkpoints are marks of operations.

    A step that only marks a checkpoint (``is_checkpoint``) is replaced by a mark of the operation
    that computes the step's input. A checkpoint that no operation reads has no effect, because
    ``_alive`` removes its step.
    """
    alive = _alive(forward.steps, forward.outputs)
    source = {step.output: step.inputs[0] for step in alive if step.is_checkpoint}
    steps: dict[int, Step] = {}
    for step in alive:
        inputs = tuple(dict.fromkeys(source.get(number, number) for number in step.inputs))
        if step.output not in source:
            steps[step.output] = replace(step, inputs=inputs)
            continue
        (number,) = inputs
        source[step.output] = number
        if number in steps:
            proportion = step.memory_proportion or steps[number].memory_proportion
            steps[number] = replace(steps[number], is_checkpoint=True, memory_proportion=proportion)
    outputs = dict.fromkeys(source.get(number, number) for number in forward.outputs)
    return replace(forward, steps=tuple(steps.values()), outputs=tuple(outputs))


def _with_identity(forward: Forward) -> Forward:
    """Add an identity operation to an empty forward pass, because a stage needs an operation."""
    (_, source), *_ = forward.inputs
    number = len(forward.values)
    step = Step(operator="identity", module="", kind="view", inputs=(source,), output=number)
    values = {**forward.values, number: forward.values[source]}
    return replace(forward, values=values, steps=(step,), outputs=(number,))


def _merged(forward: Forward, steps: Sequence[Step]) -> list[Step]:
    """Return the operations, with biases merged into matrix products, and softmax into loss."""
    readers = Counter(number for step in steps for number in step.inputs)
    readers.update(forward.outputs)
    made: dict[int, int] = {}
    merged: list[Step] = []
    for step in steps:
        index = made.get(step.inputs[0]) if step.inputs else None
        before = None if index is None else merged[index]
        if before is None or readers[before.output] > 1 or before.is_checkpoint:
            pass
        elif _is_bias(before, step):
            assert index is not None
            weights = (*before.weights, *step.weights)
            merged[index] = replace(
                before,
                weights=weights,
                output=step.output,
                memory_proportion=step.memory_proportion or before.memory_proportion,
            )
            made[step.output] = index
            continue
        elif before.operator == "_log_softmax" and step.operator.startswith("nll_loss"):
            step = replace(step, inputs=(*before.inputs, *step.inputs[1:]))
            merged = [one for one in merged if one is not before]
            made = {one.output: place for place, one in enumerate(merged)}
        made[step.output] = len(merged)
        merged.append(step)
    return merged


def _is_bias(product: Step, step: Step) -> bool:
    """Tell whether an operation adds a bias to the product of an activation and a weight matrix."""
    adds = step.kind == "add" and len(step.inputs) == 1 and len(step.weights) == 1
    return adds and product.kind == "product" and len(product.weights) == 1


def _ipus(steps: Sequence[Step], stages: Sequence[int]) -> tuple[int, ...]:
    """Return the number of the IPU that runs each stage."""
    ipu_of_stage = {stage: step.place[1] for step, stage in zip(steps, stages, strict=True)}
    return tuple(ipu_of_stage.values())


def _with_own_memory(steps: Sequence[Step], stages: Sequence[int]) -> list[Step]:
    """Return the operations, where each view of another stage's tensor is changed to a copy."""
    stage_of = {step.output: stage for step, stage in zip(steps, stages, strict=True)}
    return [
        replace(step, kind="elementwise")
        if step.kind == "view" and stage_of.get(step.inputs[0], stage) != stage
        else step
        for step, stage in zip(steps, stages, strict=True)
    ]


def _names(steps: Sequence[Step]) -> list[str]:
    """Return a unique name for each operation, which begins with the path of its submodule.

    The name also contains the kind of operation if the submodule contains other submodules or
    different operations.
    """
    several: dict[str, set[str]] = {}
    for step in steps:
        several.setdefault(step.module, set()).add(step.operator)
    # The paths of the submodules that contain other submodules.
    outer = {name[:end] for name in several for end, sign in enumerate(name) if sign == "."}
    taken: set[str] = set()
    # For each name of an operation, an iterator over the numbered names that were not tried yet. A
    # loop in the user's program may run the same operation thousands of times, so trying all
    # numbers again for each name would be slow.
    untried: dict[str, Iterator[str]] = {}
    names = []
    for step in steps:
        operator = step.operator.strip("_")
        is_only = step.module and step.module not in outer and len(several[step.module]) == 1
        name = step.module if is_only else ".".join(filter(None, (step.module, operator)))
        candidates = untried.setdefault(name, _numbered(name))
        unique = next(one for one in candidates if one not in taken)
        taken.add(unique)
        names.append(unique)
    return names


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in count(1):
        yield f"{name}.{number}"


def _graph(
    forward: Forward, steps: Sequence[Step], stages: Sequence[int], names: Sequence[str]
) -> Graph:
    tensors = {number: name for name, number in forward.inputs}
    tensors |= {step.output: f"{name}:out" for step, name in zip(steps, names, strict=True)}
    gradients = _with_gradient(forward, steps)
    saved = [_saved(forward, step, gradients) for step in steps]
    first = _in_place(forward, steps, stages, saved)
    read = {name: None for step in steps for name in step.weights if _is_stored(forward, name)}
    operations = []
    for step, name, keeps, over in zip(steps, names, saved, first, strict=True):
        inputs = step.inputs
        if over is not None:
            inputs = (over, *(number for number in inputs if number != over))
        operations.append(
            Operation(
                name=name,
                kind=step.kind,
                inputs=tuple(tensors[number] for number in inputs),
                output=_tensor(forward, tensors[step.output], step.output),
                weights=tuple(one for one in step.weights if one in read),
                saved=tuple(tensors[number] for number in keeps),
                product=step.product,
                is_in_place=over is not None,
                is_checkpoint=step.is_checkpoint,
                memory_proportion=step.memory_proportion,
            )
        )
    return Graph(
        inputs=tuple(_tensor(forward, name, number) for name, number in forward.inputs),
        weights=tuple(forward.weights[name] for name in read),
        operations=tuple(operations),
        outputs=tuple(tensors[number] for number in forward.outputs),
        batch=forward.batch,
    )


def _is_stored(forward: Forward, name: str) -> bool:
    """Tell whether a parameter, buffer or constant is stored as a variable in an IPU's memory.

    A constant with one element is not stored as a variable, because the constant is a part of the
    code.
    """
    return not name.startswith("constant") or forward.weights[name].elements > 1


def _tensor(forward: Forward, name: str, number: int) -> Tensor:
    value = forward.values[number]
    share = value.elements // forward.batch if value.is_batched else value.elements
    return Tensor(name, share, value.type, value.is_batched)


def _with_gradient(forward: Forward, steps: Sequence[Step]) -> set[int]:
    """Return the numbers of the tensors that depend on a trained weight and can have a gradient."""
    found: set[int] = set()
    for step in steps:
        trained = any(forward.weights[name].is_trained for name in step.weights)
        floating = forward.values[step.output].type.startswith("float")
        if floating and (trained or not found.isdisjoint(step.inputs)):
            found.add(step.output)
    return found


def _saved(forward: Forward, step: Step, gradients: set[int]) -> tuple[int, ...]:
    """Return the numbers of the tensors that the backward pass of an operation reads."""
    if step.output not in gradients:
        return ()
    inputs = step.inputs
    if step.saves == "output":
        return (step.output,)
    if step.saves == "inputs":
        return inputs
    if step.saves == "index":
        return inputs[1:]
    if step.saves == "both":
        return (*inputs, step.output) if step.kind != "pool" else (*inputs[:1], step.output)
    if step.saves == "others":
        return tuple(number for number in inputs if _is_needed(forward, step, number, gradients))
    return ()


def _is_needed(forward: Forward, step: Step, number: int, gradients: set[int]) -> bool:
    """Tell whether the backward pass of an operation reads the tensor with the number ``number``.

    The backward pass of an operation reads an operand if the gradient of another operand depends on
    the operand's elements. The backward pass of an operation that multiplies a tensor by itself
    also reads the tensor.
    """
    inputs, weights = step.inputs, step.weights
    if step.kind == "product":
        # A matrix product multiplies only its first two operands. Other operands, such as a bias,
        # are added to the result, so no gradient depends on them.
        inputs, weights = inputs[: 1 if weights else 2], weights[:1]
    if number not in inputs:
        return False
    others = any(other in gradients for other in inputs if other != number)
    is_squared = len(inputs) + len(weights) == 1 and number in gradients
    return others or is_squared or any(forward.weights[name].is_trained for name in weights)


def _in_place(
    forward: Forward,
    steps: Sequence[Step],
    stages: Sequence[int],
    saved: Sequence[tuple[int, ...]],
) -> list[int | None]:
    """Return, for each operation, the number of the input tensor that its result overwrites.

    An operation overwrites only an input that no later operation and no backward pass needs. The
    returned list contains None for an operation that writes its result to new memory.
    """
    root = {number: number for number in forward.values}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        if step.kind == "view":
            root[step.output] = root[step.inputs[0]]
        for number in step.inputs:
            last[root[number]] = index
    kept = {root[number] for number in forward.outputs}
    kept |= {root[number] for numbers in saved for number in numbers}
    made = {step.output: index for index, step in enumerate(steps) if step.kind != "view"}

    def may_take(index: int, number: int) -> bool:
        before = made.get(number)
        return (
            before is not None
            and stages[before] == stages[index]
            and not steps[before].is_checkpoint
            and number not in kept
            and last[number] == index
            and _same_size(forward.values[number], forward.values[steps[index].output])
        )

    found: list[int | None] = []
    for index, step in enumerate(steps):
        takes = step.inputs if step.kind in ("add", "elementwise") else step.inputs[:1]
        allowed = step.kind in ("add", "elementwise", "softmax")
        candidates: Iterator[int] = (one for one in takes if allowed and may_take(index, one))
        found.append(next(candidates, None))
    return found


def _same_size(one: Value, other: Value) -> bool:
    return one.elements * BYTES[one.type] == other.elements * BYTES[other.type]
