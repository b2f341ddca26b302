"""The names of a compiled model's tensors, and the class Anchors, which collects anchored tensors.

An anchored tensor is a tensor inside the model that ``Options.anchorTensor()`` selected. A program
can read the values of anchored tensors after each call.
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
# A function that returns an anchored tensor's value on each replica. Its arguments are the inputs
# and the outputs of one micro-batch.
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
    """Return the names of a model's tensors.

    Args:
        num_inputs: The number of input tensors.
        parameters: The names of the parameters and buffers.
        updated: The names of the parameters that training updates.
        operations: The names of the operations, in the order of their execution.
        settings: The names of the optimiser's settings.
        training: Whether the model is trained, and therefore has a loss, gradients and updates.
    """
    names = [input_name(index) for index in range(num_inputs)] + list(parameters)
    names += list(dict.fromkeys(operations))
    if training:
        names += ["loss"]
        for name in updated:
            names += [f"Gradient___{name}", f"UpdatedVar___{name}"]
    return names + list(settings)


class Anchors:
    """The anchored tensors of a model, which are collected during each call.

    Args:
        wanted: The value of ``Options.anchored_tensors``.
        batching: The batching factors of the model. An anchored tensor may have another output
            mode than the model's results.
        parameters: The device's parameters and buffers by name.
        updated: The names of the parameters that training updates.
        operations: The names of the results of operations.
        num_inputs: The number of input tensors.
        loss_output: The index of the output that is the loss; None if no output is the loss.
        settings: A function that returns the optimiser's settings by name.

    Raises:
        Error: The model does not have a tensor of an anchored name.
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
        """Whether the gradients of single replicas are anchored."""
        return bool(self._gradients)

    @property
    def needs_operations(self) -> bool:
        """Whether results of operations are anchored, so that ``see()`` has to be called."""
        return bool(self._results)

    def see(self, name: str, result: torch.Tensor) -> None:
        """Store the result of an operation of the running replica, if the result is anchored."""
        if name in self._results:
            self._results[name].append(result.detach().clone())

    def set_scale(self, scale: float) -> None:
        """Set the factor that the backward pass multiplies gradients by.

        Anchored gradients are divided by the factor.
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
            f"Cannot anchor tensor {name!r}: the model has no such tensor. The nearest are "
            f"{', '.join(nearest)}; getTensorNames() lists all"
        )

    def begin(self) -> None:
        """Start a call with empty collectors."""
        if self._anchors:
            self._collectors = {
                short: Collector(batching) for short, (batching, _) in self._anchors.items()
            }

    def after_step(self, step: int, inputs: Sequence[torch.Tensor], results: Results) -> None:
        """Collect the anchored tensors of micro-batch ``step``.

        If a weight update follows the micro-batch, this method must be called after the update.
        """
        for short, (batching, getter) in self._anchors.items():
            tensors = getter(inputs, results)
            if batching.wanted(step):
                self._collectors[short].add(step, tensors)

    def get(self, short: str) -> torch.Tensor:
        """Return an anchored tensor of the last call.

        Raises:
            AssertionError: The name is unknown.
        """
        assert short in self._collectors, (
            f"No tensor is anchored as {short!r}: use Options.anchorTensor() before compiling, "
            "and run the model"
        )
        return self._collectors[short].result()


def _taken(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the elements of the list, and empty the list."""
    taken = list(values)
    values.clear()
    return taken


def _with_mode(batching: Batching, entry: Sequence[Any]) -> Batching:
    if entry[1]:
        return batching
    return replace(batching, output_mode=entry[2], output_period=entry[3])
