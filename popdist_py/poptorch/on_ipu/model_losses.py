"""Losses that the command ``python -m popdist_py.ipu`` adds to the user's model.

The labels of a loss are a further input of the model, because the host sends them to the IPU.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from popdist_py.poptorch.on_ipu.graph_of_model import traced_outputs
from popdist_py.poptorch.on_ipu.model_factories import Example
from popdist_py.poptorch.on_ipu.user_failures import FactoryError, user_code
from popdist_py.poptorch.options.options import Options

__all__ = ["LOSSES", "OWN_LOSS", "with_loss"]

OWN_LOSS: Final = "own"
# The attributes of a module that contain the hooks of its forward pass.
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
# A function that computes the loss from the model's first output and the labels.
_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _token_cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


LOSSES: Final[Mapping[str, _Loss]] = MappingProxyType(
    {
        "cross-entropy": F.cross_entropy,
        "token-cross-entropy": _token_cross_entropy,
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "bce": F.binary_cross_entropy_with_logits,
    }
)


def _labels(loss: str, output: torch.Tensor) -> torch.Tensor:
    """Return labels of zeros for an output; the zeros share the memory of one element."""
    shape = tuple(output.shape)
    if loss == "cross-entropy":  # Dimension 1 of the output contains the classes' scores.
        return torch.zeros((), dtype=torch.int64).expand((shape[0], *shape[2:]))
    if loss == "token-cross-entropy":  # The last dimension contains the classes' scores.
        return torch.zeros((), dtype=torch.int64).expand(shape[:-1])
    return torch.zeros((), dtype=output.dtype).expand(shape)


@contextmanager
def with_loss(example: Example, loss: str) -> Iterator[Example]:
    """Yield an example (a model with inputs) whose forward pass also computes a loss.

    The new ``forward`` method takes labels as its first argument, and returns a tuple of the
    model's output and the loss. At the end of the with statement, the module gets its original
    ``forward`` method back. The names of the model's submodules do not change.

    Raises:
        FactoryError: The forward pass fails, or the loss function cannot be applied to its first
            output.
    """
    if loss == OWN_LOSS:
        yield example
        return
    output = _first_output(example)
    if output.dim() < 2 and "cross-entropy" in loss:
        raise FactoryError(
            f"the model's first output has the shape {tuple(output.shape)}, but cross entropy "
            "needs a dimension for the classes: choose --loss mse, or choose --loss own if the "
            "forward returns its own loss"
        )
    if not output.dtype.is_floating_point:
        raise FactoryError(
            f"the model's first output has the type {str(output.dtype)[6:]}, but a loss needs "
            "float32 or float16: choose --inference, or choose --loss own if the forward returns "
            "its own loss"
        )
    module, own, compute = example.module, example.module.forward, LOSSES[loss]
    hooks = {name: vars(module)[name] for name in _HOOKS}

    def forward(labels: torch.Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        # The user's hooks run inside the new forward, because they do not expect labels.
        with _attributes(module, hooks | {"forward": own}):
            made = module(*args, **kwargs)
        return made, compute(_first_tensor(made), labels)

    first = inspect.Parameter("labels", inspect.Parameter.POSITIONAL_ONLY)
    others = inspect.signature(own).parameters.values()
    others_named = (p for p in others if p.name != first.name)
    forward.__signature__ = inspect.Signature([first, *others_named])  # type: ignore[attr-defined]
    with _attributes(module, {name: OrderedDict() for name in _HOOKS} | {"forward": forward}):
        yield replace(example, args=(_labels(loss, output), *example.args))


@contextmanager
def _attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Give a module other attributes inside a with statement."""
    own = vars(module)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _first_output(example: Example) -> torch.Tensor:
    """Return a tensor with the shape and type of the model's first output, and without values."""
    with user_code("the model's forward", example.described):
        made = traced_outputs(example.module, Options(), example.args, example.kwargs)
    return _first_tensor(made)


def _first_tensor(made: Any) -> torch.Tensor:
    if isinstance(made, torch.Tensor):
        return made
    values = tuple(made.values()) if isinstance(made, Mapping) else made
    if isinstance(values, tuple | list) and values:
        return _first_tensor(values[0])
    raise FactoryError(
        f"the model's forward returned an object of the type {type(made).__name__}, but a loss "
        "needs a tensor, or a tuple or dict of tensors: choose --loss own if the forward returns "
        "its own loss"
    )
