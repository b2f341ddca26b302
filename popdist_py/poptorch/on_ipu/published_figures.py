"""Estimated figures of a model on IPUs, published when the model is compiled or called.

PopTorch's performance counters show the estimated times. The timeline shows the estimated
activities of IPUs. A file in the run's folder contains the estimated memory, schedule and time of
the model. The package ``popdist_py.ipu`` computes the estimates. If the graph of the model's
operations is not known, the functions of the module ``published_figures`` do nothing.
"""

from __future__ import annotations

from array import array
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

# The timeline shows the first calls of a model, and later the calls whose training step number is a
# multiple of 8. When a timeline file is full, the spans of training steps whose numbers are
# multiples of 8 are kept longer than other spans.
_FIRST_CALLS: Final = 8
_EVERY: Final = 8


def modelled_times(run: Run | None, options: Options) -> Callable[[], CallTimes] | None:
    """Return a function that computes the estimated times of one call of a model on IPUs.

    None is returned if the options do not name a type of IPU, or if the graph of the model's
    operations is not known. If ``modelled_times`` returns None, its caller measures the times with
    the host's clock.

    Args:
        run: The model's graph with the options of the run, or None if the graph is not known.
        options: The options of the PopTorch model, which may name a type of IPU.
    """
    if options.Emulator.device_named is None:
        return None
    speaks = options.Distributed.processId == 0
    if run is None:
        if speaks:
            logger.info(
                "Cycles and latencies are measured on this machine, because the operations of "
                "the model's forward could not be recorded"
            )
        return None
    return partial(_times, run, speaks=speaks)


def _times(run: Run, *, speaks: bool) -> CallTimes:
    if speaks:
        name = run.ipu.name.capitalize()
        logger.info(
            "Cycles and latencies are estimates for %s IPUs, not measurements of this machine", name
        )
    made = timeline(run)
    # An array of numbers needs a third of the memory of a list, and calls may have very many
    # micro-batches.
    times = {
        event: array("d") for event in ("input", "input_complete", "output", "output_complete")
    }
    for passage in made.passages:
        for event, values in times.items():
            values.append(getattr(passage, event))
    return CallTimes(times, made.cycles)


def keep_device_document(run: Run | None, options: Options, name: str) -> None:
    """Write a compiled model's estimated memory, schedule and time to the run's folder.

    In a distributed job, only instance 0 writes the file. An error while writing the file is logged
    and not raised.

    Args:
        run: The model's graph with the options of the run. If ``run`` is None, the function does
            nothing.
        options: The options of the PopTorch model.
        name: The name of the user's ``torch.nn.Module``.
    """
    if run is None or options.Distributed.processId != 0 or not device_file.is_wanted():
        return
    try:
        is_named = options.Emulator.device_named is not None
        device_file.keep_model(model_document(run, name, is_named=is_named))
    except Exception:  # The user's program can continue without the file of estimated figures.
        logger.debug(
            "The model's estimated figures were not written to the run's folder", exc_info=True
        )


class IpuRows:
    """Writes rows with the IPUs' activities in each call of a compiled model to the timeline.

    Args:
        run: The model's graph with the options of the run. The activities of the IPUs are computed
            from ``run`` at the first call.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls = 0
        self._pieces: tuple[ShownPiece, ...] | None = None

    @classmethod
    def of(cls, run: Run | None, options: Options) -> IpuRows | None:
        """Return an ``IpuRows``, which writes a model's calls to the timeline, or None.

        None is returned if the options do not name a type of IPU, or if the graph of the model's
        operations is not known.
        """
        return None if run is None or options.Emulator.device_named is None else cls(run)

    def draw(self, begin: int, end: int, step: int | None) -> None:
        """Write the IPUs' activities in one call to the timeline, if a timeline is recorded.

        Only the first 8 calls of the model are written, and later the calls whose training step
        number is a multiple of 8.

        Args:
            begin: The start of the call of the model, in nanoseconds of the monotonic clock.
            end: The end of the call of the model, in nanoseconds of the monotonic clock.
            step: The number of training steps that are done after this call, or None for inference.
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
        except Exception:  # The rows of IPUs in a timeline are optional.
            logger.debug(
                "The timeline has no rows for the IPUs, because their activities could not be "
                "estimated",
                exc_info=True,
            )
            return ()


def _pieces(run: Run) -> tuple[ShownPiece, ...]:
    _, window = cycles_and_window(run.graph, run.placement, run.settings, run.ipu, run.model)
    return call_pieces(window)
