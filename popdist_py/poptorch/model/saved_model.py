"""Files: saved models, executables, and the cache of executables that processes share."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from popdist_py import __version__
from popdist_py.poptorch import enums
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiler import Compiler, Executable
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.annotations import is_block

if TYPE_CHECKING:
    from popdist_py.poptorch.model.executor import PoplarExecutor

__all__ = ["Cache", "SavedModel", "load", "read", "save"]

_MAGIC: Final = "popdist_py.poptorch"
_DEFAULT_NAME: Final = "model.poptorch"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What is saved of a compiled model; :func:`save` says how it lies in the file."""

    options: Options
    call: Call
    executable: Executable
    training: bool
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    rng_state: list[int] | None


def save(executor: PoplarExecutor, path: Path, *, export_model: bool, rng_state: bool) -> None:
    """Write the compiled model of ``executor``.

    The file holds what names the user's classes and, beside it as bytes, what names this package's:
    so its version can be read where this package has another layout.
    """
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("The target is a folder: the model is saved as %s", path)
    assert not path.parent.is_file(), f"{path.parent} is a file: cannot save {path.name} in it"
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled = executor._require_compiled()
    executor.copyWeightsToHostIfNeeded()
    executor._fetch_optimizer_state()
    own = io.BytesIO()
    torch.save(
        {
            "options": executor.options,
            "call": executor._template,
            "executable": compiled.executable,
            "training": executor._training,
            "rng_state": executor.rng_state if rng_state else None,
        },
        own,
    )
    content = {
        "magic": _MAGIC,
        "version": __version__,
        "model": executor.model if export_model else None,
        "optimizer": executor._optimizer if export_model else None,
        "own": own.getvalue(),
    }
    torch.save(content, path)


def read(path: Path) -> SavedModel:
    """Return the content of a saved file.

    Raises:
        Error: it is no such file, or it names modules or classes that are not there.
        AssertionError: another version of this package wrote it.
    """
    content = _unpickled(path, path)
    if not isinstance(content, dict) or content.get("magic") != _MAGIC:
        raise Error(
            f"Invalid file {path}: save() of a PopTorch model of version {__version__} did not "
            "write it; compile and save the model again"
        )
    assert content["version"] == __version__, (
        f"{path}: version mismatch: version {content['version']} saved it, this is {__version__}; "
        "compile and save the model again"
    )
    own = _unpickled(path, io.BytesIO(content["own"]))
    return SavedModel(model=content["model"], optimizer=content["optimizer"], **own)


def _unpickled(path: Path, source: Path | io.BytesIO) -> Any:
    """Return what ``source``, the file ``path`` or a part of it, holds."""
    try:
        return torch.load(source, weights_only=False)
    except OSError as error:
        raise Error(f"Invalid file {path}: {error}") from error
    except Exception as error:  # bytes that nobody knows can make unpickling raise anything
        raise Error(
            f"Invalid file {path}: it cannot be read ({type(error).__name__}: {error}). It is "
            "damaged, names a module or class that is not there, or another version saved it: "
            "compile and save the model again"
        ) from error


def load(
    filename: str | Path, edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """Return the model of a file that save() or compileAndExport() wrote, ready to run.

    Args:
        filename: the file.
        edit_opts_fn: called with the options, to change those of the time of running.

    Raises:
        Error: it is no such file.
        AssertionError: another version wrote it, or it was saved without the model.
    """
    from popdist_py.poptorch.model.executor import PoplarExecutor

    saved = read(Path(filename))
    assert saved.model is not None, (
        f"{filename} was saved without the model: make a wrapper of the model and use its "
        "loadExecutable()"
    )
    options = saved.options.clone()
    if options.connection_type == enums.ConnectionType.Never:
        options.connectionType(enums.ConnectionType.Always)
        options.deleteIfExists("ipu_version")
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(
        saved.model, options, training=saved.training, optimizer=saved.optimizer
    )
    args, kwargs = saved.call.example()
    executor._compile(args, kwargs, saved.executable)
    if saved.rng_state is not None:
        executor.rng_state = saved.rng_state
    return executor


class Cache:
    """One model's place in a folder of executables; without a folder it does nothing.

    Args:
        path: the file of this model with these options, or None.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of(cls, compiler: Compiler, call: Call) -> Cache:
        """Return the place that the options choose."""
        folder = compiler.options.executable_cache
        if folder is None:
            return cls(None)
        return cls(folder / f"{_key(compiler, call)}.executable")

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
            content = torch.load(self._path, weights_only=False)
        except Exception as error:  # bytes that nobody knows can make unpickling raise anything
            logger.info("Compiling again: %s cannot be read: %s", self._path, error)
            content = None
        if isinstance(content, Executable):
            logger.info("Executable loaded from the cache: %s", self._path)
            return content
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


def _key(compiler: Compiler, call: Call) -> str:
    """Return a name that differs for every model, options, kind of arguments and version."""
    model = compiler.user_model
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    modes = [
        # The text a layer adds when it is printed: the probability of a dropout, for example.
        (name, type(module), module.training, module.extra_repr(), _blocks(module))
        for name, module in model.named_modules()
    ]
    sources = sorted({_source(type(module)) for module in model.modules()})
    arguments = (call.positional, call.keywords, [(t.shape, t.dtype) for t in call.leaves])
    parts = (
        __version__,
        torch.__version__,
        shapes,
        modes,
        sources,
        arguments,
        compiler.options._description(),
        type(compiler.optimizer),
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
