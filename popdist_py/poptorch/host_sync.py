"""The user's module while it is wrapped: reading it fetches what the device has learnt.

The module and its tensors get a subclass of their class that fetches before a read; copies and
pickles are plain again. Which tensors live where on the device is ``device_state.py``'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from popdist_py.poptorch.grouping import GroupableParameter

__all__ = ["is_wrapped", "watch"]

Fetch = Callable[[], bool]

# Reading these says nothing of a tensor's values.
_METADATA: Final = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "ndim")
) | {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point}


def is_wrapped(module: nn.Module) -> bool:
    """Tell whether ``module`` is wrapped for training."""
    return hasattr(type(module), "_poptorch_fetch")


def watch(module: nn.Module, fetch: Fetch, destroy: Callable[[], None]) -> Callable[[], None]:
    """Call ``fetch`` before every read of ``module``'s tensors; return how to end that."""
    changed: list[tuple[Any, type]] = []
    classes: dict[type, type] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        kind = type(tensor)
        if isinstance(tensor, nn.Parameter):
            base = kind if issubclass(kind, GroupableParameter) else _groupable(kind)
        else:
            base = kind
        watched = classes.setdefault(kind, _watched_tensor(base, fetch))
        tensor.__class__ = watched
        changed.append((tensor, kind))
    changed.append((module, type(module)))
    module.__class__ = _watched_module(type(module), fetch, destroy)
    ours = {*classes.values(), type(module)}

    def unwatch_all() -> None:
        for value, original in changed:
            if type(value) in ours:
                value.__class__ = original

    return unwatch_all


def _groupable(kind: type) -> type:
    return GroupableParameter if kind is nn.Parameter else kind


def _watched_tensor(base: type, fetch: Fetch) -> type:
    """Return a subclass of a tensor class that fetches before every operation."""
    is_parameter = issubclass(base, nn.Parameter)
    return type(
        "PoptorchParameter" if is_parameter else "PoptorchBuffer",
        (_WatchedTensor, base),
        {
            "_fetches": (*getattr(base, "_fetches", ()), fetch),
            "is_watched_buffer": not is_parameter,
        },
    )


class _WatchedTensor:
    """What a watched parameter or buffer does differently from a plain one."""

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
        """Return a plain parameter or buffer that shares this one's memory."""
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


def _watched_module(kind: type, fetch: Fetch, destroy: Callable[[], None]) -> Any:
    """Return a subclass of a module class whose copies and pickles are of the class itself."""

    def reduce(self: Any, protocol: int) -> Any:
        fetch()
        function, arguments, *rest = super(watched, self).__reduce_ex__(protocol)
        plain = tuple(kind if argument is watched else argument for argument in arguments)
        # pickle checks that copyreg's own function makes an object of the class it is given.
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
