"""A name for everything that decides how a model compiles: what compiles alike has the same one."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from popdist_py import __version__
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.code_text import code_text
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.annotations import is_block
from popdist_py.poptorch.weights.watched_module import plain_class

__all__ = ["model_key"]

# Of what is stored under a key; another one whenever an earlier release could not be read.
_FORMAT = 4


def model_key(
    model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None, call: Call
) -> str:
    """Return a name that differs for every model, options, kind of arguments and version.

    Of an optimizer only the class counts: its settings act in the update, which is not compiled.
    Other inputs of a forward, such as a file that it reads, do not change the name.
    """
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    modes = [
        # The text a layer adds when it is printed: the probability of a dropout, for example.
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
    """Return the block that BeginBlock() made of a module, if it did."""
    return [repr(hook) for hook in module._forward_pre_hooks.values() if is_block(hook)]
