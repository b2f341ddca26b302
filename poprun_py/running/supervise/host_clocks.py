"""The clocks of other hosts, for the timeline of one attempt at a job.

Each host is asked for its time when its program starts and when the program has ended. The answers
are written to the folder of the spans, so that a trace can be made even if the launcher is killed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poprun_py.instance import control_protocol

if TYPE_CHECKING:
    from popdist_py.timeline.clocks import ClockSample

# How many times a host is asked for its time when its program starts, and again when the program
# has ended.
_NUM_QUESTIONS: Final = 8


class HostClocks:
    """Compares the clocks of other hosts with this host's clock, if there is a timeline.

    Args:
        folder: The folder of the spans; None without a timeline.
        others: The instances on other hosts.
        send: Sends a frame to an instance.
    """

    def __init__(
        self,
        folder: Path | None,
        others: frozenset[int],
        send: Callable[[int, bytes, Any], None],
    ) -> None:
        self._folder = folder
        self._others = others if folder is not None else frozenset()
        self._send = send
        self._samples: dict[int, list[ClockSample]] = defaultdict(list)
        self._questions: dict[int, int] = defaultdict(int)

    def ask(self, instance: int) -> None:
        """Begin to ask the host of an instance for its time, if it is another host."""
        if instance in self._others:
            self._questions[instance] = _NUM_QUESTIONS
            self._ask(instance)

    def take(self, instance: int, sent: int, answer: int) -> None:
        """Record the time that a host has answered, and ask it again if more answers are needed."""
        received = time.monotonic_ns()
        if self._folder is None or instance not in self._others:
            return
        # Imported only by jobs with a timeline, so that other jobs start faster.
        from popdist_py.timeline.clocks import ClockSample
        from popdist_py.timeline.folder import clock_path, instance_prefix, save_clock

        samples = self._samples[instance]
        samples.append(ClockSample(sent, answer, received))
        self._questions[instance] -= 1
        if self._questions[instance] > 0:
            self._ask(instance)
        else:
            # The answers are written at once, because the launcher may be killed later.
            with suppress(OSError):
                save_clock(clock_path(instance_prefix(self._folder, instance)), samples)

    def _ask(self, instance: int) -> None:
        self._send(instance, control_protocol.ASK_CLOCK, time.monotonic_ns())
