"""Checkpoint files that are either complete or absent, with bytes as their contents.

The caller defines the meaning of a checkpoint's bytes. The module
``popdist_py.poptorch.checkpoint`` stores the state of a training in these files. The class
``LoopCheckpoints`` does the same for other PyTorch programs; only its first use imports torch.
Everything else in this module uses only the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from popdist_py import activities
from popdist_py.atomic_file import PARTIAL_SUFFIX, replaced_at_end

# The module's __getattr__ makes LoopCheckpoints.
__all__ = ["Checkpoint", "Checkpoints", "LoopCheckpoints"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name != "LoopCheckpoints":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("popdist_py.torch_states.loop_checkpoints").LoopCheckpoints


_MAGIC = b"popdist checkpoint 1\n"
_NAME = re.compile(r"step-(\d{12,})\.checkpoint")
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The bytes of one checkpoint, and the number of training steps done when they were saved."""

    step: int
    data: bytes


class Checkpoints:
    """The last ``keep`` checkpoints in one folder.

    A checkpoint is first written to a temporary file, and renamed after its contents are on the
    disk. Each file contains a checksum, so an incomplete or damaged file is never loaded. One
    process may write checkpoints while other processes read them.

    Args:
        folder: The folder of the checkpoints. The first call of ``save()`` creates it.
        keep: The number of checkpoints to keep, at least 1.

    Raises:
        TypeError: ``keep`` is not an integer.
        ValueError: ``keep`` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        keep = _whole_number("keep", keep)
        if keep < 1:
            raise ValueError(f"keep={keep}: expected a number of checkpoints, at least 1")
        self.folder = Path(folder)
        self._keep = keep

    def save(self, step: int, data: bytes) -> Path:
        """Write the checkpoint of ``step``, then remove the oldest checkpoints.

        A checkpoint of the same step is replaced. Among the checkpoints of steps up to ``step``,
        the newest ``keep`` remain. Checkpoints of later steps are neither counted nor removed;
        ``latest()`` may have skipped them as damaged.

        Raises:
            TypeError: ``step`` is not an integer.
            ValueError: ``step`` is negative.
            OSError: The folder or the file cannot be written. Older checkpoints are unchanged after
                this error.
        """
        # The step must be an integer, because a file name with a float would not match _NAME.
        step = _whole_number("step", step)
        if step < 0:
            raise ValueError(f"step={step}: expected the number of training steps done")
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
                f"{partial} was removed during writing, because another job saves to "
                f"{self.folder}. Use a separate folder for each job"
            ) from None
        except OSError as error:
            if error.filename is None:  # for a full disk, Python's error does not contain a path
                error.filename = str(path)
            raise
        self._sync_folder()
        up_to_step = [path for saved_step, path in self._files() if saved_step <= step]
        for old_path in up_to_step[self._keep :]:
            _remove(old_path)
        return path

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None if the folder does not contain one.

        Raises:
            PermissionError: The user is not allowed to read a checkpoint in the folder.
        """
        with activities.doing(activities.SAVING, "load"):
            return next(self.newest_first(), None)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, newest first, including damaged checkpoints."""
        return [step for step, _ in self._files()]

    def newest_first(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints, newest first.

        Each checkpoint file is read only when the iterator reaches it.

        Raises:
            PermissionError: The user is not allowed to read a checkpoint in the folder.
        """
        for step, path in self._files():
            try:
                content = path.read_bytes()
            except PermissionError:
                raise  # the checkpoint may be valid, so training must not silently start at step 0
            except OSError:
                continue
            header_bytes = len(_MAGIC) + _DIGEST_BYTES
            data = content[header_bytes:]
            if content[:header_bytes] == _MAGIC + _digest(step, data):
                yield Checkpoint(step, data)

    def _files(self) -> list[tuple[int, Path]]:
        """Return the step and the path of every checkpoint, newest first."""
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(((int(m[1]), path) for m, path in matches if m), reverse=True)

    def _remove_partial(self) -> None:
        """Remove the temporary files of writers that were killed."""
        for path in self.folder.glob(f".step-*{PARTIAL_SUFFIX}"):
            _remove(path)

    def _sync_folder(self) -> None:
        """Sync the folder to the disk, so that a renamed file survives a power failure."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _whole_number(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: expected an integer, such as int({name})") from None


def _remove(path: Path) -> None:
    """Remove a file. Errors are ignored, because they must not end the training."""
    with contextlib.suppress(OSError):
        path.unlink()


def _digest(step: int, data: bytes) -> bytes:
    """Return the checksum of the data and the step.

    The checksum covers the step, so a checkpoint that was renamed to another step is detected.
    """
    digest = hashlib.blake2b(f"{step}:".encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()
