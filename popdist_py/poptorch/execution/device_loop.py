"""The compiled model: what one call does, from input tensors to output tensors.

Knows the batching, the replicas, the reduction and the update; nothing of the life cycle, which is
``executor.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.poptorch import phase
from popdist_py.poptorch.calls.batching import Batching, Collector
from popdist_py.poptorch.execution.anchors import Anchors
from popdist_py.poptorch.execution.graph_replicas import GraphReplicas
from popdist_py.poptorch.execution.random_streams import RandomStreams, host_stream_kept
from popdist_py.poptorch.execution.replicas import Outputs, Replicas
from popdist_py.poptorch.execution.timings import Counters
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.update.half_accumulators import HalfAccumulators
from popdist_py.poptorch.update.loss_scaling import AutomaticLossScaling
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["Program", "Training"]


@dataclass(kw_only=True, slots=True)
class Training:
    """What a training model has beyond its forward.

    Attributes:
        optimizer: the update.
        gradients: the reduction over replicas and instances.
        gradient_scale: factor on every micro-batch's gradients, without the loss scaling:
            1 / (GA x all replicas) for a mean, 1 for a sum.
        accumulators: rounds gradients to half; None if they are not kept in half.
        automatic: adapts the loss scaling; None if it stays as the program sets it.
        rounding: random numbers of the update's rounding; None if it rounds to the nearest.
    """

    optimizer: DeviceOptimizer
    gradients: Gradients
    gradient_scale: float
    accumulators: HalfAccumulators | None = None
    automatic: AutomaticLossScaling | None = None
    rounding: RandomStreams | None = None

    @property
    def scale(self) -> float:
        """Factor on every micro-batch's gradients."""
        factor = 1.0 if self.automatic is None else self.automatic.factor
        return self.gradient_scale * self.optimizer.loss_scaling * factor

    def accumulated(self) -> None:
        """Note that all local replicas added the gradients of a micro-batch."""
        if self.accumulators is not None:
            self.accumulators.round()

    def update(self, step: int) -> None:
        """Reduce the window's gradients and update the parameters, after micro-batch ``step``."""
        if self.rounding is not None:
            self.rounding.seed_update(step)
        if self.automatic is not None:
            self.automatic.update()
            return
        self.gradients.finish()
        self.optimizer.step()


class Program:
    """Runs calls of one compiled model.

    Args:
        state: the device's tensors.
        batching: how a call's samples are cut and its results gathered.
        replicas: runs one micro-batch on each local replica.
        training: the update; None for inference.
        is_random: whether the model or its update draws random numbers.
        modes: makes the contexts that every call runs in.
        anchors: tensors inside the model that calls also return.
        counters: when micro-batches came and went.
    """

    def __init__(
        self,
        *,
        state: DeviceState,
        batching: Batching,
        replicas: Replicas,
        training: Training | None,
        is_random: bool,
        modes: Sequence[type[AbstractContextManager[Any]]],
        anchors: Anchors,
        counters: Counters,
    ) -> None:
        self.training = training
        self.counters = counters
        self.anchors = anchors
        self.steps_done = 0
        self._state = state
        self._batching = batching
        self._replicas = replicas
        self._is_random = is_random
        self._modes = modes
        self._is_graph = isinstance(replicas, GraphReplicas) and not (is_random or modes)
        self._phase = phase.Phase(training=training is not None, tracing=False)

    def run(self, inputs: Sequence[torch.Tensor], num_outputs: int) -> list[torch.Tensor]:
        """Run one call and return its ``num_outputs`` result tensors."""
        batching = self._batching
        steps = batching.num_steps
        slabs = [_split(tensor, steps) for tensor in inputs]
        collectors = [Collector(batching) for _ in range(num_outputs)]
        self.counters.begin()
        self.anchors.begin()
        with self._surroundings():
            for step in range(steps):
                self.counters.input(step)
                results = self._micro_batch([parts[step] for parts in slabs], step)
                self.counters.output(step)
                if batching.wanted(step):
                    for index, collector in enumerate(collectors):
                        collector.add(step, results[index])
        return [collector.result() for collector in collectors]

    def _surroundings(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs; a captured graph alone needs none."""
        if self._is_graph:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.training is not None))
        stack.enter_context(host_stream_kept(self._is_random))
        stack.enter_context(self._state.shown())
        stack.enter_context(phase.entered(self._phase))
        for mode in self._modes:
            stack.enter_context(mode())
        return stack

    def _micro_batch(self, slabs: Sequence[torch.Tensor], step: int) -> Outputs:
        """Run micro-batch ``step`` on every replica, and the update that ends its window."""
        number = self.steps_done
        self.steps_done += 1
        training = self.training
        if training is None:
            results = self._replicas.run(slabs, number, 1.0)
            self.anchors.after_step(step, slabs, results)
            return results
        accumulation = self._batching.gradient_accumulation
        if step % accumulation == 0:
            training.gradients.begin()
        scale = training.scale
        self.anchors.set_scale(scale)
        results = self._replicas.run(slabs, number, scale)
        training.accumulated()
        if (step + 1) % accumulation == 0:
            training.update(number)
        self.anchors.after_step(step, slabs, results)
        return results


def _split(tensor: torch.Tensor, steps: int) -> Sequence[torch.Tensor]:
    return (tensor,) if steps == 1 else tensor.split(tensor.shape[0] // steps)
