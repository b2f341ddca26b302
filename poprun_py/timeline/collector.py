"""What the supervisor does for the timeline of one attempt at a job.

It tells instances where to record, asks hosts for the time, and takes the files of other hosts.
Everything ends up in one folder, so that a trace can be made of it also when the launcher is gone.
Nothing here decides when it is called.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poprun_py.instance import protocol

if TYPE_CHECKING:
    from popdist_py.timeline.clocks import ClockSample

__all__ = ["Collector", "Recording"]

# So many times a host is asked for its time, when its program starts and when it has ended.
_NUM_QUESTIONS: Final = 8
# What an instance's files may be called after "instance-N.".
_FILE_NAME: Final = re.compile(r"(\d+\.spans|ended|torch-\d+-\d+\.json)")
# A part of a file; a host sends no larger ones.
_MAX_PART_BYTES: Final = 1 << 20
# An instance may send so many times the bytes of its spans: torch.profiler's traces come too.
_MOST_SENT: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Where and how much the instances of one attempt record.

    Attributes:
        folder: for their files.
        instance_bytes: the bytes of an instance's files of spans.
        others: the instances on other hosts.
    """

    folder: Path
    instance_bytes: int
    others: frozenset[int] = frozenset()


class Collector:
    """Takes part in one attempt at a job; without a recording it does nothing.

    Args:
        recording: where instances record; None if they do not.
        send: sends a frame to an instance.
    """

    def __init__(
        self, recording: Recording | None, send: Callable[[int, bytes, Any], None]
    ) -> None:
        self._recording = recording
        self._send = send
        self._clocks: dict[int, list[ClockSample]] = defaultdict(list)
        self._questions: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return what an instance is told before its program starts."""
        recording = self._recording
        if recording is None:
            return {}
        told: dict[str, Any] = {"bytes": recording.instance_bytes}
        if instance not in recording.others:
            told["prefix"] = str(_prefix(recording, instance))
        return {"timeline": told}

    def ask_time(self, instance: int) -> None:
        """Begin to ask the host of an instance for its time, if its clock is not ours."""
        if self._recording is not None and instance in self._recording.others:
            self._questions[instance] = _NUM_QUESTIONS
            self._ask(instance)

    def take_time(self, instance: int, sent: int, answer: int) -> None:
        """Take the answer to a question, and ask the next one."""
        received, recording = time.monotonic_ns(), self._recording
        if recording is None or instance not in recording.others:
            return
        from popdist_py.timeline.clocks import ClockSample
        from popdist_py.timeline.folder import clock_path, save_clock

        samples = self._clocks[instance]
        samples.append(ClockSample(sent, answer, received))
        self._questions[instance] -= 1
        if self._questions[instance] > 0:
            self._ask(instance)
        else:
            # Kept at once: the job may be lost later.
            with suppress(OSError):
                save_clock(clock_path(_prefix(recording, instance)), samples)

    def take_file(self, instance: int, payload: bytes) -> None:
        """Add a part of a file to what came of it; what is none of the instance's is dropped."""
        import zlib

        recording = self._recording
        encoded, _, packed = payload.partition(b"\0")
        name = encoded.decode(errors="replace")
        if recording is None or instance not in recording.others or not _FILE_NAME.fullmatch(name):
            return
        with suppress(zlib.error, OSError):
            part = zlib.decompressobj().decompress(packed, _MAX_PART_BYTES)
            self._received[instance] += len(part)
            if self._received[instance] <= _MOST_SENT * recording.instance_bytes:
                prefix = _prefix(recording, instance)
                with prefix.with_name(f"{prefix.name}.{name}").open("ab") as file:
                    file.write(part)

    def _ask(self, instance: int) -> None:
        self._send(instance, protocol.ASK_CLOCK, time.monotonic_ns())


def _prefix(recording: Recording, instance: int) -> Path:
    # Imported by jobs with a timeline alone: the launcher's start is to be short.
    from popdist_py.timeline.folder import instance_prefix

    return instance_prefix(recording.folder, instance)
