"""The files that programs leave for their run: where each instance's lie, and how others' arrive.

A program of this host writes them in their place. One of another host writes them into a private
folder there, and its wrapper sends them when it has ended. Nothing here reads what is in them.
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

from popdist_py.environment import CALL, CALL_FILES, RUN_FILE_MIB, RUN_FILES, TIMELINE

# A part of a file; a host sends no larger ones.
_MAX_PART_BYTES: Final = 1 << 20
_GIVEN_PART_BYTES: Final = 1 << 19
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
        names=re.compile(r"\d+\.spans|ended|torch-\d+-\d+\.json"),
        most_bytes=_MOST_SENT * instance_bytes,
    )


def place_of_call(folder: Path, restart_count: int) -> FilePlace:
    """Return the place of what a function has returned, in the folder of its call.

    It may be as large as the memory of an instance.
    """
    return FilePlace(
        folder=folder / f"attempt-{restart_count}",
        variable=CALL_FILES,
        names=re.compile(r"result|failure"),
        most_bytes=sys.maxsize,
    )


class FileTransfer:
    """The files of one attempt at a job.

    Args:
        places: where programs leave files; no two have the same names.
        others: the instances on other hosts.
        call: the file that all programs read; other hosts are sent it.
    """

    def __init__(
        self, places: Sequence[FilePlace], others: frozenset[int], call: Path | None = None
    ) -> None:
        self._places = tuple(places)
        self._others = others
        self._call = call
        self._given: dict[int, str] = {}
        self._received: dict[tuple[int, str], int] = defaultdict(int)

    def variables(self, instance: int) -> dict[str, str]:
        """Return the variables that tell an instance what it reads and where it leaves files.

        On another host, its wrapper says where it leaves them.
        """
        if instance in self._others:
            return {CALL: self._given[instance]} if instance in self._given else {}
        told = {
            each.variable: each.told + _absolute(each.prefix(instance)) for each in self._places
        }
        return {**told, CALL: _absolute(self._call)} if self._call is not None else told

    @property
    def receivers(self) -> frozenset[int]:
        """The instances that are sent what all programs read."""
        return self._others if self._call is not None else frozenset()

    def given_parts(self) -> Iterator[bytes]:
        """Return the file that programs read in parts, and its end, which is empty.

        The program sees when the file was not whole.
        """
        if self._call is not None:
            with suppress(OSError), self._call.open("rb") as file:
                while part := file.read(_GIVEN_PART_BYTES):
                    yield part
        yield b""

    def given(self, instance: int, path: str) -> None:
        """Take note of where another host keeps the file that its program reads."""
        self._given[instance] = path

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return what the wrapper is told before its program starts.

        Another host's: what the values of the variables begin with. With a timeline, where the
        spans are, empty if that is decided there.
        """
        told: dict[str, Any] = {}
        is_other = instance in self._others
        if is_other and self._places:
            told["files"] = {each.variable: each.told for each in self._places}
        for each in self._places:
            if each.variable == TIMELINE:
                told["spans"] = "" if is_other else _absolute(each.prefix(instance))
        return told

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


def _absolute(path: Path) -> str:
    """Return a path that stays right where the program changes its folder."""
    return os.path.abspath(path)  # noqa: PTH100 (links stay)


def _append(path: Path, part: bytes) -> None:
    """Add to a file that its owner alone can read.

    Raises:
        OSError: that is not possible.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(part)
