"""What a program can see of a compiled model: names, anchored tensors, times, cycles."""

from __future__ import annotations

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiler import Compiled
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.anchors import tensor_names
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["Observable"]


class Observable:
    """The part of a wrapper that only looks."""

    _compiled: Compiled | None
    _options: Options
    _template: Call
    _training: bool

    def _require_compiled(self) -> Compiled:
        if self._compiled is None:
            raise Error(
                "The model has not been compiled or has been destroyed: call it or compile() first"
            )
        return self._compiled

    def getTensorNames(self) -> list[str]:
        """Return the names of the tensors inside the compiled model.

        Raises:
            AssertionError: the model is not compiled.
        """
        assert self._compiled is not None, "The model must be compiled first"
        found, training = self._compiled.executable, self._compiled.program.training
        return tensor_names(
            len(self._template.leaves),
            [*self._compiled.state.parameters, *self._compiled.state.buffers],
            sorted(found.trace.used_parameters),
            [name for name, _ in found.placement.operations],
            settings=training.optimizer.parameter_tensors() if training else (),
            training=self._training,
        )

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the last call's value of a tensor named by Options.anchorTensor().

        Raises:
            AssertionError: an unknown name.
        """
        return self._require_compiled().program.anchors.get(short_name)

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Return the last call's times, in seconds: event -> [tensor][step]."""
        if self._compiled is None:
            return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}
        return self._compiled.program.counters.as_dict()

    def _latency(self, first: str, last: str) -> tuple[float, float, float]:
        if self._compiled is None:
            return (0.0, 0.0, 0.0)
        return self._compiled.program.counters.latency(first, last)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds that inputs took to the device."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds between input and output."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds that outputs took to the host."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds from the start of input to the end of output."""
        return self._latency("input", "output_complete")

    def cycleCount(self) -> int:
        """Return the emulated IPU cycles of the last call.

        Raises:
            Error: counting is off, or nothing ran yet.
        """
        if not self._options.counts_cycles:
            raise Error("Cycle counting is disabled: set Options.logCycleCount(True)")
        cycles = None if self._compiled is None else self._compiled.program.counters.cycles()
        if cycles is None:
            raise Error("No cycles were counted: run the model at least once")
        return cycles

    def _log_cycles(self) -> None:
        if self._options.counts_cycles:
            logger.debug("Total number of IPU cycles: %d", self.cycleCount())
