"""Compressed gradients between hosts: which compression each array of gradients has.

Made for one model, from what the options say. Within a host nothing is compressed.
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
from popdist_py.poptorch.update.error_feedback import ErrorFeedback
from popdist_py.poptorch.update.power_sgd import PowerSgd, PowerSgdSettings
from popdist_py.poptorch.update.rounded_sums import RoundedSums

__all__ = ["CompressedGradients", "Reduction", "ReductionOf", "exact"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What reduces an array, in one call or two.

    Attributes:
        start: starts it.
        finish: completes the first one that was started; None if ``start`` leaves nothing to do.
    """

    start: Callable[[], None]
    finish: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Reduce the array."""
        self.start()
        if self.finish is not None:
            self.finish()


# Returns what reduces an array of gradients, given the shapes of its parameters, in its order.
ReductionOf: TypeAlias = Callable[[Array, Sequence[Sequence[int]]], Reduction]


def exact(communicator: Communicator) -> ReductionOf:
    """Return what makes reductions without compression."""
    return lambda array, _: Reduction(partial(communicator.all_reduce, array, name="gradients"))


class _Kept(Compression, Protocol):
    """A compression with a state."""

    def state(self) -> dict[str, Any]:
        """Return what a later training goes on with, beside the error feedback."""

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take what ``state`` returned on all instances."""


class CompressedGradients:
    """The compressions of all arrays of gradients of one model.

    Args:
        method: ``fp16``, ``bf16`` or ``powersgd``.
        settings: of the method.
        communicator: the instances.
        links: between their hosts.
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
        """Return what reduces ``array``: float16 and float32 compressed, float64 exactly.

        Args:
            array: flat, in memory made by ``gradient_buffer``.
            shapes: of the parameters whose gradients it holds, in its order.
        """
        if array.dtype == np.float64:  # who asks for it wants its digits
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
        """Start a step whose gradients are scaled by ``loss_scale``."""
        for _, feedback, _ in self._made:
            feedback.rescale(loss_scale)

    @property
    def _layout(self) -> list[Any]:
        """What has to be equal for error feedback to fit."""
        # The rank decides which matrices are compressed, and the shape of their factors.
        rank = self._settings.get("rank")
        method = self._method if rank is None else f"{self._method} rank {rank}"
        hosts = [list(instances) for instances in self._links.hosts]
        return [method, hosts, [shapes for *_, shapes in self._made]]

    def state(self) -> dict[str, Any]:
        """Return what a later training goes on with: tensors, numbers, texts and lists of them."""
        return {
            "layout": self._layout,
            "arrays": [
                {"compression": compression.state(), "feedback": feedback.state()}
                for compression, feedback, _ in self._made
            ],
        }

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take what :meth:`state` returned on all instances, in their order.

        What was left out stays lost, as one step's rounding, where hosts, instances or parameters
        are not those that saved it: it belongs to other parts there.
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
                "The error feedback of compressed gradients starts anew: other hosts, instances, "
                "parameters or another compression saved it"
            )

    def take_over(self, before: CompressedGradients) -> None:
        """Go on with what ``before`` keeps, of the gradients of the same parameters.

        It starts anew if their arrays are cut otherwise.
        """
        if self._layout == before._layout:
            for own, earlier in zip(self._made, before._made, strict=True):
                own[0].load_states([earlier[0].state()])
                own[1].load_state(earlier[1].state())
