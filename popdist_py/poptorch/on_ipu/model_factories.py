"""Functions that make the user's model and a micro-batch from a command line's arguments.

The command line names a function of the user as ``module:function``. The user's function, which
makes the model, is called the factory function. An exception of the user's code becomes a
``FactoryError``. The module ``model_losses`` adds a loss to the user's model.
"""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from popdist_py.poptorch.on_ipu.factory_functions import factory_function
from popdist_py.poptorch.on_ipu.user_failures import FactoryError, user_code

__all__ = ["Example", "InputSpec", "made_example"]

# A tensor must have fewer bytes than 2**63, and an element has 8 bytes at most.
_MOST_ELEMENTS: Final = 2**60
_TYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in (
            *("float32", "float16", "float64", "bfloat16"),
            *("int64", "int32", "int16", "int8", "uint8", "bool"),
        )
    }
)


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
            raise ValueError(
                f"{word!r} is not the shape of a sample: expected sizes, such as 3x224x224, and "
                "optionally a type, such as 3x224x224:float16"
            )
        if type_ and type_ not in _TYPES:
            raise ValueError(
                f"{type_!r} is not a data type of a model input: expected {', '.join(_TYPES)}"
            )
        return cls(sizes, type_ or "float32")

    def tensor(self, batch: int) -> torch.Tensor:
        """Return a tensor with this input for all samples of a micro-batch.

        All elements of the tensor are zero, because estimates of memory and time do not depend on
        values. The elements share the memory of one element, so that a large batch needs no memory.
        """
        return torch.zeros((), dtype=_TYPES[self.type]).expand((batch, *self.shape))


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

    @property
    def described(self) -> str:
        """A sentence with the shapes and types of the inputs, for error messages."""
        shapes = [
            f"{'x'.join(map(str, leaf.shape))}:{str(leaf.dtype)[6:]}"
            for leaf in tree_leaves((self.args, dict(self.kwargs)))
            if isinstance(leaf, torch.Tensor)
        ]
        return f"The shapes of the model's inputs, micro-batch first: {', '.join(shapes)}"


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
    made = _made(factory, words)
    found, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    module = _unwrapped(found)
    _check_module(factory, module, made)
    if given is None:
        if not inputs:
            raise FactoryError(
                f"{factory} returned a module without inputs: give the shape of one sample of "
                "each input, as in --input 3x224x224"
            )
        example = Example(module, _tensors(inputs, batch), {}, has_inputs=False)
        sample = Example(module, _tensors(inputs, 1), {}, has_inputs=False)
    else:
        example = sample = _with_given(factory, module, given)
        if inputs:
            raise FactoryError(
                f"--input cannot be used, because {factory} also returned the module's inputs: "
                "remove --input"
            )
    _check_call(example)
    _initialise(sample)
    return example


def _made(factory: str, words: Mapping[str, str]) -> Any:
    """Return the value of the factory function; a module that is no function is its own value."""
    function = factory_function(factory)
    if isinstance(function, nn.Module):
        if words:
            raise FactoryError(
                f"--set cannot be used, because {factory} is a module and not a function: remove "
                "--set"
            )
        return function
    arguments = {name: _value(word) for name, word in words.items()}
    _check_arguments(factory, function, arguments)
    with user_code(factory):
        return function(**arguments)


def _tensors(inputs: Sequence[InputSpec], batch: int) -> tuple[torch.Tensor, ...]:
    if any(batch * prod(spec.shape) > _MOST_ELEMENTS for spec in inputs):
        raise FactoryError(
            f"--batch {batch} makes an input tensor of more than 2**63 bytes: give a smaller "
            "--batch, or a smaller shape with --input"
        )
    return tuple(spec.tensor(batch) for spec in inputs)


def _with_given(factory: str, module: nn.Module, given: Any) -> Example:
    """Return an ``Example`` with the inputs that the factory function returned.

    Raises:
        FactoryError: The factory function returned inputs without a tensor.
    """
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(given)):
        raise FactoryError(
            f"{factory} returned a module together with {_named(given)}: expected the module's "
            "inputs, which are a tensor, a tuple, or a dict of keyword arguments"
        )
    if isinstance(given, Mapping):
        return Example(module, (), given, has_inputs=True)
    return Example(module, given if isinstance(given, tuple) else (given,), {}, has_inputs=True)


def _named(value: Any) -> str:
    return (
        f"the class {value.__name__}"
        if isinstance(value, type)
        else f"an object of the type {type(value).__name__}"
    )


def _unwrapped(module: Any) -> Any:
    """Return the module inside wrappers of torch that an IPU does not need.

    The names of the module's submodules then do not begin with a name of the wrapper.
    """
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(module, nn.Module) and "_orig_mod" in module._modules:  # torch.compile
            module = module._orig_mod
        else:
            return module


def _check_module(factory: str, module: Any, made: Any) -> None:
    """Check that a factory function returned a module whose forward pass can be traced.

    Raises:
        FactoryError: The value is not a module, or the module was scripted or quantized.
    """
    if not isinstance(module, nn.Module):
        hint = ""
        if isinstance(made, type) and issubclass(made, nn.Module):
            hint = f"; return an instance, as in {made.__name__}(...)"
        elif isinstance(getattr(made, "_user_model", None), nn.Module):
            hint = "; return the module that the program gives to poptorch"
        raise FactoryError(
            f"{factory} returned {_named(made)}: expected a torch.nn.Module, or a tuple of a "
            f"module and its inputs{hint}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise FactoryError(
            f"{factory} returned a torch.jit.ScriptModule, whose operations have no module names: "
            "return the original module, without torch.jit.script or torch.jit.trace"
        )
    for name, part in module.named_modules():
        kind = type(part)
        if kind.__module__.startswith("torch.") and "quantized" in kind.__module__.split("."):
            raise FactoryError(
                f"{name or factory} is a quantized {kind.__name__} module, but PopTorch does not "
                "support quantized weights: return the original module, without quantization"
            )


def _check_call(example: Example) -> None:
    """Check that the module's forward method accepts the number of inputs.

    Raises:
        FactoryError: The forward method does not accept the inputs.
    """
    try:
        signature = inspect.signature(example.module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*example.args, **example.kwargs)
    except TypeError as error:
        hint = "return an input" if example.has_inputs else "give --input once"
        raise FactoryError(
            f"the model's forward has the signature {signature}, which does not match the inputs "
            f"({error}): {hint} for each argument"
        ) from error


def _initialise(sample: Example) -> None:
    """Give sizes to the weights of lazy modules, by running the forward pass with values."""
    module = sample.module
    if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return
    modes = [(part, part.training) for part in module.modules()]
    # In evaluation mode, batch norms accept one sample, and keep their statistics.
    module.eval()
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (sample.args, dict(sample.kwargs)))
    with user_code("the model's forward", sample.described), torch.no_grad():
        module(*args, **kwargs)
    for part, was_training in modes:
        part.training = was_training


def _value(word: str) -> Any:
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
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
        missing = str(error).partition("missing a required argument: ")[2].strip("'")
        hint = f"; give --set {missing}=VALUE" if missing else ""
        raise FactoryError(
            f"the arguments of --set do not match {factory}{signature}: {error}{hint}"
        ) from error
