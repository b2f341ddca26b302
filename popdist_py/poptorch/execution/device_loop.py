"""The loop on the device: what one call does, from input tensors to output tensors.

Knows the batching, the replica back end and when the update's steps come; what they do is
``update/training.py``'s. Nothing of the life cycle, which is ``model/executor.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from popdist_py.poptorch import enums
from popdist_py.poptorch.calls.batching import Batching, Collector
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.anchors import Anchors
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.replicas import Replicas
from popdist_py.poptorch.execution.timings import Counters
from popdist_py.poptorch.update.training import NoUpdate, Training
from popdist_py.timeline import spans

__all__ = ["Program"]


class Program:
    """Runs calls of one compiled model.

    Args:
        batching: how a call's samples are cut and its results gathered.
        replicas: becomes the attribute.
        back_end: becomes the attribute.
        training: the update; None for inference.
        context: where the model and its update run.
        num_outputs: result tensors of a call.
        returns_results: whether results leave the device; if not, a call returns zeros.
        loss_output: index of the output that is the loss; None if none is.
        anchors: tensors inside the model that calls also return.
        counters: when micro-batches came and went.

    Attributes:
        replicas: runs one micro-batch on each local replica.
        back_end: The name of the back end of the replicas.
        steps_done: micro-batches that ran since the start.
    """

    def __init__(
        self,
        *,
        batching: Batching,
        replicas: Replicas,
        back_end: str,
        training: Training | None,
        context: DeviceContext,
        num_outputs: int,
        returns_results: bool = True,
        loss_output: int | None = None,
        anchors: Anchors,
        counters: Counters,
    ) -> None:
        self.training = training
        self.counters = counters
        self.anchors = anchors
        self.steps_done = 0
        self._batching = batching
        self.replicas = replicas
        self.back_end = back_end
        self._update = training or NoUpdate()
        self._context = context
        # Entering the context takes a large part of the time of a small model's call.
        self._update_needs_context = bool(context.is_random or context.modes)
        self._num_outputs = num_outputs
        self._returns_results = returns_results
        self._loss_output = loss_output if returns_results else None
        is_sum = batching.output_mode == enums.OutputMode.Sum
        self._losses_in_sum = batching.num_steps if is_sum else 1
        self._like: list[torch.Tensor] | None = None  # results that are not returned, without data

    def run(
        self,
        call: Call,
        leaves: Sequence[torch.Tensor],
        after_update: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Run one call and return its result tensors.

        Args:
            call: the arguments.
            leaves: their tensors on the device.
            after_update: called after each weight update.
        """
        batching, update = self._batching, self._update
        micro_batches = batching.combined_micro_batches(leaves)
        collectors = self._collectors()
        accumulation = batching.gradient_accumulation
        self.counters.begin()
        self.anchors.begin()
        with self._entered():
            for iteration in range(batching.device_iterations):
                update.zero()
                scale = update.scale
                self.anchors.set_scale(scale)
                for micro in range(accumulation):
                    step = iteration * accumulation + micro
                    number, self.steps_done = self.steps_done, self.steps_done + 1
                    inputs = micro_batches[step]
                    self.counters.input(step)
                    with spans.row_span(spans.DEVICE, "micro-batch"):
                        outputs = self.replicas.run(call, inputs, number, scale)
                    update.accumulate()
                    if micro == accumulation - 1:
                        # The outputs leave after the update: anchors return the new weights.
                        update.step(number)
                        if after_update is not None:
                            after_update()
                    self.anchors.after_step(step, inputs, outputs)
                    self.counters.output(step)
                    if collectors and batching.wanted(step):
                        for collector, values in zip(collectors, outputs, strict=True):
                            collector.add(step, values)
        return self._results(collectors)

    def loss_in(self, results: Sequence[torch.Tensor]) -> float | None:
        """Return the mean of the loss over what a call returns of it; None if that is nothing."""
        if self._loss_output is None:
            return None
        loss = results[self._loss_output]
        mean = loss if loss.numel() == 1 else loss.mean(dtype=torch.float64)
        return mean.item() / self._losses_in_sum

    def _collectors(self) -> list[Collector]:
        """Return what gathers the outputs; nothing if only their shapes count, and are known."""
        count = self._num_outputs if self._like is None else 0
        return [Collector(self._batching) for _ in range(count)]

    def _results(self, collectors: Sequence[Collector]) -> list[torch.Tensor]:
        """Return what the call returns."""
        if self._returns_results:
            return [collector.result() for collector in collectors]
        if self._like is None:
            results = [collector.result() for collector in collectors]
            self._like = [torch.empty_like(result, device="meta") for result in results]
        return [torch.zeros(like.shape, dtype=like.dtype) for like in self._like]

    def _entered(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs, entered, unless nothing needs it."""
        if self.replicas.needs_context or self._update_needs_context:
            return self._context.enter()
        return nullcontext()
