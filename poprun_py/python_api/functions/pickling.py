"""Pickles whose large arrays are not in them: cloudpickle's, with the buffers beside the stream.

What was defined in ``__main__`` (a script, a notebook) or inside a function is pickled by value,
and so is a function of a module that no fresh Python could import. All else travels by name.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PickleBuffer
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# With it came buffers outside of the stream.
_PROTOCOL = 5
_LRU_CACHE = type(functools.cache(abs))
# cloudpickle's list of modules is one for the process.
_registering = threading.Lock()


def pickle_into(file: SupportsWrite[bytes], value: object) -> list[PickleBuffer]:
    """Write the pickle of a value and return the buffers of its arrays, which are not copied.

    Raises:
        Exception: whatever the value's own pickling raises; TypeError or PicklingError mostly.
    """
    buffers: list[PickleBuffer] = []
    _Pickler(file, _PROTOCOL, buffers.append).dump(value)
    return buffers


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, for which torch's tensors on the CPU are buffers as NumPy's arrays are.

    torch itself pickles a storage as a file that torch.save writes, which is two more copies.
    Tensors that share a storage share it after the journey too.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _LRU_CACHE) and _is_of_script(value):
            return _cached_anew, (value.__wrapped__, value.cache_parameters())
        # Whoever has a tensor has imported torch.
        if torch := sys.modules.get("torch"):
            kind = type(value)
            if kind is torch.storage.TypedStorage:
                untyped = value._untyped_storage  # asking for it warns
                return _typed_storage, (value.dtype, untyped)
            if kind is torch.UntypedStorage and value.device.type == "cpu":
                flat = torch.empty(0, dtype=torch.uint8).set_(value)
                return _storage, (torch.uint8, PickleBuffer(flat.numpy()))
            if kind is torch.Tensor and value.device.type == "cpu":
                return _with_typed_storage(value.__reduce_ex__(_PROTOCOL), torch)
        return super().reducer_override(value)


def _with_typed_storage(reduced: tuple[Any, ...], torch: Any) -> tuple[Any, ...]:
    """Return how a tensor is made again, of newer types too: float8, and unsigned ones.

    torch gives these an untyped storage, but on the other side it asks for a typed one, which its
    own pickle of a storage becomes on the way.
    """
    make, (storage, *rest), *state = reduced
    if type(storage) is not torch.UntypedStorage:
        return reduced
    return make, (_typed_storage(torch.uint8, storage), *rest), *state


def _is_of_script(function: Any) -> bool:
    return function.__module__ == "__main__" or "<locals>" in function.__qualname__


def _cached_anew(function: Any, parameters: dict[str, Any]) -> Any:
    """Return a function with an empty ``functools.lru_cache`` of its own."""
    return functools.lru_cache(**parameters)(function)


def _storage(uint8: object, buffer: Any) -> Any:
    """Return the storage of a tensor whose bytes are those of a buffer."""
    torch = sys.modules["torch"]  # imported for uint8
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=uint8).untyped_storage()


def _typed_storage(dtype: object, untyped: Any) -> Any:
    storage = sys.modules["torch"].storage
    return storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


@contextmanager
def with_its_module(function: object) -> Iterator[None]:
    """Pickle a function's module by value in the block if a fresh Python could not import it."""
    named = function if hasattr(function, "__module__") else type(function)
    module = sys.modules.get(getattr(named, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_importable(module):
        yield
        return
    with _registering:
        is_ours = module.__name__ not in cloudpickle.list_registry_pickle_by_value()
        if is_ours:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if is_ours:
                cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Tell whether a Python with this one's module path finds the same module by its name."""
    found, path, name = None, None, ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        found = next(filter(None, specs), None)
        if found is None:
            return False
        path = found.submodule_search_locations
    return found is not None and found.origin == getattr(module.__spec__, "origin", None)
