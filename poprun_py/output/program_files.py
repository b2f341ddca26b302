"""The files that programs leave for their run: where each instance's lie, and how others' arrive.

A program of this host writes them in their place. One of another host writes them into a private
folder there, and its wrapper sends them when it has ended. Nothing here reads what is in them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from popdist_py.environment import RUN_FILE_MIB, RUN_FILES, TIMELINE

__all__ = ["FilePlace", "ProgramFiles", "place_of_run", "place_of_spans"]

# A part of a file; a host sends no larger ones.
_MAX_PART_BYTES: Final = 1 << 20
# An instance may send so many times the bytes of its spans: torch.profiler's traces come too.
_MOST_SENT: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlace:
    """Where instances leave files of one sort, each as ``instance-N.NAME``.

    Attributes:
        folder: in which they are.
        variable: that tells a program the prefix of its own.
        told: what is before the prefix in its value.
        names: what NAME may be.
        most_bytes: that an instance of another host may send.
    """

    folder: Path
    variable: str
    names: re.Pattern[str]
    most_bytes: int
    told: str = ""

    def prefix(self, instance: int) -> Path:
        """Return what the paths of an instance's files begin with."""
        return self.folder / f"instance-{instance}"


def place_of_run(folder: Path) -> FilePlace:
    """Return the place of what programs leave in the folder of an attempt."""
    names = re.compile(r"values\.jsonl|device\.json")
    most = 2 * RUN_FILE_MIB << 20  # two files
    return FilePlace(folder=folder, variable=RUN_FILES, names=names, most_bytes=most)


def place_of_spans(folder: Path, instance_bytes: int) -> FilePlace:
    """Return the place of a timeline's files, of which an instance has so many bytes."""
    return FilePlace(
        folder=folder,
        variable=TIMELINE,
        told=f"{instance_bytes}:",
        names=re.compile(r"\d+\.spans|torch-\d+-\d+\.json"),
        most_bytes=_MOST_SENT * instance_bytes,
    )


class ProgramFiles:
    """The files of one attempt at a job.

    Args:
        places: where programs leave files; no two have the same names.
        others: the instances on other hosts.
    """

    def __init__(self, places: Sequence[FilePlace], others: frozenset[int]) -> None:
        self._places = tuple(places)
        self._others = others
        self._received: dict[tuple[int, str], int] = defaultdict(int)

    def variables(self, instance: int) -> dict[str, str]:
        """Return the variables that tell an instance of this host where it leaves files."""
        if instance in self._others:
            return {}
        # Absolute: a program may change its folder.
        return {
            each.variable: each.told + os.path.abspath(each.prefix(instance))  # noqa: PTH100 (links stay)
            for each in self._places
        }

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return what the wrapper of another host is told before its program starts."""
        if not self._places or instance not in self._others:
            return {}
        return {"files": {each.variable: each.told for each in self._places}}

    def take(self, instance: int, payload: bytes) -> None:
        """Add a part of a file to what came of it; what is none of the instance's is dropped.

        Args:
            instance: whose wrapper sent it.
            payload: of a ``protocol.FILE`` frame.
        """
        import zlib  # only jobs of several hosts need it

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
                _append(prefix.with_name(f"{prefix.name}.{name}"), part)


def _append(path: Path, part: bytes) -> None:
    """Add to a file that its owner alone can read.

    Raises:
        OSError: that is not possible.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(part)
