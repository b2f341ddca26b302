"""The conversion of observed torch operations to ``Step`` objects, which compute one value.

A step is an operation for the IPU. An in-place operation of torch becomes a step that computes a
new value. Copies, constants and views of whole tensors do not become steps. Later, the module
``graph_of_steps`` removes unused steps, names the steps, and decides which values share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, Final

import torch

from popdist_py.ipu.graph import Kind, Product, Type, Weight
from popdist_py.ipu.runs.forward_steps import Forward, Step, Value
from popdist_py.ipu.runs.model_graph import LEAST_PROPORTION
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.on_ipu.operation_rules import (
    ATTENTIONS,
    COPIES,
    FILLS,
    RANDOM,
    RECURRENT,
    TYPES,
    attention_products,
    given,
    is_cast,
    multiplied,
    per_sample,
    rule_of,
)
from popdist_py.poptorch.tracing.recorded_operations import (
    CHECKPOINT,
    PROPORTION,
    Observation,
    Observed,
    Seen,
)

__all__ = ["forward_of"]

# The source of a tensor's elements: the number of a computed value or the name of a weight.
_Source = int | str
_HALF_AND_FLOAT: Final = {torch.float16, torch.float32}
_SCALINGS: Final = frozenset({"div_", "mul_"})


def forward_of(observed: Observed) -> Forward:
    """Return an observed forward pass as a list of steps."""
    reading = _Reading(observed)
    # All operations of a recurrent layer (such as an LSTM) are converted together, because memory
    # and time are estimated for the whole layer.
    for (function, _), group in groupby(observed.operations, lambda seen: seen.function):
        if function in RECURRENT:
            reading.recurrent(list(group))
        else:
            reading.call(list(group))
    return reading.forward()


def _batch_of(observed: Observed) -> int:
    """Return the number of samples of a micro-batch.

    The number of samples is the most frequent size of the inputs' first dimension.
    """
    sizes = [seen.shape[0] for _, seen in observed.inputs if seen.shape]
    return max(sizes, key=sizes.count, default=1) or 1


class _Reading:
    """Converts observed operations to steps, and stores the steps and values made so far."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._batch = _batch_of(observed)
        self._values: dict[int, Value] = {}
        self._weights: dict[str, Weight] = {}
        self._constants: set[str] = set()
        # For each random mask of a dropout, the call of the torch function that made the mask.
        self._masks: dict[_Source, tuple[str, int]] = {}
        self._proportions: dict[int, float] = {}
        self._steps: list[Step] = []
        # For each storage (memory of torch tensors), the source of its current elements. Views of a
        # part of the storage have their own sources.
        self._whole: dict[int, _Source] = {}
        self._parts: dict[int, dict[Seen, _Source]] = {}
        # Whether the emulation runs the current call of a torch function in float32, although the
        # tensors are float16. An IPU would keep all tensors of the torch function in float16.
        self._is_half = False
        for weight in observed.weights:
            elements, type_ = prod(weight.value.shape), _type(weight.value.dtype)
            self._weights[weight.name] = Weight(weight.name, elements, type_, weight.is_trained)
            self._whole[weight.value.storage] = weight.name
        self._inputs = []
        for name, seen in observed.inputs:
            is_batched = bool(seen.shape) and seen.shape[0] % self._batch == 0
            number = self._value(prod(seen.shape), _type(seen.dtype), is_batched)
            self._whole[seen.storage] = number
            self._inputs.append((name, number))

    def forward(self) -> Forward:
        """Return the forward pass as ``Step`` objects, after all operations have been converted."""
        outputs = [self._read(seen, None) for seen in self._observed.outputs]
        steps = [
            replace(
                step,
                memory_proportion=self._proportions.get(step.output),
            )
            for step in self._steps
        ]
        return Forward(
            inputs=tuple(self._inputs),
            values=self._values,
            weights=self._weights,
            steps=tuple(steps),
            outputs=tuple(dict.fromkeys(one for one in outputs if isinstance(one, int))),
            batch=self._batch,
        )

    # -- values of the forward pass ------------------------------------------------------------

    def _value(self, elements: int, type_: Type, is_batched: bool) -> int:
        number = len(self._values)
        self._values[number] = Value(elements, type_, is_batched)
        return number

    def _made(self, seen: Seen, sources: Sequence[_Source], *, kind: Kind) -> int:
        """Add a value for a tensor that is computed from ``sources``; return the value's number."""
        elements, batch = seen.elements, self._batch
        values = [self._values[one].is_batched for one in sources if isinstance(one, int)]
        grows = any(values) or not sources
        can = elements % batch == 0 and any(size % batch == 0 for size in seen.shape)
        is_batched = grows and can and kind != "loss"
        return self._value(elements, self._type_now(seen), is_batched)

    def _type_now(self, seen: Seen) -> Type:
        if self._is_half and seen.dtype == torch.float32:
            return "float16"
        return _type(seen.dtype)

    def _constant(self, seen: Seen) -> str:
        number = len(self._constants)
        name = f"constant.{number}" if number else "constant"
        self._constants.add(name)
        self._weights[name] = Weight(name, seen.elements, self._type_now(seen), is_trained=False)
        return name

    def _read(self, seen: Seen, by: Observation | None) -> _Source:
        """Return the number of the value or the name of the weight that a tensor contains now.

        For a view of a part of a larger tensor, the method adds a step that computes the view,
        unless an earlier step has computed it.
        """
        if seen.storage not in self._whole:
            self._whole[seen.storage] = self._constant(seen)
        parts = self._parts.get(seen.storage)
        if parts is not None and seen in parts:
            return parts[seen]
        whole = self._whole[seen.storage]
        if isinstance(whole, str) or seen.elements >= self._values[whole].elements:
            return whole
        return self._part(seen, whole, by)

    def _part(self, seen: Seen, of: _Source, by: Observation | None) -> _Source:
        """Record that a tensor is a view of the value or weight ``of``, and return its source.

        A view of only a part of a tensor becomes a separate step. A view of a whole tensor has the
        same source (number of a value, or name of a weight) as the tensor.
        """
        result = of
        if isinstance(of, int) and seen.elements < self._values[of].elements:
            result = self._made(seen, [of], kind="view")
            step = Step(operator="view", module="", kind="view", inputs=(of,), output=result)
            if by is not None:
                step = replace(step, operator=by.operator, module=by.module, place=by.place)
            self._steps.append(step)
        self._parts.setdefault(seen.storage, {})[seen] = result
        return result

    def _hold(self, storage: int, source: _Source) -> None:
        """Record the source of a storage's new elements, and discard views of the old ones."""
        self._whole[storage] = source
        self._parts.pop(storage, None)

    # -- operations of torch -------------------------------------------------------------------

    def call(self, operations: Sequence[Observation]) -> None:
        """Convert the operations of one call of a torch function to steps."""
        self._is_half = len(operations) > 2 and any(map(is_cast, operations))
        for seen in operations:
            self._operation(seen)
        self._is_half = False

    def _operation(self, seen: Observation) -> None:
        inputs = seen.inputs
        known = {tensor.storage for tensor in inputs}
        if seen.operator == CHECKPOINT:
            self._marked(seen)
        elif seen.operator == PROPORTION:
            source = self._read(inputs[0], seen)
            if isinstance(source, int):
                self._proportions[source] = max(seen.arguments[1], LEAST_PROPORTION)
        elif seen.written:
            self._written(seen)
        elif seen.outputs and all(output.storage in known for output in seen.outputs):
            self._view(seen)
        else:
            self._computed(seen)

    def _marked(self, seen: Observation) -> None:
        """Add a step for a recomputation checkpoint, whose output later operations read.

        Only operations after the call of ``recomputationCheckpoint`` read the checkpoint. If no
        later operation reads the tensor, the step for the checkpoint has no readers, and the module
        ``graph_of_steps`` removes it.
        """
        tensor = seen.inputs[0]
        source = self._read(tensor, seen)
        if isinstance(source, str):
            return
        value = self._values[source]
        kept = self._value(value.elements, value.type, value.is_batched)
        step = Step(operator=seen.operator, module="", kind="view", inputs=(source,), output=kept)
        self._steps.append(replace(step, is_checkpoint=True))
        if source == self._whole[tensor.storage]:
            self._hold(tensor.storage, kept)
        else:
            self._parts.setdefault(tensor.storage, {})[tensor] = kept

    def _view(self, seen: Observation) -> None:
        for output in seen.outputs:
            base = next(one for one in seen.inputs if one.storage == output.storage)
            self._part(output, self._read(base, seen), seen)

    def _computed(self, seen: Observation) -> None:
        """Convert an operation that returns new tensors to steps."""
        sources = [self._read(tensor, seen) for tensor in seen.inputs]
        if seen.operator not in RANDOM and all(one in self._constants for one in sources):
            for output in seen.outputs:
                self._hold(output.storage, self._constant(output))
            return
        if seen.operator in COPIES and self._is_copy(seen.outputs[0], sources):
            self._hold(seen.outputs[0].storage, sources[0])
            return
        if seen.operator in ATTENTIONS:
            self._attention(seen)
            seen = replace(seen, outputs=seen.outputs[1:])
        for index, output in enumerate(seen.outputs):
            if output.elements:
                kind = None if index or seen.operator in ATTENTIONS else rule_of(seen.operator)
                self._step(seen, output, sources, main=kind is not None)

    def _is_copy(self, output: Seen, sources: Sequence[_Source]) -> bool:
        """Tell whether the IPU can use the source of a copy, so that the copy is not needed.

        A copy of a computed tensor is unnecessary if the copy has the same number of elements and
        the same type as the tensor. A copy of a weight is unnecessary unless the copy has more
        elements than the weight.
        """
        source = sources[0]
        if isinstance(source, str):
            return output.elements <= self._weights[source].elements
        value = self._values[source]
        return (value.elements, value.type) == (output.elements, self._type_now(output))

    def _step(
        self,
        seen: Observation,
        output: Seen,
        sources: Sequence[_Source],
        *,
        main: bool = True,
        hold: bool = True,
    ) -> int:
        """Add the step that computes an output of an operation, and return the value's number.

        Args:
            seen: The observed operation of torch.
            output: The tensor that the step computes.
            sources: The values and weights that the step reads.
            main: Whether ``output`` is the main output of the operation. (An operation may return
                several tensors.) Steps for other outputs of an operation are elementwise.
            hold: Whether the step's value becomes the source of the elements in the storage of
                ``output``.

        Raises:
            Error: The output has complex numbers, which PopTorch does not support.
        """
        if output.dtype.is_complex:
            where = f" in the module {seen.module}" if seen.module else ""
            raise Error(
                f"The operation {seen.operator.strip('_')}{where} computes a "
                f"{str(output.dtype)[6:]} tensor, but PopTorch does not support complex numbers: "
                "compute with real and imaginary parts"
            )
        rule = rule_of(seen.operator)
        kind = rule.kind if main else "elementwise"
        product: Product | None = None
        if main and kind == "product":
            product, sources = self._product(seen, output, sources)
            kind = "product" if product else "elementwise"
        data = [one for one in sources if self._masks.get(one) != seen.function]
        is_dropout = len(data) < len(sources) and rule.saves == "others"
        if is_dropout:
            # PopART's dropout computes its mask from a seed, again in the backward pass.
            sources = data
        result = self._made(output, sources, kind=kind)
        inputs, weights = _parted(sources)
        # If a tensor is multiplied by a number, the tensor's gradient does not depend on the
        # tensor's own elements.
        is_scaling = rule.saves == "others" and (len(seen.inputs) == 1 or is_dropout)
        self._steps.append(
            Step(
                operator=seen.operator,
                module=seen.module,
                kind=kind,
                inputs=inputs,
                output=result,
                weights=weights,
                saves=rule.saves if main and not is_scaling else "nothing",
                product=product,
                place=seen.place,
            )
        )
        if hold:
            self._hold(output.storage, result)
        return result

    def _product(
        self, seen: Observation, output: Seen, sources: Sequence[_Source]
    ) -> tuple[Product | None, Sequence[_Source]]:
        """Return the sizes and operands of a matrix product, with the batched operand first.

        If the arguments of the matrix product are not supported, the function returns None instead
        of the sizes.
        """
        two = sources[:2] if "convolution" in seen.operator else sources[-2:]
        weight_first = isinstance(two[0], str) and not isinstance(two[-1], str)
        found = multiplied(
            seen.operator, seen.arguments, output, batch=self._batch, weight_first=weight_first
        )
        if found is None:
            return None, sources
        operands = [self._read(found.first, seen), self._read(found.second, seen)]
        rest = [one for one in sources if one not in operands]
        return replace(found.product, serial=seen.serial), [*operands, *rest]

    def _written(self, seen: Observation) -> None:
        """Convert an in-place operation of torch to steps."""
        target = seen.written[0]
        if rule_of(seen.operator).kind == "norm":
            # A batch norm changes its running statistics in place and returns a new tensor. Only
            # the computation of the batch norm's returned tensor becomes a step.
            self._computed(replace(seen, written=()))
            return
        before = self._read(target, seen)
        others = [tensor for tensor in seen.inputs if tensor != target]
        sources = [self._read(tensor, seen) for tensor in others]
        size = self._elements(self._whole[target.storage])
        is_whole = target.elements >= size
        if before in self._constants and seen.operator not in RANDOM and not sources:
            return
        if before in self._masks and seen.operator in _SCALINGS and not sources:
            return
        if seen.operator == "copy_" and is_whole and self._is_copy(target, sources):
            self._hold(target.storage, sources[0])
            return
        reads = [] if seen.operator in FILLS | RANDOM else [before]
        if not is_whole:
            # An in-place operation that changes only a part of a tensor becomes a step that reads
            # the whole old tensor and computes the whole new tensor.
            whole = self._whole[target.storage]
            reads = [whole]
        result = self._step(seen, target, [*reads, *sources], hold=False)
        if seen.operator == "bernoulli_":
            self._masks[result] = seen.function
            self._values[result] = replace(self._values[result], type="bool")
        if not is_whole:
            part = self._values[result]
            is_batched = part.is_batched and size % self._batch == 0
            self._values[result] = replace(part, elements=size, is_batched=is_batched)
        self._hold(target.storage, result)

    def _elements(self, source: _Source) -> int:
        if isinstance(source, str):
            return self._weights[source].elements
        return self._values[source].elements

    # -- torch functions that become several Step objects ---------------------------------------

    def _add(self, seen: Observation, operator: str, kind: Kind, **parts: Any) -> int:
        """Add one ``Step`` of a torch function, and return the number of the computed value.

        Args:
            seen: The observed operation of torch.
            operator: The name of the operation, such as "softmax".
            kind: The kind of the operation, such as "product" (a matrix product).
            **parts: The argument ``value`` contains the number of elements, the type and
                ``is_batched`` of the step's value. The argument ``sources`` contains the values and
                weights that the step reads. The other keyword arguments become attributes of the
                ``Step``.
        """
        value = self._value(*parts.pop("value"))
        inputs, weights = _parted(parts.pop("sources"))
        self._steps.append(
            Step(
                operator=operator,
                module=seen.module,
                kind=kind,
                inputs=inputs,
                weights=weights,
                output=value,
                place=seen.place,
                **parts,
            )
        )
        return value

    def _attention(self, seen: Observation) -> None:
        """Convert scaled dot product attention to two matrix products and a softmax."""
        query, key, value, *masks = seen.inputs
        first, second = attention_products(query, value, self._batch)
        type_, add = self._type_now(query), partial(self._add, seen)
        sizes = (prod(query.shape[:-1]) * value.shape[-2], type_, True)
        q, k, v, *rest = (self._read(tensor, seen) for tensor in (query, key, value, *masks))
        scores = add(
            "scores", "product", sources=[q, k], value=sizes, product=first, saves="others"
        )
        shares = add("softmax", "softmax", sources=[scores, *rest], value=sizes, saves="output")
        mixed = (prod(query.shape[:-1]) * value.shape[-1], type_, True)
        result = add(
            "mix", "product", sources=[shares, v], value=mixed, product=second, saves="others"
        )
        self._hold(seen.outputs[0].storage, result)

    def recurrent(self, operations: Sequence[Observation]) -> None:
        """Convert a recurrent layer (such as an LSTM) to matrix products and elementwise steps.

        PopTorch does not support recurrent modules with ``num_layers`` above 1 or with two
        directions. The operations of a recurrent layer therefore belong to a single layer with one
        direction.
        """
        tensors = given(operations)
        sources = list(dict.fromkeys(self._read(tensor, operations[0]) for tensor in tensors))
        inputs = [one for one in sources if isinstance(one, int)]
        names = [one for one in sources if isinstance(one, str) and one not in self._constants]
        shapes = {w.name: w.value.shape for w in self._observed.weights}
        matrices = [name for name in names if len(shapes.get(name, ())) == 2]
        vectors = [name for name in names if name not in matrices]
        if not inputs or len(matrices) < 2:
            self.call(operations)
            return
        seen, outputs = operations[-1], [o for one in operations for o in one.outputs]
        # The largest input of a recurrent layer is the sequence, because the initial states of the
        # layer are smaller.
        data = max(inputs, key=lambda one: self._values[one].elements)
        rows = self._values[data].elements // shapes[matrices[0]][1]
        type_ = self._values[data].type
        add = partial(self._add, seen)
        (gates, into), (_, hidden) = (shapes[name] for name in matrices[:2])
        share, sizes = per_sample(rows, self._batch), (rows * gates, type_, True)
        entering = add(
            "input", "product", sources=[data, matrices[0], *vectors[:1]], value=sizes,
            product=Product(share, into, gates), saves="others",
        )  # fmt: skip
        state = add(
            "recurrent", "product", sources=[entering, matrices[1], *vectors[1:]], value=sizes,
            product=Product(share, hidden, gates), saves="others",
        )  # fmt: skip
        size = (rows * hidden, type_, True)
        cell = add("cell", "elementwise", sources=[state, entering], value=size, saves="both")
        made = {one.storage: one for one in outputs}
        for output in made.values():
            result = cell
            if prod(output.shape) != size[0]:
                last = (prod(output.shape), type_, True)
                result = add("state", "elementwise", sources=[cell], value=last)
            self._hold(output.storage, result)


def _type(dtype: torch.dtype) -> Type:
    return TYPES.get(dtype, "float32")


def _parted(sources: Sequence[_Source]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of values and the names of weights in ``sources``, without duplicates."""
    unique = tuple(dict.fromkeys(sources))
    return (
        tuple(one for one in unique if isinstance(one, int)),
        tuple(one for one in unique if isinstance(one, str)),
    )
