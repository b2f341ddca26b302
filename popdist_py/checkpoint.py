"""Checkpoint files that are whole or not there: bytes in, bytes out.

What the bytes mean is the caller's matter (``popdist_py.poptorch.checkpoint`` puts a training in
them). Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from popdist_py import activities
from popdist_py.atomic_file import PARTIAL_SUFFIX, replaced_at_end

__all__ = ["Checkpoint", "Checkpoints"]

_MAGIC = b"popdist checkpoint 1\n"
_NAME = re.compile(r"step-(\d{12,})\.checkpoint")
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved after a number of steps."""

    step: int
    data: bytes


class Checkpoints:
    """The checkpoints in one folder, the last ``keep`` of them.

    A file appears under its name only when all of it is on the disk, and carries a checksum: one
    that was cut short or damaged is never loaded. One process writes; any number may read.

    Args:
        folder: where the files are; made when the first one is saved.
        keep: how many are kept, at least 1.

    Raises:
        TypeError: ``keep`` is no whole number.
        ValueError: ``keep`` is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        keep = _whole_number("keep", keep)
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint has to be kept")
        self.folder = Path(folder)
        self._keep = keep

    def save(self, step: int, data: bytes) -> Path:
        """Write the checkpoint of ``step``, then remove older ones, so that ``keep`` are left.

        A checkpoint of the same step is replaced. Those of later steps, such as damaged ones that
        ``latest()`` skipped, are neither counted nor removed.

        Raises:
            TypeError: ``step`` is no whole number.
            ValueError: ``step`` is negative.
            OSError: the folder or file cannot be written; older checkpoints are as they were.
        """
        # The file name of 1.0 or True would not match the pattern that latest() looks for.
        step = _whole_number("step", step)
        if step < 0:
            raise ValueError(f"step={step}: the number of steps done is expected")
        with activities.doing(activities.SAVING, "save"):
            return self._write(step, data)

    def _write(self, step: int, data: bytes) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_partial()
        path = self.folder / f"step-{step:012}.checkpoint"
        try:
            with replaced_at_end(path) as partial, partial.open("wb") as file:
                file.write(_MAGIC + _digest(step, data) + data)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{partial} vanished while it was written: another job saves to {self.folder}; "
                "give each job a folder of its own"
            ) from None
        except OSError as error:
            if error.filename is None:  # a full disk is noticed where there is no name
                error.filename = str(path)
            raise
        self._sync_folder()
        up_to_step = [path for saved_step, path in self._files() if saved_step <= step]
        for old_path in up_to_step[self._keep :]:
            _remove(old_path)
        return path

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None if there is none.

        Raises:
            PermissionError: there is one that this user must not read.
        """
        with activities.doing(activities.SAVING, "load"):
            return next(self.newest_first(), None)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, newest first, whether they are whole or not."""
        return [step for step, _ in self._files()]

    def newest_first(self) -> Iterator[Checkpoint]:
        """Return the checkpoints that are whole, each read when it is asked for.

        Raises:
            PermissionError: there is one that this user must not read.
        """
        for step, path in self._files():
            try:
                content = path.read_bytes()
            except PermissionError:
                raise  # the file may be whole: training must not silently begin again
            except OSError:
                continue
            header_bytes = len(_MAGIC) + _DIGEST_BYTES
            data = content[header_bytes:]
            if content[:header_bytes] == _MAGIC + _digest(step, data):
                yield Checkpoint(step, data)

    def _files(self) -> list[tuple[int, Path]]:
        """Return step and path of every checkpoint, newest first."""
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(((int(m[1]), path) for m, path in matches if m), reverse=True)

    def _remove_partial(self) -> None:
        """Remove the partial files of writers that were killed."""
        for path in self.folder.glob(f".step-*{PARTIAL_SUFFIX}"):
            _remove(path)

    def _sync_folder(self) -> None:
        """Write the folder to the disk: the new name must survive a power failure too."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _whole_number(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a whole number is expected, as int() gives") from None


def _remove(path: Path) -> None:
    """Remove a file if possible: a file that stays is no reason to end a training."""
    with contextlib.suppress(OSError):
        path.unlink()


def _digest(step: int, data: bytes) -> bytes:
    """Return the checksum of a checkpoint, with its step: a renamed file must not pass."""
    digest = hashlib.blake2b(f"{step}:".encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()
