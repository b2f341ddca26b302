"""Methods of a model wrapper that report the model's schedule, memory and time on an IPU.

The class DeviceReports is a base class of ``PoplarExecutor``. The methods of DeviceReports do not
change, compile or run the model. The package ``popdist_py.ipu`` computes the reports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from popdist_py.ipu.reports import ExecutionPage, MemoryPage, execution_page, memory_page
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.ipu.schedule import Schedule, schedule
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.model import inspection
from popdist_py.poptorch.model.model_on_device import ModelOnDevice
from popdist_py.poptorch.model.user_frames import frames_folded
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model
from popdist_py.poptorch.on_ipu.poptorch_advice import in_poptorch_terms
from popdist_py.poptorch.on_ipu.run_from_options import run_from_options

__all__ = ["DeviceReports"]


class DeviceReports(ModelOnDevice):
    """Methods that report the schedule, memory and time of a model on an IPU.

    For a compiled model, the methods that return reports do not need arguments. For a model that is
    not compiled, the methods that return reports take example arguments of a call. For a model that
    is not compiled, the forward method runs on tensors that have shapes but no data. The options
    can name the type of IPU for the reports; the default type is the Mk2.
    """

    # -- Estimates of the schedule, the memory and the time on an IPU -------------------------

    def schedule(self, *args: Any, steps: int | None = None, **kwargs: Any) -> Schedule:
        """Return a table of the actions of a replica's IPUs in each step of a model call.

        Args:
            *args: Example positional arguments of a model call, if the model is not compiled.
            steps: The maximum number of schedule steps to return; None for all steps of the call.
            **kwargs: Example keyword arguments of a model call, if the model is not compiled.

        Raises:
            Error: The model's graph of operations is missing or cannot be made.
            ValueError: ``steps`` is negative or is not an integer.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        return schedule(run.placement, run.settings, steps=steps)

    def memoryReport(self, *args: Any, **kwargs: Any) -> MemoryPage:
        """Return a report about the memory use of every IPU of a replica.

        If the model does not fit into the memory of an IPU, the report contains advice on how to
        make the model fit.

        Args:
            *args: Example positional arguments of a model call, if the model is not compiled.
            **kwargs: Example keyword arguments of a model call, if the model is not compiled.

        Raises:
            Error: The model's graph of operations is missing or cannot be made.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        page = memory_page(run)
        if page.problem is None:
            return page
        return replace(page, problem=in_poptorch_terms(page.problem))

    def executionReport(self, *args: Any, **kwargs: Any) -> ExecutionPage:
        """Return a report about the time that a model call and its parts take on the device.

        Args:
            *args: Example positional arguments of a model call, if the model is not compiled.
            **kwargs: Example keyword arguments of a model call, if the model is not compiled.

        Raises:
            Error: The model's graph of operations is missing or cannot be made.
        """
        with frames_folded:
            run = self._run_on_ipu(args, kwargs)
        return execution_page(run)

    def _run_on_ipu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Return a ``Run``, which contains the model's graph and the settings for the reports."""
        optimizer = None if self._link is None else self._link.optimizer
        graph = self._model_graph(args, kwargs)
        return run_from_options(graph, self._options, optimizer, training=self._training)

    def _model_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelGraph:
        if args or kwargs:
            return graph_of_model(self._model, self._options, args, kwargs, training=self._training)
        if self._compiled is None:
            raise Error(
                "The model is not compiled, so the shapes of its inputs are unknown: pass "
                "arguments like those of a call, as in model.memoryReport(x), or compile the model "
                "first"
            )
        if self._compiled.executable.model_graph is None:
            raise Error(
                "The model was compiled without a graph of its forward pass: pass arguments like "
                'those of a call, as in model.memoryReport(x). Options.Emulator.memory("off") '
                "omits the graph, and some forward passes cannot be recorded in a graph"
            )
        return self._compiled.executable.model_graph

    # -- Times of the model's last call -------------------------------------------------------

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Return the times of the input and output transfers of the last call, in seconds.

        The keys of the returned dictionary are the events ``input``, ``input_complete``, ``output``
        and ``output_complete``. For each event, the dictionary contains one list per tensor, with
        the event's times in all micro-batches of the call. If ``Options.Emulator.device`` names a
        device, the times are computed for this device, and count from the beginning of the call.
        Without a named device, the times are measured on the host, with a clock that has an
        arbitrary starting point.
        """
        return inspection.perf_counters(self._compiled)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Return the minimum, maximum and mean time to transfer inputs to the device, in seconds.

        If ``Options.Emulator.device`` names a device, the transfer time is computed for this
        device. Without a named device, the transfer time is measured on the host.
        """
        return inspection.latency(self._compiled, "input", "input_complete")

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Return the minimum, maximum and mean time to compute a micro-batch, in seconds.

        The docstring of ``getHostIpuLatency`` explains whether the time is computed or measured.
        """
        return inspection.latency(self._compiled, "input_complete", "output")

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Return the minimum, maximum and mean time to transfer outputs to the host, in seconds.

        The docstring of ``getHostIpuLatency`` explains whether the time is computed or measured.
        """
        return inspection.latency(self._compiled, "output", "output_complete")

    def getLatency(self) -> tuple[float, float, float]:
        """Return the minimum, maximum and mean time of a micro-batch and its transfers, in seconds.

        The time of a micro-batch begins with the transfer of the inputs and ends after the transfer
        of the outputs. The docstring of ``getHostIpuLatency`` explains whether the time is computed
        or measured.
        """
        return inspection.latency(self._compiled, "input", "output_complete")

    def cycleCount(self) -> int:
        """Return the number of IPU cycles of the last call.

        If ``Options.Emulator.device`` names a device, the cycles are computed for this device.
        Without a named device, the time on the host is converted to cycles of a 1.85 GHz clock.

        Raises:
            Error: The options do not enable the counting of cycles, or the model has not run yet.
        """
        return inspection.cycle_count(self._compiled, self._options)
