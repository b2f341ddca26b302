"""The estimated times of the micro-batches in one call of a model on IPUs.

The times are computed from the schedule between two weight updates. All weight updates of a call
have the same schedule. The module ``micro_batch_times`` only estimates times, and does not measure
times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from popdist_py.ipu.accumulation_window import Window
from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.searches import Run

__all__ = ["Passage", "Passages", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class Passage:
    """The times of one micro-batch, in seconds after the beginning of the call of the model.

    Attributes:
        input: The time when the transfer of the inputs from the host begins.
        input_complete: The time when all inputs of the micro-batch are on the IPUs.
        output: The time when the forward pass of the micro-batch ends.
        output_complete: The time when the results of the micro-batch would be on the host.
            PopTorch's output mode (which micro-batches' outputs a call returns) decides whether the
            host receives the results of a micro-batch.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


@dataclass(frozen=True, slots=True)
class Passages(Sequence[Passage]):
    """The times of all micro-batches in one call of a model.

    A ``Passage`` is computed when a reader asks for it, so that a call with a billion micro-batches
    needs no more memory than a call with one micro-batch.

    Attributes:
        window: The work of all IPUs from one weight update to the next.
        first_begins: A function that returns the start of the first stage for a micro-batch of the
            window.
        last_begins: A function that returns the start of the last stage for a micro-batch of the
            window.
        receive: The clock cycles for the transfer of a micro-batch's inputs from the host.
        compute: The clock cycles of the forward pass of the last stage.
        send: The clock cycles for the transfer of a micro-batch's results to the host.
        clock: The number of clock cycles per second.
        overlaps_io: Whether I/O tiles load the inputs while the other tiles compute.
    """

    window: Window
    first_begins: Callable[[int], float]
    last_begins: Callable[[int], float]
    receive: float
    compute: float
    send: float
    clock: float
    overlaps_io: bool

    def __len__(self) -> int:
        return self.window.count * self.window.schedule.micro_batches

    @overload
    def __getitem__(self, index: int) -> Passage: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Passage, ...]: ...

    def __getitem__(self, index: int | slice) -> Passage | tuple[Passage, ...]:
        numbers = range(len(self))[index]
        return self._passage(numbers) if isinstance(numbers, int) else tuple(self._some(numbers))

    def __iter__(self) -> Iterator[Passage]:
        return self._some(range(len(self)))

    def _some(self, numbers: Iterable[int]) -> Iterator[Passage]:
        return map(self._passage, numbers)

    def _passage(self, index: int) -> Passage:
        number, micro_batch = divmod(index, self.window.schedule.micro_batches)
        begin_of_last = number * self.window.cycles + self.last_begins(micro_batch + 1)
        # With overlapped I/O, the I/O tiles load a micro-batch while the other tiles compute the
        # previous micro-batch.
        begin = self._entered(index - 1 if self.overlaps_io else index)
        arrived = begin + self.receive
        # If the model has one stage, the same forward pass receives the inputs and computes the
        # results. The forward pass of a model cannot end before its inputs have arrived.
        done = max(arrived, begin_of_last) + self.compute
        times = (begin, arrived, done, done + self.send)
        return Passage(*(time / self.clock for time in times))

    def _entered(self, index: int) -> float:
        """Return the start of the first stage for a micro-batch; 0 if there is no micro-batch."""
        number, micro_batch = divmod(index, self.window.schedule.micro_batches)
        if index < 0:
            return 0.0
        return number * self.window.cycles + self.first_begins(micro_batch + 1)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The estimated times of one call of a model.

    Attributes:
        passages: The times of each micro-batch of a replica as ``Passage`` objects, in execution
            order.
        cycles: The clock cycles of the whole call of the model.
    """

    passages: Sequence[Passage]
    cycles: int


def timeline(run: Run) -> Timeline:
    """Return the estimated times of each micro-batch in one call of a model.

    The length of a pipeline cycle is proportional to the work of the slowest IPU in the cycle.
    """
    placement, settings, ipu = run.placement, run.settings, run.ipu
    report, window = cycles_and_window(run.graph, placement, settings, ipu, run.model)
    sent = sum(run.graph.bytes_of(name) for name in run.graph.outputs)
    sending = sent / run.model.host_bandwidth + run.model.host_sync_seconds
    last = report.stages[-1]
    passages = Passages(
        window=window,
        first_begins=window.forward_begins(0),
        last_begins=window.forward_begins(placement.num_stages - 1),
        receive=sum(stage.receive for stage in report.stages),
        compute=last.offload + last.forward,
        send=0.0 if settings.synthetic_data else ipu.clock * sending,
        clock=ipu.clock,
        overlaps_io=settings.overlaps_io,
    )
    return Timeline(passages, report.total)
