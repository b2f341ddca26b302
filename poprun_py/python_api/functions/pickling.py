"""Pickling with large arrays in separate buffers, and the search for unpicklable parts of a value.

cloudpickle pickles by value the functions and classes that are defined in ``__main__`` (a script or
a notebook) or inside a function. ``with_its_module`` makes cloudpickle also pickle by value a
function of a module that a new Python process could not import. cloudpickle pickles all other
functions and classes by name.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PickleBuffer
from types import ModuleType
from typing import Any

import cloudpickle

# Pickle protocol 5 is the first protocol that can keep buffers outside of the pickle.
_PROTOCOL = 5
_LRU_CACHE = type(functools.cache(abs))
# A lock for cloudpickle's list of modules to pickle by value, which all threads share.
_module_list_lock = threading.Lock()
# The most levels of nesting that the search for an unpicklable part visits.
_MOST_LEVELS = 4


def pickled(value: object) -> list[list[bytes | memoryview]]:
    """Pickle a value; return the pickle's stream in chunks, then the bytes of each array.

    The arrays and long ``bytes`` of the value are not copied.

    Raises:
        Exception: Any exception that pickling the value raises, mostly TypeError or PicklingError.
    """
    stream = _Chunks()
    buffers: list[PickleBuffer] = []
    _Pickler(stream, _PROTOCOL, buffers.append).dump(value)
    parts = [stream.chunks]
    parts += ([buffer.raw()] for buffer in buffers)
    return parts


class _Chunks:
    """A file for a pickler, which passes long ``bytes`` objects to ``write`` without a copy."""

    def __init__(self) -> None:
        self.chunks: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        # Copy data that is not ``bytes``, because its memory may change or be freed before the
        # chunks are written.
        self.chunks.append(data if isinstance(data, bytes) else bytes(data))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that stores torch's CPU tensors as buffers, as NumPy does with arrays.

    torch itself would write each storage with torch.save, which copies the data twice. Tensors
    that share a storage still share it after unpickling.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _LRU_CACHE) and _is_pickled_by_value(value):
            return _with_empty_cache, (value.__wrapped__, value.cache_parameters())
        # The value can only be a tensor if torch has been imported.
        if torch := sys.modules.get("torch"):
            kind = type(value)
            if kind is torch.storage.TypedStorage:
                untyped = value._untyped_storage  # ``value.untyped()`` prints a warning
                return _typed_storage, (value.dtype, untyped)
            if kind is torch.UntypedStorage and value.device.type == "cpu":
                flat = torch.empty(0, dtype=torch.uint8).set_(value)
                return _storage, (torch.uint8, PickleBuffer(flat.numpy()))
            if kind is torch.Tensor and value.device.type == "cpu":
                return _with_typed_storage(value.__reduce_ex__(_PROTOCOL), torch)
        return super().reducer_override(value)


def _with_typed_storage(reduced: tuple[Any, ...], torch: Any) -> tuple[Any, ...]:
    """Return the result of a tensor's ``__reduce_ex__`` with a typed instead of an untyped storage.

    For newer dtypes (float8 and unsigned integers), torch pickles an untyped storage but expects a
    typed storage when it unpickles.
    """
    make, (storage, *rest), *state = reduced
    if type(storage) is not torch.UntypedStorage:
        return reduced
    return make, (_typed_storage(torch.uint8, storage), *rest), *state


def _is_pickled_by_value(function: Any) -> bool:
    return function.__module__ == "__main__" or "<locals>" in function.__qualname__


def _with_empty_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _storage(uint8: object, buffer: Any) -> Any:
    """Return a torch storage whose memory is the buffer."""
    torch = sys.modules["torch"]  # unpickling the argument ``uint8`` has imported torch
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=uint8).untyped_storage()


def _typed_storage(dtype: object, untyped: Any) -> Any:
    storage = sys.modules["torch"].storage
    return storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


@contextmanager
def with_its_module(function: object) -> Iterator[None]:
    """If a new process could not import a function's module, pickle it by value inside ``with``."""
    named = function if hasattr(function, "__module__") else type(function)
    module = sys.modules.get(getattr(named, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_importable(module):
        yield
        return
    with _module_list_lock:
        is_new = module.__name__ not in cloudpickle.list_registry_pickle_by_value()
        if is_new:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if is_new:
                cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Return whether a new Python process with the same ``sys.path`` could import a module."""
    found, path, name = None, None, ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        found = next(filter(None, specs), None)
        if found is None:
            return False
        path = found.submodule_search_locations
    return found is not None and found.origin == getattr(module.__spec__, "origin", None)


# --- search for the part of a value that cannot be pickled ------------------------------------


def pickling_problem(value: object) -> str:
    """Return the reason why a value cannot be pickled; empty if it can be pickled."""
    try:
        pickled(value)
    except Exception as error:
        return error_words(error)
    return ""


def path_to_problem(value: object, levels: int = _MOST_LEVELS) -> str:
    """Return the path to the part of a value that cannot be pickled, such as ``['model'].lock``.

    If every part of the value can be pickled by itself, the path is empty.
    """
    for step, part in _parts(value) if levels else ():
        if pickling_problem(part):
            return step + path_to_problem(part, levels - 1)
    return ""


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from ((f".{key}", part) for key, part in attributes.items())


def error_words(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if the message is empty."""
    return first_line(error) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; empty if ``str(error)`` fails."""
    try:
        return (str(error).splitlines() or [""])[0]
    except Exception:
        return ""
