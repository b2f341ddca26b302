"""The class ExecutableCache, which stores compiled models, so that a model is compiled only once.

All processes that use the cache share one folder of executables. Every instance of a job has a
different cache file, because the options of an instance contain the instance's index. The module
``executable_cache`` finds, locks, reads and writes the cache file of one model, but does not
compile models.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from popdist_py.atomic_file import open_private, replaced_at_end
from popdist_py.own_files.owner import NotOwnFileError, check_own_folder, open_own
from popdist_py.own_files.seal import is_sealed, sealed
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiled_model import Executable
from popdist_py.poptorch.compilation.model_key import model_key
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["ExecutableCache"]


class ExecutableCache:
    """The cache file of one model in a folder of executables (compiled models).

    Args:
        path: The cache file for the model with its options. With None, ``ExecutableCache`` neither
            loads nor stores executables (compiled models).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_unusable = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        call: Call,
    ) -> ExecutableCache:
        """Return the cache file of a model, in the cache folder that the options name."""
        folder = options.executable_cache
        if folder is None:
            return cls(None)
        return cls(folder / f"{model_key(model, options, optimizer, call)}.executable")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let only one process at a time execute the ``with`` block for the same model.

        The first process compiles the model, and the other processes load the compiled model from
        the cache file. The cache file of a model is also its lock file, so the cache folder has
        only one file for each model. The cache file is empty until the first process has compiled
        the model. If a process cannot write or lock files in the cache folder, the process loads
        executables but does not store executables. If other users can change the cache folder, the
        cache is not used.
        """
        with ExitStack() as stack:
            try:
                if self._path is not None:
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    check_own_folder(self._path.parent)
                    lock = stack.enter_context(open_private(self._path, "ab"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                self._do_without(error)
            except NotOwnFileError as error:
                logger.warning("The model is compiled without the executable cache: %s", error)
                self._path = None
            yield

    def _do_without(self, error: OSError) -> None:
        """Warn, and stop using the cache, if the cache file does not contain an executable yet."""
        if self._is_filled():
            return
        assert self._path is not None
        logger.warning(
            "The compiled model is not stored in the cache folder %s (%s): choose a writable "
            "folder with Options.enableExecutableCaching(), --executable-cache-path or "
            "POPTORCH_CACHE_DIR",
            self._path.parent,
            error.strerror,
        )
        self._path = None

    def load(self) -> Executable | None:
        """Return the executable (compiled model) in the cache file; None if the file is not usable.

        The next call of :meth:`store` replaces a cache file with unusable content.
        """
        if self._path is None or not self._is_filled():
            return None
        try:
            executable = _read(self._path)
        except NotOwnFileError as error:
            logger.warning(
                "The model is compiled again, because the cached file is not trusted: %s", error
            )
        except Exception as error:  # Unpickling may raise any exception.
            logger.warning(
                "The model is compiled again, because the cached file %s cannot be read: %s",
                self._path,
                error,
            )
        else:
            logger.info("The compiled model was loaded from the cache: %s", self._path)
            return executable
        self._is_unusable = True
        return None

    def store(self, executable: Executable) -> None:
        """Write an executable to the cache file, unless the file contains a usable executable."""
        if self._path is None or (self._is_filled() and not self._is_unusable):
            return
        try:
            with (
                replaced_at_end(self._path, private=True) as partial,
                partial.open("wb") as file,
                sealed(file) as content,
            ):
                torch.save(executable, content)
        except OSError as error:
            self._do_without(error)

    def _is_filled(self) -> bool:
        try:
            return self._path is not None and self._path.stat().st_size > 0
        except OSError:
            return False


def _read(path: Path) -> Executable:
    """Read an executable from a cache file.

    Raises:
        NotOwnFileError: Another user may have written the cache file.
        ValueError: The file is damaged, or does not contain an executable.
        Exception: The content of the file cannot be unpickled.
    """
    with os.fdopen(open_own(path), "rb") as file:
        if not is_sealed(file):
            raise ValueError(
                "the file is damaged, or another version of this package wrote the file"
            )
        executable = torch.load(file, weights_only=False)
    if not isinstance(executable, Executable):
        raise ValueError(
            f"the file contains a {type(executable).__name__} instead of a compiled model"
        )
    return executable
