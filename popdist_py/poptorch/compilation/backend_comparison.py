"""The class BackendComparison, which compares the results of replica back ends.

A replica back end is code that runs the forward and backward passes of all replicas. The simplest
replica back end, ``LoopReplicas``, runs one replica after the other. ``LoopReplicas`` is the
reference: its results are correct by definition. The results of another replica back end may differ
from the results of the reference back end ``LoopReplicas`` by rounding errors, because the same sum
in another order is rounded differently. Deep models amplify rounding errors. For example, a
gradient of ResNet-50 changes by 2 per cent if the last bits of the weights change. Therefore the
comparison measures the effect of rounding on every tensor that the reference back end
``LoopReplicas`` computes. The module ``backend_comparison`` does not depend on how a replica back
end works, and does not compare the speed of back ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch.autograd.graph import increment_version

from popdist_py.poptorch.calls.batching import joined
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.tensor_distances import (
    Tensors,
    distances,
    roundings,
    says_nothing,
)
from popdist_py.poptorch.execution.replicas import DeviceModel, LoopReplicas, Outputs, Replicas
from popdist_py.poptorch.weights.parameter_gradients import (
    clear_gradients,
    gradients_of,
    set_gradients,
)

__all__ = ["BackendComparison"]

# The noise of a tensor is the norm of the tensor's change if random rounding errors are added to
# all weights and inputs. A tensor that a back end computes agrees with the same tensor of the
# reference back end ``LoopReplicas`` if the norm of their difference is at most _NOISE times the
# noise of the tensor, plus the tolerance that the function roundings() returns. In measurements of
# ResNet, MobileNet, BERT and small models, the differences of correct back ends were below 1.5
# times the noise. A back end that wrongly added 1e-4 times the tensors of one replica to the
# tensors of another replica differed by 150 times the noise.
_NOISE: Final = 12.0
# The results of back ends are compared at several test points. A test point is one set of numbers
# for all weights, inputs and buffers of a model. If the input of a ReLU is nearly zero, rounding
# may change the sign of the input. A change of the input's sign causes a large change of gradients,
# but only a small change of the ReLU's output. Therefore each gradient must agree with the gradient
# of the reference back end ``LoopReplicas`` at only one of _MAX_POINTS test points. Outputs and
# buffers must agree with those of the reference back end ``LoopReplicas`` at every tested point.
_MAX_POINTS: Final = 4
# The number of the test point whose weights and inputs are close to those in the user's program. If
# weights and inputs differ much from the weights and inputs in the user's program, a model may
# compute only NaN, and NaN cannot be compared. If all numbers of a result are NaN or infinite at
# test point 0 (the first set of weights and inputs), the comparison also uses the test point _NEAR.
_NEAR: Final = _MAX_POINTS


@dataclass(frozen=True, slots=True)
class _Results:
    """A model's results for one micro-batch: outputs, gradients and changed buffers."""

    outputs: Tensors
    gradients: Tensors
    rest: Tensors

    def kinds(self) -> Iterator[tuple[str, Tensors]]:
        yield "outputs", self.outputs
        yield "gradients", self.gradients
        yield "buffers or inputs", self.rest


@dataclass(slots=True)
class _Point:
    """A test point: one set of numbers for weights, inputs and buffers to compare back ends.

    Attributes:
        number: The number of the test point. The weights, inputs and buffers of each test point
            differ from those of every other test point. They also differ from the tensors with
            which a graph was recorded.
        expected: The results that the reference back end ``LoopReplicas`` computes from the
            weights, inputs and buffers of the test point.
        noise: For each kind of tensor, the size of the change that rounding causes in each result
            of the reference back end ``LoopReplicas``; None if the noise has not been measured.
    """

    number: int
    expected: _Results
    noise: dict[str, list[float]] | None = field(default=None)


def _scale(number: int) -> float:
    """Return the factor that multiplies all weights, buffers and inputs at a test point."""
    return 0.984375 if number == _NEAR else 0.75 - 0.0625 * number


class BackendComparison:
    """Compares the results of replica back ends with those of the reference ``LoopReplicas``.

    The device's tensors are restored after each run of a back end.

    Args:
        model: The compiled model on the device.
        call: Example arguments for calling the model.
        inputs: One tensor for each input of the model, with a micro-batch for each group of
            replicas that get the same inputs.
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
        """Whether ``LoopReplicas`` has run, so that other back ends may run now."""
        return bool(self._points)

    def prepare(self) -> None:
        """Run the reference back end ``LoopReplicas``, which must run before any other back end.

        If another back end ran first, its forward pass could store tensors in Python variables, and
        the reference back end ``LoopReplicas`` could read these tensors in its first run.
        """
        self._point(0)

    def difference(self, replicas: Replicas) -> str | None:
        """Return a text that names the results in which a back end differs from ``LoopReplicas``.

        The text is None if all results of the back end agree with the results of the reference back
        end ``LoopReplicas``.
        """
        first = self._point(0).expected
        empty = says_nothing(first.outputs)
        differing = set(range(len(self._model.trained)))
        numbers = list(range(_MAX_POINTS))
        if empty or says_nothing(first.gradients):
            numbers.insert(1, _NEAR)
        for number in numbers:
            point = self._point(number)
            for kind, wrong in self._wrong(point, self._run(replicas, number)):
                if kind != "gradients" and wrong:
                    return f"its {kind} are not those of the loop over the replicas"
                if kind == "gradients":
                    differing &= wrong | says_nothing(point.expected.gradients)
            empty &= says_nothing(point.expected.outputs)
            if not differing and not empty:
                return None
        what = "outputs" if empty else "gradients"
        return (
            f"its {what} are not those of the loop over the replicas, or contain only NaN and "
            "infinity in both"
        )

    def _point(self, number: int) -> _Point:
        if number not in self._points:
            self._points[number] = _Point(number, self._run(self._loop, number))
        return self._points[number]

    def _wrong(self, point: _Point, results: _Results) -> Iterator[tuple[str, set[int]]]:
        """Yield each kind of result, such as gradients, with the indices of wrong tensors.

        A tensor of a back end is wrong if rounding errors cannot explain its difference from the
        tensor of the reference back end ``LoopReplicas``.
        """
        far_off_of: dict[str, list[float] | None] = {}
        for (kind, expected), (_, got) in zip(point.expected.kinds(), results.kinds(), strict=True):
            far_off_of[kind] = distances(expected, got) if len(expected) == len(got) else None
        # The results of the compared back end are deleted, because the runs that measure the effect
        # of rounding need their memory.
        del results, got
        for kind, expected in point.expected.kinds():
            far_off, allowed = far_off_of[kind], roundings(expected)
            if far_off is None:
                yield kind, set(range(len(expected) + 1))
                continue
            wrong = {i for i, far in enumerate(far_off) if not far <= allowed[i]}
            if any(far_off[i] < float("inf") for i in wrong):
                noise = self._noise(point)[kind]
                wrong = {i for i in wrong if not far_off[i] <= allowed[i] + _NOISE * noise[i]}
            yield kind, wrong

    def _noise(self, point: _Point) -> dict[str, list[float]]:
        """Return how much rounding changes each result (tensor) of ``LoopReplicas``.

        To measure the effect of rounding, ``_noise`` runs the reference back end ``LoopReplicas``
        with random rounding errors in all weights and inputs. The method ``_noise`` also runs the
        reference back end ``LoopReplicas`` again with unchanged weights and inputs. If a tensor
        changes when the reference back end ``LoopReplicas`` runs again with unchanged weights and
        inputs, the cause is not rounding, but for example a Python variable that the forward pass
        changes. For a tensor that changes without a change of weights and inputs, ``_noise``
        returns 0.
        """
        if point.noise is None:
            # ``LoopReplicas`` runs twice without rounding errors, before and after the run with
            # random rounding errors. If ``LoopReplicas`` ran only once more, a Python variable of
            # the model could by chance have the same value as in the first run.
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
        """Return how much each result changes if ``LoopReplicas`` runs again."""
        return _all_distances(point.expected, self._run(self._loop, point.number))

    # -- methods that run a micro-batch -------------------------------------------------------

    @torch.no_grad()
    def _run(
        self,
        replicas: Replicas,
        number: int,
        change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> _Results:
        """Run a micro-batch with a test point's tensors, after ``change`` has changed them."""
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
        gradients = _taken_gradients(model)
        # Parameters that the optimiser does not update may also have gradients. Therefore the
        # gradients of all parameters are removed.
        clear_gradients(self._parameters)
        return _Results([joined(values) for values in outputs], gradients, [*buffers, *inputs])

    def _host_weights(self) -> dict[int, torch.Tensor]:
        """Return the host parameters whose numbers are equal to those on the device.

        The result is a dictionary whose keys are the ``id`` of each device parameter.
        """
        if self._hosts is None:
            self._hosts = self._model.state.host_copies()
        return self._hosts

    @contextmanager
    def _moved(
        self, scale: float, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Change the weights and buffers during the ``with`` block, and restore them afterwards."""
        # Weights that are changed to compare back ends get new memory, because other instances may
        # read the old memory of the weights. If a back end wrongly reads the old memory of a
        # weight, the comparison detects that its results differ from the results of the reference
        # back end ``LoopReplicas``. To save memory, a weight's old memory is freed if the host has
        # an equal copy of the weight and no other tensor uses the memory. A weight whose old memory
        # was freed is restored from the host's copy.
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
            # Torch does not increase a tensor's version number if the program assigns ``data``.
            increment_version(self._parameters)
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
            increment_version(self._parameters)
            for buffer, value in zip(self._buffers, buffers, strict=True):
                buffer.copy_(value)


class _LoopOverTwo:
    """A ``LoopReplicas`` that runs only two replicas, and copies the second replica's results.

    While back ends are compared, all replicas except the first get equal inputs and buffers.
    Therefore the results of the second replica are also the results of all later replicas. If a
    back end mixes up replicas, data of the first replica get into the results of other replicas,
    and the comparison detects the difference.
    """

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._loop = LoopReplicas(model)
        self._stacks = [stack for _, _, stack in model.state.stacked_buffers()]

    @staticmethod
    def suffices(model: DeviceModel) -> bool:
        """Tell whether two replicas with equal inputs and buffers always have equal results."""
        first, batching = model.first_forward, model.batching
        differ = first.is_random or first.changed_inputs or batching.group_size > 1
        return batching.replicas > 2 and not differ and model.norm_groups is None

    @staticmethod
    def make_alike(stacks: Sequence[torch.Tensor]) -> None:
        """Copy the second replica's slice of each tensor to the slices of all later replicas.

        Args:
            stacks: Tensors of the shape [replicas, ...], with one slice for each replica.
        """
        for stack in stacks:
            stack[2:] = stack[1].clone()

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run two replicas, and count the second replica's gradients once for each later replica.

        All replicas except the first have equal inputs, so their gradients are equal too.
        """
        others = self._model.batching.replicas - 1
        one, two, *_ = self._model.batching.inputs_of_replicas(inputs)
        first = self._loop.run_one(0, call, one, number, scale)
        gradients = _taken_gradients(self._model)
        second = self._loop.run_one(1, call, two, number, scale)
        # The gradients of the second replica are multiplied by the number of replicas that it
        # represents. The second replica's loss is not multiplied, because a factor on the loss
        # would change the rounding errors of the backward pass. Each sum of two gradients replaces
        # the old gradient immediately, so that only one additional tensor needs memory.
        for parameter, gradient in zip(self._model.trained, gradients, strict=True):
            set_gradients([parameter], [_sum(gradient, parameter.grad, others)])
        self.make_alike(self._stacks)
        return list(zip(first, *[second] * others, strict=True))


def _taken_gradients(model: DeviceModel) -> Tensors:
    """Return the gradients of the trained parameters, and set their ``grad`` to None."""
    gradients = [g if g is None else g.detach() for g in gradients_of(model.trained)]
    if model.gradients is not None and model.gradients.reuses_memory:
        gradients = [g if g is None else g.clone() for g in gradients]
    clear_gradients(model.trained)
    return gradients


def _sum(first: torch.Tensor | None, other: torch.Tensor | None, times: int) -> torch.Tensor | None:
    """Return the sum ``first + times * other``; a missing gradient counts as zero."""
    if other is None:
        return first
    if first is None:
        first = torch.zeros_like(other)
    if other.dtype.itemsize > 2:
        return first.add_(other, alpha=times)
    # In float16 or bfloat16, the rounding error of one addition is as large as an error that the
    # comparison of back ends must detect. Therefore the tensor ``other`` is added ``times`` times
    # and not multiplied, as in a loop over all replicas.
    for _ in range(times):
        first.add_(other)
    return first


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_USES_OF_ONE: Final = _uses(torch.empty(1))


def _is_alone(tensor: torch.Tensor) -> bool:
    """Tell whether no other tensor uses the memory of a tensor."""
    return _uses(tensor) == _USES_OF_ONE


def _other(tensor: torch.Tensor, number: int, scale: float) -> torch.Tensor:
    """Return a changed copy of an input tensor, with numbers that the model accepts.

    The samples get another order, and floating-point numbers are multiplied by ``scale``. Integers
    are not multiplied by ``scale``. To change the sum of an integer tensor over the samples, a copy
    of the last sample replaces the first sample.
    """
    moved = tensor.flip(0).roll(number, 0)
    if tensor.is_floating_point():
        return moved * scale
    moved[:1] = moved[-1:].clone()
    return moved


def _rounded_anew(generator: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, with a random rounding error added to each number."""
    if not tensor.is_floating_point():
        return tensor.clone()
    errors = torch.empty_like(tensor, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return tensor + (tensor * errors.mul_(torch.finfo(tensor.dtype).eps)).to(tensor.dtype)


def _all_distances(expected: _Results, got: _Results) -> dict[str, list[float]]:
    return {
        kind: distances(ours, theirs)
        for (kind, ours), (_, theirs) in zip(expected.kinds(), got.kinds(), strict=True)
    }
