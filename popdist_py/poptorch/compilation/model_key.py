"""The function model_key, which returns the key of a model in the cache of executables."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from popdist_py import __version__
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.model_key_text import code_text
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.annotations import is_block
from popdist_py.poptorch.weights.copy_before_read import plain_class

__all__ = ["model_key"]

# The version of the file format of executables (stored compiled models). Increase the version of
# the file format if a new release cannot read the executables that earlier releases stored.
_FORMAT = 5


def model_key(
    model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None, call: Call
) -> str:
    """Return a hash of everything that determines the result of compiling a model.

    The hash of a model depends on the model's code and settings, the options, the structure, shapes
    and dtypes of the arguments, the optimiser's class, and the versions of Python, torch and
    ``popdist_py``. The hash of a model does not depend on the optimiser's settings, such as the
    learning rate, because these settings affect only the weight update, which is not compiled. The
    hash of a model also does not depend on the content of files that the forward pass reads.
    """
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    modes = [
        # The method extra_repr() of a module describes the module's settings, for example the
        # probability of a dropout layer.
        (name, plain_class(module), module.training, module.extra_repr(), _blocks(module))
        for name, module in model.named_modules()
    ]
    arguments = (call.positional, call.keywords, [(t.shape, t.dtype) for t in call.leaves])
    parts = (
        __version__,
        _FORMAT,
        torch.__version__,
        sys.version,
        shapes,
        modes,
        code_text(model),
        arguments,
        options._description(),
        type(optimizer),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _blocks(module: nn.Module) -> list[str]:
    """Return texts about a module's BeginBlock annotations, which assign the module to an IPU."""
    return [repr(hook) for hook in module._forward_pre_hooks.values() if is_block(hook)]
