"""The times of a call on the device that is named, as its model has them.

Nothing here computes them, or measures any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from popdist_py.ipu.timeline import timeline
from popdist_py.ipu.what_if import Run
from popdist_py.poptorch.execution.timings import CallTimes
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["modelled_times"]


def modelled_times(run: Run | None, options: Options) -> Callable[[], CallTimes] | None:
    """Return what tells the times of each call of a run; None where the host's count.

    Args:
        run: what the model of the device is asked about; None if it cannot be.
        options: of the run: its times are modelled where they name a device.
    """
    if options.Emulator.device_named is None:
        return None
    speaks = options.Distributed.processId == 0
    if run is None:
        if speaks:
            logger.info("Cycles and latencies are this machine's: the model was not captured")
        return None
    return partial(_times, run, speaks=speaks)


def _times(run: Run, *, speaks: bool) -> CallTimes:
    if speaks:
        name = run.ipu.name.capitalize()
        logger.info(
            "Cycles and latencies are those of the model of an %s, not of this machine", name
        )
    made = timeline(run.graph, run.placement, run.settings, run.ipu, run.model)
    events = ("input", "input_complete", "output", "output_complete")
    return CallTimes(
        {event: [getattr(passage, event) for passage in made.passages] for event in events},
        made.cycles,
    )
