"""The folder of executables that processes share, so that what compiles alike does so once.

Every instance of a job has its own file: their options differ in the instance's index.

This module finds, locks, reads and writes the file of one model. It compiles nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from popdist_py import __version__
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiler import Executable
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.annotations import is_block
from popdist_py.poptorch.weights.watched_module import plain_class

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
        return cls(folder / f"{_key(model, options, optimizer, call)}.executable")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let only one process at a time compile this model: the others find its result.

        The file itself is the lock, so that the folder holds one file for each model; it is empty
        until the first process has compiled.
        """
        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

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
        os.truncate(self._path, 0)
        return None

    def store(self, executable: Executable) -> None:
        """Keep an executable."""
        if self._path is not None and not self._is_filled():
            part = self._path.with_suffix(".part")
            torch.save(executable, part)
            part.replace(self._path)

    def _is_filled(self) -> bool:
        return self._path is not None and self._path.stat().st_size > 0


def _key(
    model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None, call: Call
) -> str:
    """Return a name that differs for every model, options, kind of arguments and version."""
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    modes = [
        # The text a layer adds when it is printed: the probability of a dropout, for example.
        (name, plain_class(module), module.training, module.extra_repr(), _blocks(module))
        for name, module in model.named_modules()
    ]
    sources = sorted({_source(plain_class(module)) for module in model.modules()})
    arguments = (call.positional, call.keywords, [(t.shape, t.dtype) for t in call.leaves])
    parts = (
        __version__,
        torch.__version__,
        shapes,
        modes,
        sources,
        arguments,
        options._description(),
        type(optimizer),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _blocks(module: nn.Module) -> list[str]:
    """Return the block that BeginBlock() made of a module, if it did."""
    return [repr(hook) for hook in module._forward_pre_hooks.values() if is_block(hook)]


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
