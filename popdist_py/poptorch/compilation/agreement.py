"""Whether a back end computes what the loop over replicas does: errors are told from rounding.

Two orders of the same sums round differently, and deep models enlarge that: a gradient of ResNet-50
changes by 2 per cent when its weights change in the last bit. How much is measured on the loop
itself, for each tensor. Nothing here knows how a back end works or which one is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from popdist_py.poptorch.calls.batching import joined
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.tensor_distances import (
    Tensors,
    distances,
    roundings,
    says_nothing,
)
from popdist_py.poptorch.execution.replicas import DeviceModel, LoopReplicas, Outputs, Replicas

__all__ = ["Agreement"]

# A tensor agrees if the norm of the difference is at most so many times that of what rounding all
# weights and inputs anew does to it, plus what roundings() allows in any case. Measured over
# ResNet, MobileNet, BERT and small models: right back ends stay below 1.5 times the noise, and a
# leak of 1e-4 between replicas makes 150 times as much.
_NOISE: Final = 12.0
# A ReLU whose input is nearly zero may switch, which changes gradients by a jump, but no value. So
# each gradient has to agree at one of so many points, outputs and buffers at all that are visited.
_MAX_POINTS: Final = 4
# Far from its own numbers a program may compute nothing but NaN, which proves nothing: what is not
# finite at the first point has to be so at this one, which is nearer to what the program runs with.
_NEAR: Final = _MAX_POINTS


@dataclass(frozen=True, slots=True)
class _Results:
    """What one micro-batch left: for each kind, its tensors."""

    outputs: Tensors
    gradients: Tensors
    rest: Tensors

    def kinds(self) -> Iterator[tuple[str, Tensors]]:
        yield "outputs", self.outputs
        yield "gradients", self.gradients
        yield "buffers or inputs", self.rest


@dataclass(slots=True)
class _Point:
    """Inputs, weights and buffers at which back ends are compared.

    Attributes:
        number: of the point; each has other values, none those that a graph was captured with.
        expected: the results of the loop.
        noise: by kind, how far rounding moves each tensor of the loop; None if not measured yet.
    """

    number: int
    expected: _Results
    noise: dict[str, list[float]] | None = field(default=None)


def _scale(number: int) -> float:
    """Return the factor on weights, buffers and inputs at a point."""
    return 0.984375 if number == _NEAR else 0.75 - 0.0625 * number


class Agreement:
    """Compares back ends with the loop, and leaves the device as it was.

    Args:
        model: what runs.
        call: arguments of a call.
        inputs: a combined micro-batch of each input.
    """

    def __init__(self, model: DeviceModel, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._loop = _LoopOverTwo(model) if _LoopOverTwo.suffices(model) else LoopReplicas(model)
        self._stacks = [stack for _, _, stack in model.state.stacked_buffers()]
        self._buffers = [*self._stacks, *model.state.buffers.values()]
        self._parameters = list(model.state.parameters.values())
        self._hosts: dict[int, torch.Tensor] | None = None
        self._points: dict[int, _Point] = {}

    @property
    def is_prepared(self) -> bool:
        """Whether the loop has run."""
        return bool(self._points)

    def prepare(self) -> None:
        """Run the loop before back ends do: a forward may keep something of theirs in Python."""
        self._point(0)

    def difference(self, replicas: Replicas) -> str | None:
        """Return in what a back end differs from the loop; None if it agrees."""
        first = self._point(0).expected
        empty = says_nothing(first.outputs)
        differing = set(range(len(self._model.trained)))
        numbers = list(range(_MAX_POINTS))
        if empty or says_nothing(first.gradients):
            numbers.insert(1, _NEAR)
        for number in numbers:
            point = self._point(number)
            results = self._run(replicas, number)
            for kind, wrong in self._wrong(point, results):
                if kind != "gradients" and wrong:
                    return f"its {kind} are not those of the loop"
                if kind == "gradients":
                    differing &= wrong | says_nothing(point.expected.gradients)
            empty &= says_nothing(point.expected.outputs)
            if not differing and not empty:
                return None
        what = "outputs" if empty else "gradients"
        return f"its {what} are not those of the loop, or not finite in both"

    def _point(self, number: int) -> _Point:
        if number not in self._points:
            self._points[number] = _Point(number, self._run(self._loop, number))
        return self._points[number]

    def _wrong(self, point: _Point, results: _Results) -> Iterator[tuple[str, set[int]]]:
        """Yield the indices of the tensors that differ by more than rounding, for each kind."""
        for (kind, expected), (_, got) in zip(point.expected.kinds(), results.kinds(), strict=True):
            if len(expected) != len(got):
                yield kind, set(range(len(expected) + 1))
                continue
            far_off = distances(expected, got)
            allowed = roundings(expected)
            wrong = {i for i, far in enumerate(far_off) if not far <= allowed[i]}
            if any(far_off[i] < float("inf") for i in wrong):
                noise = self._noise(point)[kind]
                wrong = {i for i in wrong if not far_off[i] <= allowed[i] + _NOISE * noise[i]}
            yield kind, wrong

    def _noise(self, point: _Point) -> dict[str, list[float]]:
        """Return how far each tensor of the loop moves when weights and inputs are rounded anew.

        What does not stay when nothing at all is changed moves for another reason than rounding,
        such as a variable of the program that the forward changes: it counts as none.
        """
        if point.noise is None:
            # Before and after: what the one before left may by chance be what it found itself.
            changes = [self._repeated(point)]
            moved = self._run(self._loop, point.number, partial(_rounded_anew, torch.Generator()))
            moves = _all_distances(point.expected, moved)
            del moved
            changes.append(self._repeated(point))
            point.noise = {
                kind: [
                    move if max(change[kind][index] for change in changes) <= move / 4 + rounding
                    else 0.0
                    for index, (move, rounding) in enumerate(
                        zip(moves[kind], roundings(expected), strict=True)
                    )
                ]
                for kind, expected in point.expected.kinds()
            }  # fmt: skip
        return point.noise

    def _repeated(self, point: _Point) -> dict[str, list[float]]:
        """Return how far each tensor of the loop moves when nothing at all is changed."""
        return _all_distances(point.expected, self._run(self._loop, point.number))

    # -- running ------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(
        self,
        replicas: Replicas,
        number: int,
        change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> _Results:
        """Run one micro-batch at a point, with weights and inputs changed by ``change``."""
        model, scale = self._model, _scale(number)
        inputs = [_other(tensor, number, scale) for tensor in self._inputs]
        if isinstance(self._loop, _LoopOverTwo):
            self._loop.make_alike([model.batching.stacked(tensor) for tensor in inputs])
        inputs = [change(tensor) for tensor in inputs]
        if model.gradients is not None:
            model.gradients.zero()
        with self._moved(scale, change), model.context.enter():
            outputs = replicas.run(self._call, inputs, 0, 1.0)
            buffers = [buffer.clone() for buffer in self._buffers]
        gradients = [None if p.grad is None else p.grad.detach() for p in model.trained]
        if model.gradients is not None and model.gradients.reuses_memory:
            gradients = [None if g is None else g.clone() for g in gradients]
        for parameter in self._parameters:
            parameter.grad = None
        return _Results([joined(values) for values in outputs], gradients, [*buffers, *inputs])

    def _host_weights(self) -> dict[int, torch.Tensor]:
        """Return the host's tensors that device parameters (by ``id``) are copies of."""
        if self._hosts is None:
            self._hosts = self._model.state.host_copies()
        return self._hosts

    @contextmanager
    def _moved(
        self, scale: float, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Have other weights and buffers while the enclosed code runs."""
        # Weights are replaced, not changed in place: other instances may read this memory, and a
        # back end that reads it has to show. What the host has as well is not kept meanwhile.
        hosts = self._host_weights()
        kept = {
            id(parameter): parameter.data
            for parameter in self._parameters
            if id(parameter) not in hosts or not _is_alone(parameter)
        }
        buffers = [buffer.clone() for buffer in self._buffers]
        try:
            for parameter in self._parameters:
                if parameter.is_floating_point():
                    parameter.data = change(parameter.detach() * scale)
            for buffer, value in zip(self._buffers, buffers, strict=True):
                if buffer.is_floating_point():
                    buffer.copy_(value * scale)
            if isinstance(self._loop, _LoopOverTwo):
                self._loop.make_alike(self._stacks)
            yield
        finally:
            for parameter in self._parameters:
                if id(parameter) in kept:
                    parameter.data = kept[id(parameter)]
                else:
                    parameter.data.copy_(hosts[id(parameter)])
            for buffer, value in zip(self._buffers, buffers, strict=True):
                buffer.copy_(value)


class _LoopOverTwo:
    """What the loop computes where all replicas but the first are alike: only two have to run.

    A back end that mixes replicas mixes the first one with others, which shows.
    """

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._loop = LoopReplicas(model)
        self._stacks = [stack for _, _, stack in model.state.stacked_buffers()]

    @staticmethod
    def suffices(model: DeviceModel) -> bool:
        """Tell whether replicas that get the same compute the same and leave the same."""
        first, batching = model.first_forward, model.batching
        differ = first.is_random or first.changed_inputs or batching.group_size > 1
        return batching.replicas > 2 and not differ and model.norm_groups is None

    @staticmethod
    def make_alike(stacks: Sequence[torch.Tensor]) -> None:
        """Give all replicas but the first the values [replicas, ...] of the second."""
        for stack in stacks:
            stack[2:] = stack[1].clone()

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the first two replicas; the second one's gradients count for all that are alike."""
        others = self._model.batching.replicas - 1
        one, two, *_ = self._model.batching.inputs_of_replicas(inputs)
        first = self._loop.run_one(0, call, one, number, scale)
        gradients = self._taken_gradients()
        second = self._loop.run_one(1, call, two, number, scale)
        # Not by a factor on the second one's loss: that changes what its backward rounds off.
        for parameter, gradient in zip(self._model.trained, gradients, strict=True):
            parameter.grad = _sum(gradient, parameter.grad, others)
        self.make_alike(self._stacks)
        return list(zip(first, *[second] * others, strict=True))

    def _taken_gradients(self) -> Tensors:
        """Return what the parameters have as gradients, and leave them none."""
        model = self._model
        gradients = [None if p.grad is None else p.grad.detach() for p in model.trained]
        if model.gradients is not None and model.gradients.reuses_memory:
            gradients = [None if g is None else g.clone() for g in gradients]
        for parameter in model.trained:
            parameter.grad = None
        return gradients


def _sum(first: torch.Tensor | None, other: torch.Tensor | None, times: int) -> torch.Tensor | None:
    """Return ``first`` with ``other`` added so many times."""
    if other is None:
        return first
    if first is None:
        first = torch.zeros_like(other)
    if other.dtype.itemsize > 2:
        return first.add(other, alpha=times)
    # Of 16 bits so few are behind the point that each addition rounds as much as errors weigh.
    for _ in range(times):
        first = first + other
    return first


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_USES_OF_ONE: Final = _uses(torch.empty(1))


def _is_alone(tensor: torch.Tensor) -> bool:
    """Tell whether no other tensor or array lies in the memory of this one."""
    return _uses(tensor) == _USES_OF_ONE


def _other(tensor: torch.Tensor, number: int, scale: float) -> torch.Tensor:
    """Return other valid values for an input: the samples in another order, floats smaller.

    Of whole numbers one sample is lost and another one there twice: their sum is another one, too.
    """
    moved = tensor.flip(0).roll(number, 0)
    if tensor.is_floating_point():
        return moved * scale
    moved[:1] = moved[-1:].clone()
    return moved


def _rounded_anew(generator: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose numbers are off by up to one rounding, at random."""
    if not tensor.is_floating_point():
        return tensor.clone()
    errors = torch.empty_like(tensor, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return tensor + (tensor * errors.mul_(torch.finfo(tensor.dtype).eps)).to(tensor.dtype)


def _all_distances(expected: _Results, got: _Results) -> dict[str, list[float]]:
    return {
        kind: distances(ours, theirs)
        for (kind, ours), (_, theirs) in zip(expected.kinds(), got.kinds(), strict=True)
    }
