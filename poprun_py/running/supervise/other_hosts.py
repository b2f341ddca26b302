"""Files and clock readings that are exchanged with the wrappers, mainly of other hosts.

A program on this host writes its files to their final place. A program on another host writes them
to a private folder there, and its wrapper sends them after the program has ended. With a timeline,
each other host is asked for its time when its program starts and when the program has ended.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import open_private
from popdist_py.environment import CALL, TIMELINE
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.job_description import JobFiles

if TYPE_CHECKING:
    from popdist_py.timeline.clocks import ClockSample

# The maximum size of a part of a file from another host, and the size of parts sent to one.
_MAX_PART_BYTES: Final = 1 << 20
_CALL_PART_BYTES: Final = 1 << 19
# How many times a host is asked for its time when its program starts, and again when the program
# has ended.
_NUM_QUESTIONS: Final = 8


class FileTransfer:
    """Exchanges files with the programs of one attempt.

    Args:
        files: The files of the job.
        others: The instances on other hosts.
    """

    def __init__(self, files: JobFiles, others: frozenset[int]) -> None:
        self._places = files.places  # their patterns do not overlap
        self._others = others
        self._call = files.call
        self._call_paths: dict[int, str] = {}
        self._received: dict[tuple[int, str], int] = defaultdict(int)

    def variables(self, instance: int) -> dict[str, str]:
        """Return the environment variables with the paths of an instance's input and output files.

        On another host, the wrapper chooses the paths of output files.
        """
        if instance in self._others:
            return {CALL: self._call_paths[instance]} if instance in self._call_paths else {}
        variables = {
            each.variable: each.value_start + _absolute(each.prefix(instance))
            for each in self._places
        }
        return variables if self._call is None else {**variables, CALL: _absolute(self._call)}

    @property
    def receivers(self) -> frozenset[int]:
        """The instances on other hosts, if there is a file that all programs read."""
        return self._others if self._call is not None else frozenset()

    def call_parts(self) -> Iterator[bytes]:
        """Yield the parts of the file that all programs read, and an empty part at the end.

        If the file cannot be read to its end, the program notices that its copy is incomplete.
        """
        if self._call is not None:
            with suppress(OSError), self._call.open("rb") as file:
                while part := file.read(_CALL_PART_BYTES):
                    yield part
        yield b""

    def on_call_stored(self, instance: int, path: str) -> None:
        """Note the path of the file that the program of an instance on another host reads."""
        self._call_paths[instance] = path

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return the settings for files that a wrapper gets before its program starts.

        A wrapper on another host chooses the path in each environment variable, so it gets only the
        text before the path. With a timeline, a wrapper on this host gets the path of the spans,
        and other wrappers get an empty path.
        """
        values: dict[str, Any] = {}
        is_other = instance in self._others
        if is_other and self._places:
            values["files"] = {each.variable: each.value_start for each in self._places}
        for each in self._places:
            if each.variable == TIMELINE:
                values["spans"] = "" if is_other else _absolute(each.prefix(instance))
        return values

    def take(self, instance: int, payload: bytes) -> None:
        """Append the part in a ``FILE`` frame to its file; drop files with unexpected names."""
        import zlib  # only needed for jobs on several hosts

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


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 (keeps symbolic links)


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
