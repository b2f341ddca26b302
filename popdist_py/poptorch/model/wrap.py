"""The functions trainingModel(), inferenceModel() and load(), which return wrapped models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from popdist_py import context
from popdist_py.poptorch import enums, old_spellings, optim
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.model.executor import PoplarExecutor
from popdist_py.poptorch.model.saved_model import SavedModel
from popdist_py.poptorch.options.options import Options

__all__ = ["inferenceModel", "load", "trainingModel"]


def _checked(options: Options | None) -> Options:
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise Error(f"Invalid type: 'options' must be a poptorch.Options, got {type(options)}")
    return options


@old_spellings.takes("poptorch.trainingModel()")
def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> PoplarExecutor:
    """Wrap ``model`` for training on emulated IPUs.

    Args:
        model: The module to train, or a wrapper of this module. The module's forward method must
            return the loss, alone or with other outputs.
        options: The options of the wrapper. The default for ``options`` is ``Options()``.
        optimizer: The optimiser of the module's parameters. The default optimiser is SGD with a
            learning rate of 0.01.
        scheduler: A scheduler of torch.optim.lr_scheduler for ``optimizer``. The scheduler is
            stepped after each weight update, even inside a call with several device iterations.
            Graphcore's PopTorch does not have the argument ``scheduler``, and keeps the learning
            rate constant during a call.

    Raises:
        AssertionError: ``model`` is not a module.
        Error: ``options`` is not an Options object, the module contains a module made by torch.jit
            or torch.compile, a lazy layer does not have weights yet, or the scheduler cannot be
            stepped after each update.
        RuntimeError: The module is already wrapped for training.
    """
    checked = _checked(options)
    module = model.model if isinstance(model, PoplarExecutor) else model
    assert isinstance(module, nn.Module), (
        f"Invalid type {type(model)} of 'model': expected a torch.nn.Module"
    )
    _check_modules(module)
    if optimizer is None:
        # The parameters are passed as a parameter group, because torch refuses an empty list of
        # parameters but accepts an empty group.
        optimizer = optim.SGD([{"params": list(module.parameters())}], lr=0.01)
    return PoplarExecutor(module, checked, training=True, optimizer=optimizer, scheduler=scheduler)


@old_spellings.takes("poptorch.inferenceModel()")
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Wrap ``model`` for inference on emulated IPUs.

    Args:
        model: A module, a wrapper of a module, or a function that takes tensors.
        options: The options of the wrapper. The default for ``options`` is ``Options()``.

    Raises:
        AssertionError: ``model`` is not callable.
        Error: ``options`` is not an Options object or sets gradient accumulation, the module
            contains a module made by torch.jit or torch.compile, or a lazy layer does not have
            weights yet.
    """
    checked = _checked(options)
    if checked.Training.gradient_accumulation != 1:
        _refuse_accumulation()
    if isinstance(model, PoplarExecutor):
        model = model.model
    if not isinstance(model, nn.Module):
        assert callable(model), (
            f"Invalid type {type(model)} of 'model': expected a torch.nn.Module or a function"
        )
        model = _Callable(model)
    _check_modules(model)
    return PoplarExecutor(model, checked, training=False)


def load(
    filename: str | Path, edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """Load a compiled model from a file that save() or compileAndExport() has written.

    Args:
        filename: The path of the file.
        edit_opts_fn: A function that gets the loaded options. ``edit_opts_fn`` may change options
            that do not affect the compilation.

    Raises:
        Error: The file was not written by save() or compileAndExport().
        AssertionError: Another version of this package wrote the file, or the file does not contain
            the user's module.
    """
    saved = SavedModel.read(Path(filename))
    assert saved.model is not None, (
        f"{filename} was saved without the model: wrap the model, and call loadExecutable() of the "
        "wrapped model"
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
    executor._take(saved)
    return executor


def _refuse_accumulation() -> NoReturn:
    raise Error(
        "Options.Training.gradientAccumulation must be 1 for inference: use "
        "Options.deviceIterations to fill a pipeline"
    )


def _check_modules(model: nn.Module) -> None:
    """Check that every module's forward method is Python code and every parameter has a shape.

    Raises:
        Error: torch.jit or torch.compile made one of the modules, or a lazy layer does not have
            weights yet.
    """
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl")
        if scripted or compiled:
            raise Error(
                f"{f'Module {name!r}' if name else 'The model'} comes from "
                f"{'torch.jit' if scripted else 'torch.compile'}, which is unsupported, because "
                "PopTorch compiles the model itself. Pass the plain torch.nn.Module"
            )
        if isinstance(module, nn.DataParallel):
            _say_one_device()
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise Error(
                f"Parameter {name!r} has no shape yet: call the module once on the host, so that "
                "its lazy layers get the shapes of their parameters"
            )


@cache
def _say_one_device() -> None:
    """Log once, and only on instance 0, that nn.DataParallel does not have an effect."""
    if context.environment().instance_index == 0:
        logger.warning(
            "nn.DataParallel has no effect on emulated IPUs, because each replica runs the whole "
            "model. Remove nn.DataParallel. To divide the batches over n replicas, use "
            "Options.replicationFactor(n)"
        )


class _Callable(nn.Module):
    """A module whose forward method is a given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
