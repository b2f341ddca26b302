"""Names of the tensors inside a compiled model, and those that a program wants to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from popdist_py.poptorch.batching import Batching, Collector, Values
from popdist_py.poptorch.errors import Error

__all__ = ["Anchors", "tensor_names"]

Results = Sequence[Values]
# From the inputs and outputs of one micro-batch to the tensor of each replica.
Getter = Callable[[Sequence[torch.Tensor], Results], Values]


def input_name(index: int) -> str:
    """Return the name of an input tensor: ``input``, ``input/1``, ..."""
    return "input" if index == 0 else f"input/{index}"


def tensor_names(
    num_inputs: int,
    parameters: Iterable[str],
    updated: Iterable[str],
    operations: Iterable[str],
    *,
    training: bool,
) -> list[str]:
    """Return the names of a model's tensors.

    Args:
        num_inputs: number of input tensors.
        parameters: names of parameters and buffers.
        updated: names of the parameters that training updates.
        operations: names of the operations, in order.
        training: whether there are losses, gradients and updates.
    """
    names = [input_name(index) for index in range(num_inputs)] + list(parameters)
    names += list(dict.fromkeys(operations))
    if training:
        names += ["loss"]
        for name in updated:
            names += [f"Gradient___{name}", f"UpdatedVar___{name}"]
            names += [f"scaledLearningRate0___specific___{name}"]
            names += [f"weightDecayScaleFactor0___specific___{name}"]
    return names


class Anchors:
    """Collects the anchored tensors of each call.

    Args:
        wanted: ``Options.anchored_tensors``.
        batching: the model's; an anchor may have another output mode.
        parameters: the device's parameters and buffers, by name.
        loss_output: index of the output that is the loss.

    Raises:
        Error: a name that the emulation cannot show.
    """

    def __init__(
        self,
        wanted: Mapping[str, Sequence[Any]],
        batching: Batching,
        parameters: Mapping[str, torch.Tensor],
        loss_output: int | None,
    ) -> None:
        self._batching = batching
        self._gradients: dict[str, list[torch.Tensor]] = {}
        self._scale = 1.0
        self._parameters = parameters
        self._loss_output = loss_output
        self._anchors: dict[str, tuple[Batching, Getter]] = {
            short: (_with_mode(batching, entry), self._getter(entry[0]))
            for short, entry in wanted.items()
        }
        self._collectors: dict[str, Collector] = {}

    @property
    def needs_each_backward(self) -> bool:
        """Whether gradients of single replicas are wanted."""
        return bool(self._gradients)

    def set_scale(self, scale: float) -> None:
        """Say by which factor the backward's gradients differ from a micro-batch's own."""
        self._scale = scale

    def _getter(self, name: str) -> Getter:
        replicas = self._batching.replicas
        if name.startswith("input"):
            index = int(name.partition("/")[2] or 0)
            return lambda slabs, _: self._input(slabs[index])
        if name.startswith("loss") and self._loss_output is not None:
            at = self._loss_output
            return lambda _, results: results[at]
        kind, _, parameter = name.rpartition("___")
        if parameter not in self._parameters or kind not in ("", "UpdatedVar", "Gradient"):
            raise Error(
                f"Cannot anchor tensor {name!r}: the emulation shows inputs, parameters, the "
                "returned loss, Gradient___<parameter> and UpdatedVar___<parameter>"
            )
        tensor = self._parameters[parameter]
        if kind != "Gradient":
            return lambda *_: [tensor.detach().clone()] * replicas
        found = self._gradients.setdefault(parameter, [])
        tensor.register_hook(lambda gradient: found.append(gradient.detach() / self._scale))

        def take(*_: Any) -> list[torch.Tensor]:
            taken = list(found)
            found.clear()
            return taken

        return take

    def _input(self, slab: torch.Tensor) -> list[torch.Tensor]:
        groups = self._batching.num_groups
        parts = [slab] if groups == 1 else list(slab.split(slab.shape[0] // groups))
        return [parts[self._batching.group_of(r)] for r in range(self._batching.replicas)]

    def begin(self) -> None:
        """Start a call."""
        if self._anchors:
            self._collectors = {
                short: Collector(batching) for short, (batching, _) in self._anchors.items()
            }

    def after_step(self, step: int, slabs: Sequence[torch.Tensor], results: Results) -> None:
        """Take what is wanted of micro-batch ``step``, after the update that it may end."""
        for short, (batching, getter) in self._anchors.items():
            tensors = getter(slabs, results)
            if batching.wanted(step):
                self._collectors[short].add(step, tensors)

    def get(self, short: str) -> torch.Tensor:
        """Return an anchored tensor of the last call.

        Raises:
            AssertionError: an unknown name.
        """
        assert short in self._collectors, (
            f"No tensor is anchored as {short!r}: use Options.anchorTensor() before compiling, "
            "and run the model"
        )
        return self._collectors[short].result()


def _with_mode(batching: Batching, entry: Sequence[Any]) -> Batching:
    if entry[1]:
        return batching
    return replace(batching, output_mode=entry[2], output_period=entry[3])
