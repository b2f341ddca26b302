"""trainingModel(), inferenceModel() and load(): from what a program has to a wrapper."""

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
        model: its forward returns the loss, alone or with other outputs.
        options: how it runs; the defaults of Options if None.
        optimizer: SGD with a learning rate of 0.01 if None.
        scheduler: one of torch.optim.lr_scheduler over ``optimizer``; it is stepped after each
            weight update, also inside a call with several device iterations. PopTorch has no such
            argument: its learning rate stays the same during a call.

    Raises:
        AssertionError: ``model`` is no module.
        Error: ``options`` are no Options; torch.jit or torch.compile made the module or a part; a
            lazy layer has no weights yet; a scheduler that cannot be stepped after each update.
        RuntimeError: the module is wrapped for training already.
    """
    checked = _checked(options)
    module = model.model if isinstance(model, PoplarExecutor) else model
    assert isinstance(module, nn.Module), (
        f"Invalid type {type(model)} of 'model': expected a torch.nn.Module"
    )
    _check_modules(module)
    if optimizer is None:
        # A group, because torch refuses an empty list of parameters.
        optimizer = optim.SGD([{"params": list(module.parameters())}], lr=0.01)
    return PoplarExecutor(module, checked, training=True, optimizer=optimizer, scheduler=scheduler)


@old_spellings.takes("poptorch.inferenceModel()")
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Wrap ``model`` for inference on emulated IPUs.

    Args:
        model: a module, the wrapper of one, or a plain callable of tensors.
        options: how it runs; the defaults of Options if None.

    Raises:
        AssertionError: ``model`` cannot be called.
        Error: ``options`` are no Options, or accumulate gradients; torch.jit or torch.compile made
            the module or a part; a lazy layer has no weights yet.
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
    """Return the model of a file that save() or compileAndExport() wrote, ready to run.

    Args:
        filename: the file.
        edit_opts_fn: called with the options, to change those of the time of running.

    Raises:
        Error: it is no such file.
        AssertionError: another version wrote it, or it was saved without the model.
    """
    saved = SavedModel.read(Path(filename))
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
    executor._take(saved)
    return executor


def _refuse_accumulation() -> NoReturn:
    raise Error(
        "Options.Training.gradientAccumulation must be 1 for inference: use "
        "Options.deviceIterations to fill a pipeline"
    )


def _check_modules(model: nn.Module) -> None:
    """Check that every module's forward is Python that can be traced, and every weight there."""
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl")
        if scripted or compiled:
            raise Error(
                f"{f'Module {name!r}' if name else 'The model'} comes from "
                f"{'torch.jit' if scripted else 'torch.compile'}, which is unsupported: the "
                "wrapper compiles it itself. Use the plain torch.nn.Module"
            )
        if isinstance(module, nn.DataParallel):
            _say_one_device()
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise Error(
                f"Parameter {name!r} has no shape yet: call the module once on the host, so that "
                "its lazy layers learn theirs"
            )


@cache
def _say_one_device() -> None:
    """Warn once in a program, on instance 0, that nn.DataParallel has no effect."""
    if context.environment().instance_index == 0:
        logger.warning(
            "nn.DataParallel does nothing on emulated IPUs: each replica runs the whole model. "
            "Leave it out; Options.replicationFactor(n) divides the batches over n replicas"
        )


class _Callable(nn.Module):
    """A plain callable as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
