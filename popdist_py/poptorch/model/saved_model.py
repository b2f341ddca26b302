"""The file of a compiled model: which values it holds, and how they lie in it.

This module writes and reads values. It makes no wrapper and compiles nothing.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import nn

from popdist_py import __version__
from popdist_py.own_files.owner import NotOwnFileError, open_own
from popdist_py.own_files.seal import is_sealed, sealed
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiler import Executable
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["SavedModel"]

_MAGIC: Final = "popdist_py.poptorch"
_DEFAULT_NAME: Final = "model.poptorch"
# How files begin that earlier versions wrote, without a seal: torch's are ZIP archives.
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What is saved of a compiled model.

    Attributes:
        options: the wrapper's options.
        call: structure, shapes and dtypes of the arguments that it was compiled for.
        executable: the result of compiling.
        training: whether the model trains.
        model: the user's module with its weights; None if it was left out.
        optimizer: the user's optimiser; None for inference, or if it was left out.
        rng_state: the state of the device's random numbers; None if it was left out.
    """

    options: Options
    call: Call
    executable: Executable
    training: bool
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    rng_state: list[int] | None

    def write(self, path: Path) -> None:
        """Write the file ``path``; in a folder, ``model.poptorch``. Missing folders are made.

        The file holds what names the user's classes and, beside it as bytes, what names this
        package's: so its version can be read where this package has another layout.

        Raises:
            AssertionError: the parent is a file.
            OSError: it cannot be written.
        """
        if path.is_dir():
            path = path / _DEFAULT_NAME
            logger.warning("The target is a folder: the model is saved as %s", path)
        assert not path.parent.is_file(), f"{path.parent} is a file: cannot save {path.name} in it"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = io.BytesIO()
        torch.save(
            {
                "options": self.options,
                "call": self.call,
                "executable": self.executable,
                "training": self.training,
                "rng_state": self.rng_state,
            },
            own,
        )
        content = {
            "magic": _MAGIC,
            "version": __version__,
            "model": self.model,
            "optimizer": self.optimizer,
            "own": own.getvalue(),
        }
        with open(path, "wb", opener=_not_for_others) as file, sealed(file) as inside:
            torch.save(content, inside)

    @classmethod
    def read(cls, path: Path) -> SavedModel:
        """Return the content of a saved file.

        Raises:
            Error: it is no such file, is damaged, others may have written it, or it names modules
                or classes that are not there.
            AssertionError: another version of this package wrote it.
        """
        content = _content(path)
        if not isinstance(content, dict) or content.get("magic") != _MAGIC:
            raise Error(
                f"Invalid file {path}: save() of a PopTorch model of version {__version__} did "
                "not write it; compile and save the model again"
            )
        assert content["version"] == __version__, (
            f"{path}: version mismatch: version {content['version']} saved it, this is "
            f"{__version__}; compile and save the model again"
        )
        own = _unpickled(path, io.BytesIO(content["own"]))
        return cls(model=content["model"], optimizer=content["optimizer"], **own)


def _not_for_others(path: str, flags: int) -> int:
    """Open a file that nobody else can write to, whatever the umask: such a one is not loaded."""
    return os.open(path, flags, 0o644)


def _content(path: Path) -> Any:
    """Return what the file ``path`` holds, if it is whole and nobody else may have written it."""
    again = "compile and save the model again"
    try:
        with os.fdopen(open_own(path), "rb") as file:
            is_whole = is_sealed(file)
            if is_whole or (is_whole is None and file.peek(len(_ZIP)).startswith(_ZIP)):
                return _unpickled(path, file)
    except NotOwnFileError as error:
        raise Error(f"Invalid file {error}") from None
    except OSError as error:
        raise Error(f"Invalid file {path}: {error.strerror or error}") from error
    if is_whole is None:
        raise Error(f"Invalid file {path}: save() of a PopTorch model did not write it; {again}")
    raise Error(f"Invalid file {path}: it is damaged; {again}")


def _unpickled(path: Path, source: IO[bytes]) -> Any:
    """Return what ``source``, the file ``path`` or a part of it, holds."""
    try:
        return torch.load(source, weights_only=False)
    except Exception as error:  # unknown bytes can make unpickling raise anything
        raise Error(
            f"Invalid file {path}: it cannot be read ({type(error).__name__}: {error}). It is "
            "damaged, names a module or class that is not there, or another version saved it: "
            "compile and save the model again"
        ) from error
