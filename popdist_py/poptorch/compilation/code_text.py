"""What decides what a module's forward does, as text: its settings, and the code it can reach.

Tensors, which weights are, are named by their shapes and formats. Of Python's library, torch and
this package only the names count: their versions say the rest. The code of other libraries counts
where it is called directly; to look further takes seconds.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from popdist_py.poptorch.weights.watched_module import plain_class

__all__ = ["code_text"]

_PLAIN: Final = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, Path, range)
_VERSIONED: Final = sys.stdlib_module_names | {"torch", "popdist_py"}
_LIBRARIES: Final = ("site-packages", "dist-packages")
# Attributes that every module has: what they hold has a name of its own, or does not compute.
_OF_ALL_MODULES: Final = frozenset(vars(nn.Module()))
_Code = FunctionType | type


def code_text(model: nn.Module) -> list[str]:
    """Return the settings of each module of a model, and all code that their classes lead to.

    Settings are attributes: numbers, strings and the like, functions, and collections, data classes
    and namespaces of these. Objects of other classes are named by their class alone.
    """
    reached = _Reached()
    settings = [
        f"{name}.{key} = {reached.text(value)}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_ALL_MODULES
    ]
    classes = [reached.text(plain_class(module)) for module in model.modules()]
    return [*settings, *classes, *reached.made_of()]


class _Reached:
    """The functions and classes met so far."""

    def __init__(self) -> None:
        self._met: list[_Code] = []
        self._numbers: dict[int, int] = {}  # by identity: a class may have no hash
        self._parents: list[int] = []

    def made_of(self) -> Iterator[str]:
        """Yield what all functions and classes do, with those that they lead to."""
        for value in self._met:  # which grows meanwhile
            made = _of_function(value) if isinstance(value, FunctionType) else _of_class(value)
            yield from map(self.text, made)

    def text(self, value: Any) -> str:
        """Return a text that is the same in every process, and note the code that it leads to."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, MethodType):
            return self.text(value.__func__)
        if isinstance(value, FunctionType | type):
            return self._code(value)
        if id(value) in self._parents:
            return "..."
        self._parents.append(id(value))
        try:
            return f"{_name(type(value))}({', '.join(self._parts(value))})"
        finally:
            self._parents.pop()

    def _parts(self, value: Any) -> list[str]:
        if isinstance(value, set | frozenset):
            return sorted(map(self.text, value))
        if isinstance(value, partial):
            value = [value.func, value.args, value.keywords]
        elif isinstance(value, SimpleNamespace | Namespace):
            value = list(vars(value).items())
        elif isinstance(value, dict):
            value = list(value.items())
        elif dataclasses.is_dataclass(value):
            value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return [self.text(item) for item in value] if isinstance(value, list | tuple) else []

    def _code(self, value: _Code) -> str:
        """Return the name of a function or class, with a number for those that are looked into."""
        if str(value.__module__).partition(".")[0] in _VERSIONED:
            return _name(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return f"{_name(value)} {self._numbers[id(value)]}"


def _of_class(kind: type) -> Iterator[Any]:
    yield kind.__bases__
    for name, value in vars(kind).items():
        if isinstance(value, property):
            yield name, value.fget, value.fset
        elif isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif name not in ("__doc__", "__dict__", "__weakref__"):
            yield name, value


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield function.__defaults__, function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
    is_library = any(place in function.__code__.co_filename for place in _LIBRARIES)
    yield from _of_instructions(function.__code__, {} if is_library else function.__globals__)


def _of_instructions(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield what a piece of code does, with what it finds under the names that it uses."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_instructions(constant, names)
        else:
            yield constant
    for name in code.co_names:
        value = names.get(name)
        yield name, value
        if isinstance(value, ModuleType):
            inside = vars(value)
            found = [inside[other] for other in code.co_names if other in inside]
            yield [item for item in found if isinstance(item, FunctionType | type)]


def _name(value: _Code) -> str:
    return f"{value.__module__}.{value.__qualname__}"
