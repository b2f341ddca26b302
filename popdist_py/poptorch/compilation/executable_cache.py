"""The folder of executables that processes share, so that what compiles alike does so once.

Every instance of a job has its own file: their options differ in the instance's index.

This module finds, locks, reads and writes the file of one model. It compiles nothing.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from popdist_py.atomic_file import replaced_at_end
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiler import Executable
from popdist_py.poptorch.compilation.model_key import model_key
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["ExecutableCache"]


class ExecutableCache:
    """One model's place in a folder of executables; without a folder it does nothing.

    Args:
        path: the file of this model with these options, or None.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of(
        cls,
        model: nn.Module,
        options: Options,
        optimizer: torch.optim.Optimizer | None,
        call: Call,
    ) -> ExecutableCache:
        """Return the place that the options choose."""
        folder = options.executable_cache
        if folder is None:
            return cls(None)
        return cls(folder / f"{model_key(model, options, optimizer, call)}.executable")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let only one process at a time compile this model: the others find its result.

        The file itself is the lock, so that the folder holds one file for each model; it is empty
        until the first process has compiled. A folder that cannot be written, or not locked, is
        no reason to stop: what it holds is used, and nothing is added.
        """
        with ExitStack() as stack:
            try:
                if self._path is not None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(self._path.open("ab"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                self._do_without(error)
            yield

    def _do_without(self, error: OSError) -> None:
        """Go on with what the folder holds of this model, or without the folder."""
        if self._is_filled():
            return
        assert self._path is not None
        logger.warning(
            "This executable is not cached in %s (%s): choose a folder that can be written with "
            "Options.enableExecutableCaching(), --executable-cache-path or POPTORCH_CACHE_DIR",
            self._path.parent,
            error.strerror,
        )
        self._path = None

    def load(self) -> Executable | None:
        """Return the executable that was compiled before; None if there is none that can be read.

        A file that cannot be read is emptied, so that :meth:`store` fills it again.
        """
        if self._path is None or not self._is_filled():
            return None
        try:
            executable = torch.load(self._path, weights_only=False)
        except Exception as error:  # unknown bytes can make unpickling raise anything
            logger.info("Compiling again: %s cannot be read: %s", self._path, error)
            executable = None
        if isinstance(executable, Executable):
            logger.info("Executable loaded from the cache: %s", self._path)
            return executable
        with suppress(OSError):  # a folder that is only read keeps it
            os.truncate(self._path, 0)
        return None

    def store(self, executable: Executable) -> None:
        """Keep an executable."""
        if self._path is None or self._is_filled():
            return
        content = io.BytesIO()
        torch.save(executable, content)
        try:
            with replaced_at_end(self._path) as partial:
                partial.write_bytes(content.getbuffer())
        except OSError as error:
            self._do_without(error)

    def _is_filled(self) -> bool:
        try:
            return self._path is not None and self._path.stat().st_size > 0
        except OSError:
            return False
