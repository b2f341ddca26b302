"""What a wrapper tells of its model on the device: schedule, memory, time, and counters of calls.

The part of ``PoplarExecutor`` that asks and changes nothing; the answers are computed elsewhere.
Nothing here compiles or runs a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from popdist_py.ipu.reports import ExecutionPage, MemoryPage, execution_page, memory_page
from popdist_py.ipu.schedule import Schedule, schedule
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.compilation.compiler import Compiled
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.model import inspection
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.model.user_frames import frames_folded
from popdist_py.poptorch.on_ipu.capture import capture
from popdist_py.poptorch.on_ipu.captured import Captured
from popdist_py.poptorch.on_ipu.run_of import run_of
from popdist_py.poptorch.on_ipu.spelled_advice import spelled
from popdist_py.poptorch.options.options import Options

__all__ = ["DeviceReports"]


class DeviceReports:
    """Questions about a model on its device; a compiled one needs no arguments.

    Before it is compiled, the model is asked about arguments like those of a call, and nothing of
    it runs. The device is the one that the options name, else an Mk2.
    """

    _model: nn.Module
    _options: Options
    _training: bool
    _compiled: Compiled | None
    _link: OptimizerLink | None

    # -- of the device's model ----------------------------------------------------------------

    def schedule(self, *args: Any, steps: int | None = None, **kwargs: Any) -> Schedule:
        """Return what every IPU of a replica does in each step of a call.

        Args:
            *args: of a call; only for a model that is not compiled.
            steps: how many to return at most; None for all.
            **kwargs: of a call likewise.

        Raises:
            Error: there is no graph of the model.
            ValueError: steps is negative or no whole number.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        return schedule(run.placement, run.settings, steps=steps)

    def memoryReport(self, *args: Any, **kwargs: Any) -> MemoryPage:
        """Return what every IPU of a replica holds, and what would help if that is too much.

        Args:
            *args: of a call; only for a model that is not compiled.
            **kwargs: of a call likewise.

        Raises:
            Error: there is no graph of the model.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        page = memory_page(run)
        return page if page.problem is None else replace(page, problem=spelled(page.problem))

    def executionReport(self, *args: Any, **kwargs: Any) -> ExecutionPage:
        """Return what a call takes on the device, and what it takes the time for.

        Args:
            *args: of a call; only for a model that is not compiled.
            **kwargs: of a call likewise.

        Raises:
            Error: there is no graph of the model.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        return execution_page(run)

    def _run_on_ipu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Return what the model of the device is asked about."""
        optimizer = None if self._link is None else self._link.optimizer
        captured = self._captured(args, kwargs)
        return run_of(captured, self._options, optimizer, training=self._training)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        if args or kwargs:
            return capture(self._model, self._options, args, kwargs, training=self._training)
        if self._compiled is None:
            raise Error(
                "The model is not compiled, so its sizes are not known: give arguments like those "
                "of a call, as in model.memoryReport(x), or compile it first"
            )
        if self._compiled.executable.captured is None:
            raise Error(
                "This model was compiled without a graph of its forward: give arguments like those "
                'of a call, as in model.memoryReport(x); Options.Emulator.memory("off") leaves the '
                "graph out, and so does a forward that cannot be captured"
            )
        return self._compiled.executable.captured

    # -- of the last call ---------------------------------------------------------------------

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Return the last call's times, in seconds: event -> [tensor][step].

        They count from the call's beginning and are those of the device's model where a device is
        named (``Options.Emulator.device``); else they are the host's, of an arbitrary clock.
        """
        return inspection.perf_counters(self._compiled)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds that inputs took to the device.

        Like all latencies they are the device's model's where a device is named, else the host's.
        """
        return inspection.latency(self._compiled, "input", "input_complete")

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds between input and output."""
        return inspection.latency(self._compiled, "input_complete", "output")

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds that outputs took to the host."""
        return inspection.latency(self._compiled, "output", "output_complete")

    def getLatency(self) -> tuple[float, float, float]:
        """Return minimum, maximum and mean seconds from the start of input to the end of output."""
        return inspection.latency(self._compiled, "input", "output_complete")

    def cycleCount(self) -> int:
        """Return the IPU cycles of the last call.

        They are the device's model's where a device is named (``Options.Emulator.device``), else
        the host's time in cycles of 1.85 GHz.

        Raises:
            Error: counting is off, or nothing ran yet.
        """
        return inspection.cycle_count(self._compiled, self._options)
