"""Files that programs leave for their run, and their transfer from and to other hosts.

A program on this host writes its files to their final place. A program on another host writes them
to a private folder there, and its wrapper sends them after the program has ended.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from popdist_py.atomic_file import open_private
from popdist_py.environment import CALL, CALL_FILES, RUN_FILE_MIB, RUN_FILES, TIMELINE

# The maximum size of a part of a file from another host, and the size of parts sent to one.
_MAX_PART_BYTES: Final = 1 << 20
_CALL_PART_BYTES: Final = 1 << 19
# The limit for a timeline's files is this many times the size of the spans, because traces of
# torch.profiler are sent as well.
_MOST_SENT: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlace:
    """The folder for one kind of files, which are named ``instance-N.NAME``.

    Attributes:
        folder: The folder.
        variable: The environment variable that gives a program the path up to ``instance-N``.
        names: The pattern that NAME has to match.
        most_bytes: The maximum number of bytes that an instance on another host may send.
        value_start: The text before the path in the value of the variable.
    """

    folder: Path
    variable: str
    names: re.Pattern[str]
    most_bytes: int
    value_start: str = ""

    def prefix(self, instance: int) -> Path:
        """Return the beginning of the paths of an instance's files."""
        return self.folder / f"instance-{instance}"


def place_of_run(folder: Path) -> FilePlace:
    """Return the place for recorded values and device documents in the folder of an attempt."""
    names = re.compile(r"values\.jsonl|device\.json")
    most = 2 * RUN_FILE_MIB << 20  # two files
    return FilePlace(folder=folder, variable=RUN_FILES, names=names, most_bytes=most)


def place_of_spans(folder: Path, instance_bytes: int) -> FilePlace:
    """Return the place for a timeline's files, with ``instance_bytes`` of spans per instance."""
    return FilePlace(
        folder=folder,
        variable=TIMELINE,
        value_start=f"{instance_bytes}:",
        names=re.compile(r"\d+\.spans|ended|torch-\d+-\d+\.json"),
        most_bytes=_MOST_SENT * instance_bytes,
    )


def place_of_call(folder: Path, restart_count: int) -> FilePlace:
    """Return the place for the results of a function, in the folder of its call.

    The size of results is not limited.
    """
    return FilePlace(
        folder=folder / f"attempt-{restart_count}",
        variable=CALL_FILES,
        names=re.compile(r"result|failure"),
        most_bytes=sys.maxsize,
    )


class FileTransfer:
    """Exchanges files with the programs of one attempt.

    Args:
        places: The places for files from programs. Their patterns do not overlap.
        others: The instances on other hosts.
        call: A file that all programs read, which is sent to other hosts; None without one.
    """

    def __init__(
        self, places: Sequence[FilePlace], others: frozenset[int], call: Path | None = None
    ) -> None:
        self._places = tuple(places)
        self._others = others
        self._call = call
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
        """Append a part that a wrapper sent to its file; drop files with unexpected names.

        Args:
            instance: The instance of the wrapper.
            payload: The payload of a ``FILE`` frame.
        """
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
    """Return a path that stays valid if the program changes its working folder."""
    return os.path.abspath(path)  # noqa: PTH100 (keeps symbolic links)
