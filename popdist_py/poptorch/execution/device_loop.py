"""The class Program, which runs the micro-batches of a call and the weight updates between them.

The module ``update/training.py`` computes the weight updates. The module
``model/model_on_device.py`` compiles, attaches and detaches models.
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
from popdist_py.poptorch.execution.call_times import Counters
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.replicas import Replicas
from popdist_py.poptorch.update.training import NoUpdate, Training
from popdist_py.timeline import spans

__all__ = ["Program"]


class Program:
    """The loop over the micro-batches of each call of a compiled model.

    Args:
        batching: The numbers that determine how a call's samples are divided into micro-batches.
        replicas: The replica back end, which runs one micro-batch on each local replica.
            ``Program`` stores the back end as the attribute ``replicas``.
        back_end: The name of the replica back end, which ``Program`` stores as the attribute
            ``back_end``.
        training: The object that updates the weights; None for inference.
        context: The context managers inside which the model and its weight update run.
        num_outputs: The number of result tensors of a call.
        returns_results: Whether a call returns the model's results. With False, a call returns
            zeros in the shapes of the results.
        loss_output: The index of the output that is the loss; None if no output is the loss.
        anchors: The anchored tensors of the model, whose values a program can read.
        counters: The recorder of the times of each micro-batch.

    Attributes:
        replicas: The replica back end, which runs one micro-batch on each local replica.
        back_end: The name of the replica back end.
        steps_done: The number of micro-batches that have run in all calls so far.
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
        # Entering the device context takes a large part of a small model's call time. Therefore the
        # context is entered only if the replicas or the weight update need it.
        self._update_needs_context = bool(context.is_random or context.modes)
        self._num_outputs = num_outputs
        self._returns_results = returns_results
        self._loss_output = loss_output if returns_results else None
        is_sum = batching.output_mode == enums.OutputMode.Sum
        self._losses_in_sum = batching.num_steps if is_sum else 1
        # The shapes and dtypes of the model's results, if calls return zeros; None before the first
        # call.
        self._like: list[torch.Tensor] | None = None

    def run(
        self,
        call: Call,
        leaves: Sequence[torch.Tensor],
        after_update: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Run one call of the model, and return the result tensors.

        Args:
            call: The arguments of the call.
            leaves: The input tensors of the call on the device.
            after_update: A function that is called after each weight update.
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
                        # The weight update must run before anchored tensors are collected, because
                        # anchored weights must have their new values.
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
        """Return the mean loss of a call.

        Args:
            results: The result tensors of the call.

        Returns:
            The mean over all losses in the results; None if the results do not contain the loss.
        """
        if self._loss_output is None:
            return None
        loss = results[self._loss_output]
        mean = loss if loss.numel() == 1 else loss.mean(dtype=torch.float64)
        return mean.item() / self._losses_in_sum

    def _collectors(self) -> list[Collector]:
        """Return one collector of micro-batch results for each output tensor.

        The list of collectors is empty if calls return zeros and the shapes of the zeros are
        already stored.
        """
        count = self._num_outputs if self._like is None else 0
        return [Collector(self._batching) for _ in range(count)]

    def _results(self, collectors: Sequence[Collector]) -> list[torch.Tensor]:
        """Return the collected results; zeros if the option is set that calls return only zeros."""
        if self._returns_results:
            return [collector.result() for collector in collectors]
        if self._like is None:
            results = [collector.result() for collector in collectors]
            self._like = [torch.empty_like(result, device="meta") for result in results]
        return [torch.zeros(like.shape, dtype=like.dtype) for like in self._like]

    def _entered(self) -> AbstractContextManager[Any]:
        """Enter and return the device context, if the replicas or the weight update need it."""
        if self.replicas.needs_context or self._update_needs_context:
            return self._context.enter()
        return nullcontext()
