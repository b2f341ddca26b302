"""Functions that make the user's model and a micro-batch from a command line's arguments.

The command line names a function of the user as ``module:function``. The user's function, which
makes the model, is called the factory function. An exception of the user's code becomes a
``FactoryError`` with the traceback lines of the user's code. The module ``model_factories`` does
not compute with real data.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_map_only

from popdist_py.poptorch.on_ipu.fake_tensors import UnknownValues

__all__ = [
    "LOSSES",
    "OWN_LOSS",
    "Example",
    "FactoryError",
    "InputSpec",
    "made_example",
    "user_code",
    "with_loss",
]

OWN_LOSS: Final = "own"
_TYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in (
            *("float32", "float16", "float64", "bfloat16"),
            *("int64", "int32", "int16", "int8", "uint8", "bool"),
        )
    }
)
# The beginnings of the file names of traceback frames that are not shown to the user. The hidden
# frames of a traceback belong to this library, to torch and to Python's import system.
_NOT_THE_USER_S: Final = (
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    str(Path(inspect.__file__).parent / "importlib"),
    "<frozen importlib",
)
_FRAMES: Final = 4
_FAKE_TENSOR_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")


class FactoryError(Exception):
    """The error for a user's model or input that cannot be made, with a message for the user."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The shape of one sample of a model's input, and the data type of the input."""

    shape: tuple[int, ...]
    type: str = "float32"

    @classmethod
    def parse(cls, word: str) -> InputSpec:
        """Return the ``InputSpec`` for a text such as ``3x224x224:float16`` (a shape and a type).

        A text with only a type, such as ``:int64``, describes an input with one number for each
        sample.

        Raises:
            ValueError: The text does not contain a valid shape, or the data type is unknown.
        """
        shape, _, type_ = word.partition(":")
        try:
            sizes = tuple(map(int, shape.split("x"))) if shape else ()
        except ValueError:
            sizes = (0,)
        if any(size < 1 for size in sizes) or not word:
            raise ValueError(f"{word!r} is no shape of a sample: expected as in 3x224x224:float16")
        if type_ and type_ not in _TYPES:
            raise ValueError(f"{type_!r} is no type of an input: expected {', '.join(_TYPES)}")
        return cls(sizes, type_ or "float32")

    def tensor(self, batch: int) -> torch.Tensor:
        """Return a tensor with this input for all samples of a micro-batch.

        All elements of the tensor are zero, because estimates of memory and time do not depend on
        values.
        """
        return torch.zeros((batch, *self.shape), dtype=_TYPES[self.type])


@dataclass(frozen=True, slots=True)
class Example:
    """The user's model, and the arguments of its forward pass for one micro-batch.

    Attributes:
        module: The model.
        args: The positional arguments of the model's forward pass.
        kwargs: The keyword arguments of the model's forward pass.
        has_inputs: Whether the user's factory function returned the arguments of the forward pass.
            If ``has_inputs`` is False, the arguments of the forward pass come from the command
            line.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    has_inputs: bool


def made_example(
    factory: str, words: Mapping[str, str], inputs: Sequence[InputSpec], batch: int
) -> Example:
    """Return the model that the user's factory function makes, with inputs for one micro-batch.

    Args:
        factory: A text that names the user's factory function, such as ``package.module:function``
            or ``path/to/file.py:function``.
        words: The keyword arguments of the factory function, as texts. A text that is not a Python
            literal is passed to the factory function as a ``str``.
        inputs: The shapes and types of the model's inputs, if the command line gives them.
        batch: The number of samples of a micro-batch. ``batch`` is used only if the command line
            gives the shapes of the inputs.

    Raises:
        FactoryError: The factory function does not exist, fails, or returns a value of a wrong
            type. The inputs of the model are missing, or both the factory function and the command
            line give inputs.
    """
    function = _function(factory)
    arguments = {name: _value(word) for name, word in words.items()}
    _check_arguments(factory, function, arguments)
    with user_code(factory):
        made = function(**arguments)
    module, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise FactoryError(
            f"{factory} returned {type(made).__name__}: expected a torch.nn.Module, or a tuple of "
            "one and its inputs"
        )
    if given is None:
        if not inputs:
            raise FactoryError(
                f"{factory} returned a module without inputs: give the shape of a sample, as in "
                "--input 3x224x224"
            )
        args = tuple(spec.tensor(batch) for spec in inputs)
        return Example(module, args, {}, has_inputs=False)
    if inputs:
        raise FactoryError(f"{factory} returned its inputs too: leave --input out")
    if isinstance(given, Mapping):
        return Example(module, (), given, has_inputs=True)
    return Example(module, given if isinstance(given, tuple) else (given,), {}, has_inputs=True)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert an exception of the user's code to a ``FactoryError``.

    The message of the ``FactoryError`` contains the traceback lines of the user's code.
    """
    # Unless the logger is disabled, torch's logger would print those lines of the traceback that
    # belong to torch.
    _FAKE_TENSOR_LOG.disabled = True
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USER_S)]
        lines = ["Traceback (most recent call last):\n"] if own else []
        lines += traceback.format_list(own[-_FRAMES:])
        lines += traceback.format_exception_only(error)
        if isinstance(error, DataDependentOutputException):
            lines.append(
                "It reads values of a tensor, and there are none before the model runs: compile it "
                "and ask model.memoryReport()"
            )
        raise FactoryError(f"{what} failed:\n{''.join(lines).rstrip()}") from error
    finally:
        _FAKE_TENSOR_LOG.disabled = False


def _function(factory: str) -> Callable[..., Any]:
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise FactoryError(
            f"{factory!r} names no factory: expected package.module:function or file.py:function"
        )
    found: Any = _loaded_file(Path(where)) if where.endswith(".py") else _loaded_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise FactoryError(f"{where} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise FactoryError(f"{factory} has the type {type(found).__name__}: expected a function")
    function: Callable[..., Any] = found
    return function


def _loaded_module(name: str) -> ModuleType:
    # The current folder becomes part of Python's search path for modules, as with ``python -m``.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise FactoryError(f"there is no module {name}; a file is named with its .py")
    with user_code(name):
        return importlib.import_module(name)


def _loaded_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FactoryError(f"there is no file {path}")
    # The folder of the user's file becomes part of Python's search path, as with ``python FILE``.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with user_code(str(path)):
        spec.loader.exec_module(module)
    return module


def _value(word: str) -> Any:
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _check_arguments(
    factory: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Functions written in C may lack a Python signature. Functions without a Python signature
        # check their own arguments.
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise FactoryError(
            f"{factory}{signature} does not take what --set gives: {error}"
        ) from error


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
    shape = tuple(output.shape)
    if loss == "cross-entropy":  # Dimension 1 of the output contains the classes' scores.
        return torch.zeros((shape[0], *shape[2:]), dtype=torch.int64)
    if loss == "token-cross-entropy":  # The last dimension contains the classes' scores.
        return torch.zeros(shape[:-1], dtype=torch.int64)
    return torch.zeros(shape, dtype=output.dtype)


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
            f"the first output has the shape {tuple(output.shape)}: cross entropy needs classes; "
            "choose --loss mse, or own where the forward returns its loss"
        )
    module, own, compute = example.module, example.module.forward, LOSSES[loss]

    def forward(labels: torch.Tensor, /, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        made = own(*args, **kwargs)
        return made, compute(_first_tensor(made), labels)

    first = inspect.Parameter("labels", inspect.Parameter.POSITIONAL_ONLY)
    others = inspect.signature(own).parameters.values()
    others_named = (p for p in others if p.name != first.name)
    forward.__signature__ = inspect.Signature([first, *others_named])  # type: ignore[attr-defined]
    module.forward = forward
    try:
        yield replace(example, args=(_labels(loss, output), *example.args))
    finally:
        del module.forward


def _first_output(example: Example) -> torch.Tensor:
    """Return a tensor with the shape and type of the model's first output.

    To compute the output's shape and type, the forward pass runs on tensors without values.
    """
    with user_code("the forward"), UnknownValues() as mode, torch.no_grad():
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda tensor: mode.unknown(tensor.shape, tensor.dtype),
            (example.args, dict(example.kwargs)),
        )
        made = example.module(*args, **kwargs)
    found = _first_tensor(made)
    return torch.empty(tuple(found.shape), dtype=found.dtype, device="meta")


def _first_tensor(made: Any) -> torch.Tensor:
    if isinstance(made, torch.Tensor):
        return made
    values = tuple(made.values()) if isinstance(made, Mapping) else made
    if isinstance(values, tuple | list) and values:
        return _first_tensor(values[0])
    raise FactoryError(
        f"the forward returned {type(made).__name__}: a loss needs a tensor, or a tuple or dict of "
        "them; choose --loss own where the forward returns its loss"
    )
