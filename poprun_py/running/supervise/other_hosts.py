"""Files and clock readings from other hosts.

A program on the launcher's host writes its files directly to the job's folders. A program on
another host writes its files to a private folder on that host. After the program has ended, its
wrapper sends the files to the launcher. In a job with a timeline, the launcher asks each other host
for the time on that host's clock, at the start and at the end of the program there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import open_private
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.job_description import FilePlace

if TYPE_CHECKING:
    from popdist_py.timeline.clocks import ClockSample

# The maximum uncompressed size, in bytes, of one part of a file that a wrapper sends.
_MAX_PART_BYTES: Final = 1 << 20
# How many times the launcher asks another host for the time when a program starts there. The
# launcher asks equally often when the program has ended.
_NUM_QUESTIONS: Final = 8


class ReceivedFiles:
    """Writes the files that the instances on other hosts (``others``) send to the launcher."""

    def __init__(self, places: Sequence[FilePlace], others: frozenset[int]) -> None:
        self._places = places
        self._others = others
        self._received: dict[tuple[int, str], int] = defaultdict(int)

    def take(self, instance: int, payload: bytes) -> None:
        """Append the data of a ``FILE`` frame to the file that it names, if that is expected."""
        import zlib  # imported here, because only jobs on several hosts need it

        encoded, _, packed = payload.partition(b"\0")
        name = encoded.decode(errors="replace")
        place = next((each for each in self._places if each.names.fullmatch(name)), None)
        if place is None or instance not in self._others:
            return
        with suppress(zlib.error, OSError):
            part = zlib.decompressobj().decompress(packed, _MAX_PART_BYTES)
            self._received[instance, place.variable] += len(part)
            if self._received[instance, place.variable] <= place.most_bytes:
                prefix = place.prefix(instance)
                path = prefix.with_name(f"{prefix.name}.{name}")
                with open_private(path, "ab") as file:
                    file.write(part)


class HostClocks:
    """Compares the clocks of the other hosts with the clock of the launcher's host.

    ``folder`` is the folder of the timeline's spans. Without a timeline, ``folder`` is None and no
    clocks are compared. ``others`` are the instances on other hosts.
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
        """If an instance is on another host, ask that host for the time on its clock."""
        if instance in self._others:
            self._questions[instance] = _NUM_QUESTIONS
            self._ask(instance)

    def take(self, instance: int, sent: int, answer: int) -> None:
        """Record the time in a host's answer; ask the host again if more answers are needed."""
        received = time.monotonic_ns()
        if self._folder is None or instance not in self._others:
            return
        # These modules are imported only by jobs with a timeline, so that other jobs start faster.
        from popdist_py.timeline.clocks import ClockSample
        from popdist_py.timeline.folder import clock_path, instance_prefix, save_clock

        samples = self._samples[instance]
        samples.append(ClockSample(sent, answer, received))
        self._questions[instance] -= 1
        if self._questions[instance] > 0:
            self._ask(instance)
        else:
            # The clock readings are saved at once, because the launcher may be killed later.
            with suppress(OSError):
                save_clock(clock_path(instance_prefix(self._folder, instance)), samples)

    def _ask(self, instance: int) -> None:
        self._send(instance, control_protocol.ASK_CLOCK, time.monotonic_ns())
