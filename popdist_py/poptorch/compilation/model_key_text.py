"""The function ``code_text``, which returns a model's settings and code as text for the cache key.

The text about a model is a part of the model's key in the cache of executables (compiled models).
The text about a model contains the code that the forward pass can call, except code of libraries in
two cases. For parameters and buffers, the text about a model contains only shapes and dtypes.
Functions of Python's standard library, torch and ``popdist_py`` are included only by name, because
the key of a model in the cache contains the versions of these packages. Code of other libraries is
included in the text about a model only if the model calls the code directly. A search through all
functions that the code of other libraries calls would take seconds.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from popdist_py.poptorch.weights.copy_before_read import plain_class

__all__ = ["code_text"]

_PLAIN: Final = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, Path, range, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS: Final = (list, tuple, dict, MappingProxyType, set, frozenset)
_MAPPINGS: Final = (dict, MappingProxyType)
_NAMESPACES: Final = (SimpleNamespace, Namespace)
_VERSIONED: Final = sys.stdlib_module_names | {"torch", "popdist_py"}
_LIBRARIES: Final = ("site-packages", "dist-packages")
# The names of the attributes that every module has. These attributes, which every module has,
# either appear elsewhere in the cache key of a model, or do not affect the computation.
_OF_ALL_MODULES: Final = frozenset(vars(nn.Module()))
# The names of the attributes in ``_OF_ALL_MODULES`` that are described if a module is not a
# submodule, but is stored in another object.
_OWN: Final = ("training", "_parameters", "_buffers", "_modules")
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_Code = FunctionType | type


def code_text(model: nn.Module) -> list[str]:
    """Return texts for the settings of a model's modules and for the code that they can call.

    The settings of a module are its attributes and its hooks. An attribute of a module may be a
    number or string, a constant tensor, a function, or a collection or object that contains
    numbers, strings, tensors or functions. If pickle cannot handle an object, for example a lock,
    the text contains only the object's class.
    """
    reached = _Reached(set(map(id, model.buffers())))
    settings = [
        f"{name}.{key} = {reached.text(value)}"
        for name, module in model.named_modules()
        for key, value in _settings(module)
    ]
    classes = [reached.text(plain_class(module)) for module in model.modules()]
    return [*settings, *classes, *reached.made_of()]


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's hooks, and its attributes that a plain ``nn.Module`` lacks, by name."""
    attributes = vars(module)
    hooks = [(name, list(attributes[name].values())) for name in _HOOKS if attributes.get(name)]
    return [*((k, v) for k, v in attributes.items() if k not in _OF_ALL_MODULES), *hooks]


class _Reached:
    """The functions, classes and objects that were found in a model so far."""

    def __init__(self, buffers: set[int]) -> None:
        # The ``id`` numbers of the model's buffers. The text about a model must not contain the
        # numbers in buffers, because these numbers change during training.
        self._buffers = buffers
        self._met: list[Any] = []
        # The number that each found function, class or object gets in the text, keyed by its
        # ``id``. The keys of the dictionary are ``id`` numbers, because some objects do not have a
        # hash.
        self._numbers: dict[int, int] = {}
        self._parents: list[int] = []
        self._is_in_library = False

    def made_of(self) -> Iterator[str]:
        """Yield texts for the contents of the functions, classes and objects that a model uses."""
        # The method ``text`` appends to the list ``_met`` while the loop over ``_met`` runs.
        for value in self._met:
            self._is_in_library = isinstance(value, _Code) and _is_of_library(value)
            yield from map(self.text, _made_of(value))

    def text(self, value: Any) -> str:
        """Return the text for an attribute's value, and register its functions and objects.

        The text that stands for an attribute's value in a cache key is the same in every process.
        """
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, memoryview | ContextVar):
            return self.text(_content(value))
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, BuiltinFunctionType):
            return f"{value.__qualname__} of {self.text(value.__self__)}"
        if isinstance(value, _Code):
            return self._code(value)
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        return self._object(value)

    def _tensor(self, tensor: torch.Tensor) -> str:
        try:
            text = f"{tuple(tensor.shape)} {tensor.dtype}"
            is_weight = isinstance(tensor, nn.Parameter) or id(tensor) in self._buffers
            if is_weight or tensor.layout != torch.strided or tensor.device.type != "cpu":
                return text
            # The numbers in a constant tensor are included in the text, because Python code of a
            # forward pass may read the numbers.
            values = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
            return f"{text} {_digest(values.view(torch.uint8).numpy())}"
        except RuntimeError:  # Some subclasses of Tensor do not allow access to their values.
            return _name(type(tensor))

    def _array(self, array: np.ndarray[Any, Any]) -> str:
        if array.dtype.hasobject:
            return self.text(array.tolist())
        return f"{array.shape} {array.dtype} {_digest(np.ascontiguousarray(array))}"

    def _container(self, value: Any) -> str:
        if id(value) in self._parents:
            return "..."
        self._parents.append(id(value))
        try:
            if isinstance(value, set | frozenset):
                # Found objects are numbered in the order of their discovery. The iteration order of
                # a Python set differs between processes, so the items of a set are sorted.
                parts = sorted(value, key=lambda item: (_name(type(item)), _sort_text(item)))
            else:
                parts = list(value.items()) if isinstance(value, _MAPPINGS) else list(value)
            attributes = [] if type(value) in _CONTAINERS else _attributes(value)
            texts = [self.text(item) for item in (*parts, *attributes)]
            return f"{_name(type(value))}({', '.join(texts)})"
        finally:
            self._parents.pop()

    def _object(self, value: Any) -> str:
        kind = plain_class(value) if isinstance(value, nn.Module) else type(value)
        if self._is_in_library:
            return _name(kind)
        return f"{self.text(kind)} object {self._number(value)}"

    def _code(self, value: _Code) -> str:
        """Return the name of a function or class.

        If the cache key also contains the code of the function or class, the name contains the
        number of the function or class in the key.
        """
        if _is_versioned(value) and not getattr(value, "__closure__", None):
            return _name(value)
        return f"{_name(value)} {self._number(value)}"

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return self._numbers[id(value)]


def _made_of(value: Any) -> Iterable[Any]:
    if isinstance(value, FunctionType):
        return _of_function(value)
    return _of_class(value) if isinstance(value, type) else _of_object(value)


def _is_versioned(value: _Code) -> bool:
    return str(value.__module__).partition(".")[0] in _VERSIONED


def _is_of_library(value: _Code) -> bool:
    if isinstance(value, FunctionType):
        file: Any = value.__code__.co_filename
    else:
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return any(place in str(file) for place in _LIBRARIES)


def _sort_text(value: Any) -> str:
    if isinstance(value, _Code):
        return _name(value)
    return repr(value) if isinstance(value, _PLAIN) else ""


def _of_object(value: Any) -> list[Any]:
    """Return the data that determine how an object behaves, such as its attributes."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module):
        return [*_settings(value), *((name, vars(value)[name]) for name in _OWN)]
    if "__wrapped__" in (inner := _dictionary(value)):
        return [inner["__wrapped__"]]  # For example, functools.cache sets ``__wrapped__``.
    if isinstance(value, _NAMESPACES) or not _is_versioned(type(value)):
        attributes = _attributes(value)
        if attributes:
            return attributes
    # The text does not contain the ``id`` of a hook's handle, because the ``id`` differs in every
    # run.
    if isinstance(value, RemovableHandle):
        return []
    # For other objects, for example dates or functions written in C, the text contains the data
    # that pickle would store.
    kind: Any = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            return [reduced]
        return [list(part) if isinstance(part, Iterator) else part for part in reduced]
    except Exception:  # The pickle module may raise any exception for an object of the user.
        return []


def _dictionary(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    # If a class defines __getattr__, the value of ``__dict__`` may have any type.
    return found if isinstance(found, dict) else {}


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, including its ``__slots__``."""
    found = list(_dictionary(value).items())
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and not _is_versioned(kind):
                # An attribute whose name is in ``__slots__`` may lack a value.
                with suppress(AttributeError):
                    found.append((name, slot.__get__(value, kind)))
    return found


def _of_class(kind: type) -> Iterator[Any]:
    yield kind.__bases__
    for name, value in vars(kind).items():
        if isinstance(value, property):
            yield name, value.fget, value.fset
        elif isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        # The pickle module adds the attribute __slotnames__ to a class, so the text about a class
        # does not contain __slotnames__.
        elif name not in ("__doc__", "__dict__", "__weakref__", "__slotnames__"):
            yield name, value


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield function.__defaults__, function.__kwdefaults__
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # The cell of a closure may be empty.
            yield cell.cell_contents
    if _is_versioned(function):
        return
    names = {} if _is_of_library(function) else function.__globals__
    yield from _of_instructions(function.__code__, names)


def _of_instructions(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield a code object's instructions and constants, and the values of its global names."""
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


def _content(value: memoryview | ContextVar[Any]) -> Any:
    """Return the bytes or values that an object contains, for objects that cannot be pickled."""
    if isinstance(value, memoryview):
        return value.tobytes()
    with suppress(LookupError):
        return value.name, value.get()
    return (value.name,)


def _digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def _name(value: _Code) -> str:
    return f"{value.__module__}.{value.__qualname__}"
