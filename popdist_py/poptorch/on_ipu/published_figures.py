"""The device model's figures that a compiled model publishes when it is compiled or called.

The figures become times of the counters, rows of the timeline, and a file in the run's folder. The
package ``popdist_py.ipu`` computes the figures. All functions do nothing without the input of the
device model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.runs.device_document import model_document
from popdist_py.ipu.runs.micro_batch_times import timeline
from popdist_py.ipu.runs.timeline_rows import ShownPiece, call_pieces
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.execution.call_times import CallTimes
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.run_files import device_file
from popdist_py.timeline import spans

__all__ = ["IpuRows", "keep_device_document", "modelled_times"]

# The timeline shows the first calls, and later the calls whose training step is a multiple of 8.
# When a timeline file is full, the spans of these steps are kept longer than other spans.
_FIRST_CALLS: Final = 8
_EVERY: Final = 8


def modelled_times(run: Run | None, options: Options) -> Callable[[], CallTimes] | None:
    """Return a function that computes the modelled times of a call.

    The function returns None if the options do not name a device, or without the input of the
    device model. Then the times are measured with the host's clock.

    Args:
        run: The input of the device model, or None if the model's graph is not known.
        options: The options of the PopTorch model. The times are modelled if the options name a
            device.
    """
    if options.Emulator.device_named is None:
        return None
    speaks = options.Distributed.processId == 0
    if run is None:
        if speaks:
            logger.info("Cycles and latencies are this machine's: the model's graph is not known")
        return None
    return partial(_times, run, speaks=speaks)


def _times(run: Run, *, speaks: bool) -> CallTimes:
    if speaks:
        name = run.ipu.name.capitalize()
        logger.info(
            "Cycles and latencies are those of the model of an %s, not of this machine", name
        )
    made = timeline(run)
    events = ("input", "input_complete", "output", "output_complete")
    return CallTimes(
        {event: [getattr(passage, event) for passage in made.passages] for event in events},
        made.cycles,
    )


def keep_device_document(run: Run | None, options: Options, name: str) -> None:
    """Write the description of a compiled model to the run's folder.

    Only instance 0 writes the description. An error while writing is logged and not raised.

    Args:
        run: The input of the device model. Without this input, the function does nothing.
        options: The options of the PopTorch model.
        name: The name of the user's module.
    """
    if run is None or options.Distributed.processId != 0 or not device_file.is_wanted():
        return
    try:
        is_named = options.Emulator.device_named is not None
        device_file.keep_model(model_document(run, name, is_named=is_named))
    except Exception:  # The program can continue without the description.
        logger.debug("The run's folder has nothing of the model on the device", exc_info=True)


class IpuRows:
    """Writes the calls of one compiled model to the timeline.

    Args:
        run: The input of the device model, which computes the activities at the first call.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls = 0
        self._pieces: tuple[ShownPiece, ...] | None = None

    @classmethod
    def of(cls, run: Run | None, options: Options) -> IpuRows | None:
        """Return an object that writes a run's calls to the timeline.

        The function returns None without a named device or the input of the device model.
        """
        return None if run is None or options.Emulator.device_named is None else cls(run)

    def draw(self, begin: int, end: int, step: int | None) -> None:
        """Write a call to the timeline, if a timeline is recorded.

        Only the first calls are written, and later the calls whose training step is a multiple of
        8.

        Args:
            begin: The start of the call, in nanoseconds of the monotonic clock.
            end: The end of the call, in nanoseconds of the monotonic clock.
            step: The number of training steps after this call, or None for inference.
        """
        if not spans.is_recording():
            return
        self._calls += 1
        if self._calls > _FIRST_CALLS and (self._calls if step is None else step) % _EVERY:
            return
        if self._pieces is None:
            self._pieces = self._laid_out()
        length = end - begin
        for piece in self._pieces:
            first, last = begin + int(piece.begin * length), begin + int(piece.end * length)
            spans.add(piece.row, piece.name, first, last, piece.arguments)

    def _laid_out(self) -> tuple[ShownPiece, ...]:
        try:
            return _pieces(self._run)
        except Exception:  # The program can continue without these rows.
            logger.debug("The timeline has no rows of the IPUs", exc_info=True)
            return ()


def _pieces(run: Run) -> tuple[ShownPiece, ...]:
    _, window = cycles_and_window(run.graph, run.placement, run.settings, run.ipu, run.model)
    return call_pieces(window)
