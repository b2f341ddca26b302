"""Subclasses of module and tensor classes that copy newer weights to the host before a read.

While ``trainingModel()`` wraps a module, subclasses replace the classes of the module and of its
tensors. Modules and tensors of these subclasses copy newer weights from the device to the host
before every read of a tensor's numbers. Copies and pickles of a wrapped module, and of its tensors,
have the original classes. The module ``device_state.py`` contains the device's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from popdist_py.poptorch.weights.replica_grouping import GroupableParameter

__all__ = ["is_wrapped", "shallow_copy", "watch"]

Fetch = Callable[[], bool]

# Torch functions that do not read a tensor's numbers. Before a call of these functions, newer
# weights are not copied to the host.
_METADATA: Final = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "ndim")
) | {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point}


def is_wrapped(module: nn.Module) -> bool:
    """Tell whether ``module`` is wrapped for training."""
    return hasattr(type(module), "_poptorch_fetch")


def watch(module: nn.Module, fetch: Fetch, destroy: Callable[[], None]) -> Callable[[], None]:
    """Call ``fetch`` before every read of a tensor of ``module``.

    Several wrapped modules may share a tensor. A read of a shared tensor calls the ``fetch``
    functions of all modules that share the tensor.

    Args:
        module: The user's module, whose class and whose tensors' classes are replaced.
        fetch: A function that copies newer weights from the device to the host.
        destroy: The function that the new method ``module.destroy()`` calls.

    Returns:
        A function that ends the calls of ``fetch`` and restores the class of ``module``.
    """
    tensors = [*module.parameters(), *module.buffers()]
    kind = type(module)
    _change_fetches(tensors, lambda fetches: (*fetches, fetch))
    watched = _watched_module(kind, fetch, destroy)
    module.__class__ = watched

    def unwatch_all() -> None:
        _change_fetches(tensors, lambda fetches: tuple(f for f in fetches if f != fetch))
        if type(module) is watched:
            module.__class__ = kind

    return unwatch_all


def _change_fetches(
    tensors: Iterable[Any], change: Callable[[tuple[Fetch, ...]], tuple[Fetch, ...]]
) -> None:
    """Change the functions that copy newer weights to the host before a read of the tensors.

    Args:
        tensors: The tensors of wrapped modules, whose classes are replaced.
        change: A function that gets the present ``fetch`` functions of a tensor and returns the new
            functions.
    """
    classes: dict[Any, type] = {}
    for tensor in tensors:
        kind = type(tensor)
        plain, fetches = getattr(kind, "_plain", kind), change(getattr(kind, "_fetches", ()))
        if (plain, fetches) not in classes:
            classes[plain, fetches] = _watched_tensor(plain, fetches) if fetches else plain
        tensor.__class__ = classes[plain, fetches]


def _watched_tensor(plain: type, fetches: tuple[Fetch, ...]) -> type:
    """Return a subclass of a tensor class that calls ``fetches`` before every operation."""
    is_parameter = issubclass(plain, nn.Parameter)
    return type(
        "PoptorchParameter" if is_parameter else "PoptorchBuffer",
        (_WatchedTensor, GroupableParameter if plain is nn.Parameter else plain),
        {"_plain": plain, "_fetches": fetches, "is_watched_buffer": not is_parameter},
    )


class _WatchedTensor:
    """Methods that call the ``fetch`` functions before a read of a wrapped module's tensors."""

    _fetches: tuple[Fetch, ...] = ()
    is_watched_buffer = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _METADATA:
            for fetch in cls._fetches:
                fetch()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fresh(self) -> torch.Tensor:
        """Return a tensor of the original class with the newest values, in the same memory."""
        for fetch in self._fetches:
            fetch()
        with torch._C.DisableTorchFunctionSubclass():
            plain: torch.Tensor = self.detach()  # type: ignore[attr-defined]
            if self.is_watched_buffer:
                return plain
            return nn.Parameter(plain, self.requires_grad)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._fresh())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._fresh().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._fresh())


def _new_object(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a new module object with the same attributes as ``module``.

    Unlike ``copy.copy()``, ``shallow_copy`` also supports parametrised modules
    (``torch.nn.utils.parametrize``).
    """
    if not is_parametrized(module):
        return copy.copy(module)
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    return twin


def plain_class(module: nn.Module) -> type:
    """Return the original class of a module whose class :func:`watch` may have replaced."""
    kind = type(module)
    return kind.__mro__[1] if "_poptorch_fetch" in vars(kind) else kind


def _watched_module(kind: type, fetch: Fetch, destroy: Callable[[], None]) -> Any:
    """Return a subclass of a module class for :func:`watch`.

    Copies and pickles of the subclass's objects have the original module class ``kind``.
    """

    def reduce(self: Any, protocol: int) -> Any:
        fetch()
        function, arguments, *rest = super(watched, self).__reduce_ex__(protocol)
        plain = tuple(kind if argument is watched else argument for argument in arguments)
        # The pickle module accepts ``copyreg.__newobj__`` only if its first argument is the class
        # of the pickled object. The first argument is ``kind`` (the original class), but the class
        # of the pickled object is ``watched``.
        return (_new_object if function.__name__ == "__newobj__" else function, plain, *rest)

    watched: Any = type(
        f"Poptorch{kind.__name__}",
        (kind,),
        {
            "__module__": kind.__module__,
            "__reduce_ex__": reduce,
            "_poptorch_fetch": staticmethod(fetch),
            "destroy": lambda _: destroy(),
            "copyWeightsToHostIfNeeded": lambda _: fetch(),
        },
    )
    return watched
