"""The class CompressedGradients, which compresses one model's gradients between hosts.

The options of the model contain the name of the compression method. Gradients are not compressed
within a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from popdist_py.collectives import Communicator, HostLinks
from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.compression_rounds import Compression
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.update.compressed.error_feedback import ErrorFeedback
from popdist_py.poptorch.update.compressed.power_sgd import PowerSgd, PowerSgdSettings
from popdist_py.poptorch.update.compressed.rounded_sums import RoundedSums

__all__ = ["CompressedGradients", "Reduction", "ReductionOf", "exact"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction (sum) of one array of gradients over all instances, as one or two functions.

    Attributes:
        start: A function that starts to sum the array of gradients over all instances.
        finish: A function that completes the oldest reduction that has been started but not
            completed; None if ``start`` does the whole reduction.
    """

    start: Callable[[], None]
    finish: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Sum the array of gradients over all instances, by calling ``start`` and ``finish``."""
        self.start()
        if self.finish is not None:
            self.finish()


# A function that returns the ``Reduction`` (the sum over all instances) of an array of gradients.
# Its arguments are the array, and the shapes of the parameters in the order of their gradients in
# the array.
ReductionOf: TypeAlias = Callable[[Array, Sequence[Sequence[int]]], Reduction]


def exact(communicator: Communicator) -> ReductionOf:
    """Return a function that makes a ``Reduction`` of gradients without compression."""
    return lambda array, _: Reduction(partial(communicator.all_reduce, array, name="gradients"))


class _Kept(Compression, Protocol):
    """A compression of gradients whose state can be saved and loaded."""

    def state(self) -> dict[str, Any]:
        """Return the state of the compression for a checkpoint, without the error feedback."""

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the compression states that the method ``state`` returned on all instances."""


class CompressedGradients:
    """The compression of all gradients of one model between hosts.

    Args:
        method: The compression method, ``fp16``, ``bf16`` or ``powersgd``.
        settings: The settings of the compression method.
        communicator: The communicator that connects the instances.
        links: The connections between the hosts.
    """

    def __init__(
        self,
        method: str,
        settings: Mapping[str, Any],
        communicator: Communicator,
        links: HostLinks,
    ) -> None:
        self._method = method
        self._settings = settings
        self._exact = exact(communicator)
        self._links = links
        self._instance = communicator.instance_index
        self._made: list[tuple[_Kept, ErrorFeedback, list[list[int]]]] = []

    def reduction(self, array: Array, shapes: Sequence[Sequence[int]]) -> Reduction:
        """Return the ``Reduction`` of ``array``, with compression unless its dtype is float64.

        Args:
            array: A flat array of gradients, in memory made by ``gradient_buffer``.
            shapes: The shapes of the parameters, in the order of their gradients in ``array``.
        """
        # Float64 gradients are not compressed, because a program that uses float64 needs the
        # precision that compression would lose.
        if array.dtype == np.float64:
            return self._exact(array, shapes)
        feedback = ErrorFeedback(array.size)
        compression: _Kept = (
            PowerSgd(PowerSgdSettings(**self._settings), shapes, feedback)
            if self._method == "powersgd"
            else RoundedSums(self._method, array.size, feedback)
        )
        self._made.append((compression, feedback, [list(shape) for shape in shapes]))
        links = self._links
        start = partial(links.start_compressed, array, compression, name="gradients")
        return Reduction(start, links.finish_compressed)

    def begin(self, loss_scale: float) -> None:
        """Start a training step in which all gradients are multiplied by ``loss_scale``."""
        for _, feedback, _ in self._made:
            feedback.rescale(loss_scale)

    @property
    def _layout(self) -> list[Any]:
        """The settings that must be equal in two models to copy compression errors between them."""
        # The rank of PowerSGD affects which gradient matrices are compressed, and the shapes of
        # their factors.
        rank = self._settings.get("rank")
        method = self._method if rank is None else f"{self._method} rank {rank}"
        hosts = [list(instances) for instances in self._links.hosts]
        return [method, hosts, [shapes for *_, shapes in self._made]]

    def state(self) -> dict[str, Any]:
        """Return the state of the compression for a checkpoint.

        The state of the compression consists of nested dicts and lists of tensors, numbers and
        strings.
        """
        return {
            "layout": self._layout,
            "arrays": [
                {"compression": compression.state(), "feedback": feedback.state()}
                for compression, feedback, _ in self._made
            ],
        }

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the compression states that :meth:`state` returned on all instances.

        The stored compression errors are not loaded if the compression, the hosts, the instances or
        the parameters have changed since the states were saved, because the stored errors would
        then belong to other gradient elements. Without the stored compression errors, the loss of
        precision is not larger than the loss by the compression in one training step.

        Args:
            states: The compression states of all instances, in the order of the instances.
        """
        method, hosts, shapes = states[0]["layout"]
        own_method, own_hosts, own_shapes = self._layout
        is_same = (method, shapes) == (own_method, own_shapes)
        for number, (compression, feedback, _) in enumerate(self._made if is_same else ()):
            saved = [state["arrays"][number] for state in states]
            compression.load_states([each["compression"] for each in saved])
            if hosts == own_hosts:
                feedback.load_state(saved[self._instance]["feedback"])
        if not is_same or hosts != own_hosts:
            logger.info(
                "The saved error feedback of gradient compression is not used, because it was "
                "saved with other hosts, instances, parameters or compression settings"
            )

    def take_over(self, before: CompressedGradients) -> None:
        """Copy the state of ``before``, which compressed the gradients of the same parameters.

        The compression state is not copied if ``before`` divides the gradients into arrays in
        another way.
        """
        if self._layout == before._layout:
            for own, earlier in zip(self._made, before._made, strict=True):
                own[0].load_states([earlier[0].state()])
                own[1].load_state(earlier[1].state())
