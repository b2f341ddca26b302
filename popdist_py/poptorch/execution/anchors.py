"""The names of a compiled model's tensors, and the class Anchors, which collects anchored tensors.

An anchored tensor is a tensor inside the model that ``Options.anchorTensor()`` selected. A program
can read the values of anchored tensors after each call of the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from popdist_py.poptorch.calls.batching import Batching, Collector, Values
from popdist_py.poptorch.errors import Error

__all__ = ["Anchors", "tensor_names"]

Results = Sequence[Values]
# A function that gets the inputs and outputs of one micro-batch, and returns the value of an
# anchored tensor on each replica.
Getter = Callable[[Sequence[torch.Tensor], Results], Values]


def input_name(index: int) -> str:
    """Return the name of an input tensor: ``input``, ``input/1``, ..."""
    return "input" if index == 0 else f"input/{index}"


def tensor_names(
    num_inputs: int,
    parameters: Iterable[str],
    updated: Iterable[str],
    operations: Iterable[str],
    settings: Iterable[str],
    *,
    training: bool,
) -> list[str]:
    """Return the names of all tensors of a model that a program can anchor.

    Args:
        num_inputs: The number of input tensors.
        parameters: The names of the parameters and buffers.
        updated: The names of the parameters that training updates.
        operations: The names of the model's operations, in the order of their execution.
        settings: The names of the optimiser's settings, such as the learning rate.
        training: Whether the model is a training model, which has a loss, gradients and weight
            updates.
    """
    names = [input_name(index) for index in range(num_inputs)] + list(parameters)
    names += list(dict.fromkeys(operations))
    if training:
        names += ["loss"]
        for name in updated:
            names += [f"Gradient___{name}", f"UpdatedVar___{name}"]
    return names + list(settings)


class Anchors:
    """The anchored tensors of a model, whose values are collected during each call.

    Args:
        wanted: The anchored tensors by their short names, from ``Options.anchored_tensors``.
        batching: The batching factors of the model, and the output mode of the model. An output
            mode determines which micro-batches' results a call returns. An anchored tensor may have
            another output mode than the model.
        parameters: The device's parameters and buffers, keyed by their names.
        updated: The names of the parameters that training updates.
        operations: The names of the results of the model's operations.
        num_inputs: The number of input tensors.
        loss_output: The index of the output that is the loss; None if no output is the loss.
        settings: A function that returns the optimiser's settings, such as the learning rate, keyed
            by their names.

    Raises:
        Error: The model does not have one of the tensors to anchor.
    """

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Any]],
        batching: Batching,
        parameters: Mapping[str, torch.Tensor],
        *,
        updated: Iterable[str],
        operations: Iterable[str],
        num_inputs: int,
        loss_output: int | None,
        settings: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._batching = batching
        self._gradients: dict[str, list[torch.Tensor]] = {}
        self._results: dict[str, list[torch.Tensor]] = {}
        self._updated = frozenset(updated)
        self._operations = frozenset(operations)
        self._inputs = {input_name(index): index for index in range(num_inputs)}
        self._scale = 1.0
        self._parameters = parameters
        self._loss_output = loss_output
        self._settings = settings
        self._anchors: dict[str, tuple[Batching, Getter]] = {
            short: (_with_mode(batching, entry), self._getter(entry[0]))
            for short, entry in wanted.items()
        }
        self._collectors: dict[str, Collector] = {}

    @property
    def needs_each_backward(self) -> bool:
        """Whether a gradient is anchored, so that each replica needs a separate backward pass."""
        return bool(self._gradients)

    @property
    def needs_operations(self) -> bool:
        """Whether the result of an operation is anchored.

        If the property ``needs_operations`` is True, ``see()`` must be called with the results of
        the model's operations.
        """
        return bool(self._results)

    def see(self, name: str, result: torch.Tensor) -> None:
        """Store the result of one of the model's operations, if the result is anchored."""
        if name in self._results:
            self._results[name].append(result.detach().clone())

    def set_scale(self, scale: float) -> None:
        """Set the factor by which the backward pass multiplies all gradients.

        The stored values of anchored gradients are divided by ``scale``.
        """
        self._scale = scale

    def _getter(self, name: str) -> Getter:
        kind, _, parameter = name.rpartition("___")
        if name in self._inputs:
            index = self._inputs[name]
            return lambda inputs, _: self._batching.per_replica(inputs[index])
        if kind == "Gradient" and parameter in self._updated:
            found = self._gradients.setdefault(parameter, [])
            self._parameters[parameter].register_hook(
                lambda gradient: found.append(gradient.detach() / self._scale)
            )
            return lambda *_: _taken(found)
        if name in self._parameters or (kind == "UpdatedVar" and parameter in self._updated):
            tensor, replicas = self._parameters[parameter], self._batching.replicas
            return lambda *_: [tensor.detach().clone()] * replicas
        if name in self._operations:
            results = self._results.setdefault(name, [])
            return lambda *_: _taken(results)
        if name in self._settings():
            return lambda *_: [self._settings()[name]] * self._batching.replicas
        if name.startswith("loss") and self._loss_output is not None:
            at = self._loss_output
            return lambda _, outputs: outputs[at]
        raise Error(self._unknown(name))

    def _unknown(self, name: str) -> str:
        names = [*self._inputs, *self._parameters, *self._operations]
        names += [f"{kind}___{one}" for kind in ("Gradient", "UpdatedVar") for one in self._updated]
        nearest = difflib.get_close_matches(name, sorted(names), n=10, cutoff=0.0)
        return (
            f"Cannot anchor tensor {name!r}: the model has no such tensor. The nearest names of "
            f"tensors are {', '.join(nearest)}. model.getTensorNames() lists all names of tensors"
        )

    def begin(self) -> None:
        """Remove the values that anchored tensors had in the previous call of the model."""
        if self._anchors:
            self._collectors = {
                short: Collector(batching) for short, (batching, _) in self._anchors.items()
            }

    def after_step(self, step: int, inputs: Sequence[torch.Tensor], results: Results) -> None:
        """Store the values of the anchored tensors for micro-batch ``step``.

        If a weight update follows the micro-batch, ``after_step`` must be called after the weight
        update, so that anchored weights have their new values.
        """
        for short, (batching, getter) in self._anchors.items():
            tensors = getter(inputs, results)
            if batching.wanted(step):
                self._collectors[short].add(step, tensors)

    def get(self, short: str) -> torch.Tensor:
        """Return the value of an anchored tensor in the last call of the model.

        Raises:
            AssertionError: No anchored tensor has the short name ``short``.
        """
        assert short in self._collectors, (
            f"No tensor is anchored with the name {short!r}: call Options.anchorTensor() before "
            "the model is compiled, then run the model"
        )
        return self._collectors[short].result()


def _taken(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of a list, and remove all elements from the list itself."""
    taken = list(values)
    values.clear()
    return taken


def _with_mode(batching: Batching, entry: Sequence[Any]) -> Batching:
    if entry[1]:
        return batching
    return replace(batching, output_mode=entry[2], output_period=entry[3])
