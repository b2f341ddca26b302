"""Writing and reading files that contain a compiled model.

The module ``saved_model`` does not wrap or compile models.
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
from popdist_py.poptorch.compilation.compiled_model import Executable
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["SavedModel"]

_MAGIC: Final = "popdist_py.poptorch"
_DEFAULT_NAME: Final = "model.poptorch"
# Files that earlier versions of this library saved begin with the bytes of a ZIP archive, because
# torch.save() writes ZIP archives. Newer files of compiled models begin with a seal, which is a
# checksum of the file.
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """The content of a file that contains a compiled model.

    Attributes:
        options: The options of the model's wrapper.
        call: The structure, shapes and dtypes of the arguments that the model was compiled for.
        executable: The ``Executable``, which is the result of compiling the model.
        training: Whether the wrapper is for training (trainingModel()) and not for inference.
        model: The user's module with its weights; None if the module was not saved.
        optimizer: The user's optimiser; None for an inference model, or if the optimiser was not
            saved.
        rng_state: The state of the device's random number generator; None if the state was not
            saved.
    """

    options: Options
    call: Call
    executable: Executable
    training: bool
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    rng_state: list[int] | None

    def write(self, path: Path) -> None:
        """Write a compiled model to the file ``path``, or into the folder ``path``.

        In the folder ``path``, the new file has the name ``model.poptorch``. Parent folders that do
        not exist are made. The user's module and optimiser are pickled directly. In the file,
        objects of this package's classes are stored as bytes that contain a second pickle. Another
        version of this package can therefore read the version number in the file, even if the
        package has different classes.

        Raises:
            AssertionError: The parent of ``path`` is a file, and not a folder.
            OSError: The file cannot be written.
        """
        if path.is_dir():
            path = path / _DEFAULT_NAME
            logger.warning("The target of save() is a folder: the model is saved as %s", path)
        assert not path.parent.is_file(), (
            f"{path.parent} is a file, not a folder: cannot save {path.name} in {path.parent}"
        )
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
        """Return the content of a file that the method ``write`` has written.

        Raises:
            Error: The file is damaged or has another format, another user may have written the
                file, or the file needs modules or classes that are missing.
            AssertionError: Another version of this package wrote the file.
        """
        content = _content(path)
        if not isinstance(content, dict) or content.get("magic") != _MAGIC:
            raise Error(
                f"Invalid file {path}: the file was not written by save() of a PopTorch model of "
                f"version {__version__}. Compile and save the model again"
            )
        assert content["version"] == __version__, (
            f"{path}: version mismatch: the file was saved by version {content['version']}, but "
            f"this is version {__version__}. Compile and save the model again"
        )
        own = _unpickled(path, io.BytesIO(content["own"]))
        return cls(model=content["model"], optimizer=content["optimizer"], **own)


def _not_for_others(path: str, flags: int) -> int:
    """Open a file for a compiled model; if the file is new, other users cannot write to it.

    The method ``read`` refuses to load a file that other users can write to.
    """
    return os.open(path, flags, 0o644)


def _content(path: Path) -> Any:
    """Return the unpickled content of the file ``path``, which contains a compiled model.

    Raises:
        Error: The file is damaged or cannot be read, or another user may have written it.
    """
    again = "Compile and save the model again"
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
        raise Error(
            f"Invalid file {path}: the file was not written by save() of a PopTorch model. {again}"
        )
    raise Error(f"Invalid file {path}: the file is damaged. {again}")


def _unpickled(path: Path, source: IO[bytes]) -> Any:
    """Return the unpickled content of ``source``, which is all or a part of the file ``path``."""
    try:
        return torch.load(source, weights_only=False)
    except Exception as error:  # The unpickling of damaged bytes can raise any exception.
        raise Error(
            f"Invalid file {path}: the file cannot be read ({type(error).__name__}: {error}). "
            "Either the file is damaged, or another version saved the file, or the file names a "
            "module or class that does not exist. Compile and save the model again"
        ) from error
