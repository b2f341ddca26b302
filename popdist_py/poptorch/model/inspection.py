"""Functions that return the tensor names, the times and the cycles of a compiled model.

Some functions in ``inspection`` accept None for a model that is not compiled. The functions in
``inspection`` do not change the model.
"""

from __future__ import annotations

from popdist_py.poptorch.compilation.compiled_model import Compiled
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution import anchors
from popdist_py.poptorch.options.options import Options

__all__ = ["cycle_count", "latency", "perf_counters", "tensor_names"]

_EVENTS = ("input", "input_complete", "output", "output_complete")


def tensor_names(compiled: Compiled, num_inputs: int) -> list[str]:
    """Return the names of all tensors of a model with ``num_inputs`` input tensors."""
    executable, training = compiled.executable, compiled.program.training
    return anchors.tensor_names(
        num_inputs,
        [*compiled.state.parameters, *compiled.state.buffers],
        sorted(executable.first_forward.used_parameters),
        [name for name, _ in executable.first_forward.placement.operations],
        settings=training.optimizer.parameter_tensors() if training else (),
        training=training is not None,
    )


def perf_counters(compiled: Compiled | None) -> dict[str, list[list[float]]]:
    """Return the times of the last call's transfers (see ``DeviceReports.getPerfCounters``)."""
    if compiled is None:
        return {event: [[]] for event in _EVENTS}
    return compiled.program.counters.as_dict()


def latency(compiled: Compiled | None, first: str, last: str) -> tuple[float, float, float]:
    """Return the minimum, maximum and mean time between two events of the last call, in seconds."""
    if compiled is None:
        return (0.0, 0.0, 0.0)
    return compiled.program.counters.latency(first, last)


def cycle_count(compiled: Compiled | None, options: Options) -> int:
    """Return the number of emulated IPU cycles of the last call.

    Raises:
        Error: The options do not enable the counting of cycles, or the model has not run yet.
    """
    if not options.counts_cycles:
        raise Error("Cycle counting is disabled: set Options.logCycleCount(True)")
    cycles = None if compiled is None else compiled.program.counters.cycles()
    if cycles is None:
        raise Error("No cycles of the IPU were counted: run the model at least once")
    return cycles
