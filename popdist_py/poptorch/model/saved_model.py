"""Files: saved models, executables, and the cache of executables that processes share."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import pickle
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

if TYPE_CHECKING:
    from popdist_py.poptorch.model.executor import PoplarExecutor

__all__ = ["Cache", "SavedModel", "load", "read", "save"]

_MAGIC: Final = "popdist_py.poptorch"
_DEFAULT_NAME: Final = "model.poptorch"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """The content of a saved file."""

    magic: str
    version: str
    options: Options
    call: Call
    executable: Executable
    training: bool
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    rng_state: list[int] | None


def save(executor: PoplarExecutor, path: Path, *, export_model: bool, rng_state: bool) -> None:
    """Write the compiled model of ``executor``."""
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("The target is a folder: the model is saved as %s", path)
    assert not path.parent.is_file(), f"{path.parent} is a file: cannot save {path.name} in it"
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled = executor._require_compiled()
    executor.copyWeightsToHostIfNeeded()
    executor._fetch_optimizer_state()
    content = SavedModel(
        magic=_MAGIC,
        version=__version__,
        options=executor.options,
        call=executor._template,
        executable=compiled.executable,
        training=executor._training,
        model=executor.model if export_model else None,
        optimizer=executor._optimizer if export_model else None,
        rng_state=executor.rng_state if rng_state else None,
    )
    torch.save(content, path)


def read(path: Path) -> SavedModel:
    """Return the content of a saved file.

    Raises:
        Error: it is no such file.
        AssertionError: another version of this package wrote it.
    """
    try:
        content = torch.load(path, weights_only=False)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise Error(f"Invalid file {path}: {error}") from error
    if not isinstance(content, SavedModel) or content.magic != _MAGIC:
        raise Error(f"Invalid file {path}: save() of a PopTorch model did not write it")
    assert content.version == __version__, (
        f"{path}: version mismatch: version {content.version} saved it, this is {__version__}; "
        "compile and save the model again"
    )
    return content


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
        popart = compiler.options._Popart.options
        folder = popart.get("cachePath")
        if not folder or not popart.get("enableEngineCaching"):
            return cls(None)
        return cls(Path(folder) / f"{_key(compiler, call)}.executable")

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
        """Return the executable that was compiled before; None if there is none."""
        if self._path is None or not self._is_filled():
            return None
        content = torch.load(self._path, weights_only=False)
        logger.info("Executable loaded from the cache: %s", self._path)
        return content if isinstance(content, Executable) else None

    def store(self, executable: Executable) -> None:
        """Keep an executable."""
        if self._path is not None and not self._is_filled():
            part = self._path.with_suffix(".part")
            torch.save(executable, part)
            part.replace(self._path)

    def _is_filled(self) -> bool:
        return self._path is not None and self._path.stat().st_size > 0


def _key(compiler: Compiler, call: Call) -> str:
    """Return a name that differs for every model, options and kind of arguments."""
    model = compiler.user_model
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    modes = [(name, module.training) for name, module in model.named_modules()]
    sources = sorted({_source(type(module)) for module in model.modules()})
    arguments = (call.positional, call.keywords, [(t.shape, t.dtype) for t in call.leaves])
    options = repr(compiler.options).replace(repr(compiler.options._Popart), "")
    text = repr((shapes, modes, sources, arguments, options, type(compiler.optimizer)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
