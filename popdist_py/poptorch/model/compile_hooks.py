"""Functions that programs want called before and after every compilation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["after_compile", "before_compile", "registerPostCompileHook", "registerPreCompileHook"]

Hook = Callable[[], Any]

_before: OrderedDict[int, Hook] = OrderedDict()
_after: OrderedDict[int, Hook] = OrderedDict()


def _register(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compilation hook must be callable, got {type(hook)}")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Call ``hook()`` before every compilation; returns a handle whose remove() ends that.

    Raises:
        RuntimeError: ``hook`` is not callable.
    """
    return _register(_before, hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Call ``hook()`` after every compilation; returns a handle whose remove() ends that.

    Raises:
        RuntimeError: ``hook`` is not callable.
    """
    return _register(_after, hook)


def before_compile() -> None:
    """Run the hooks of the time before compiling, in order of registration."""
    for hook in list(_before.values()):
        hook()


def after_compile() -> None:
    """Run the hooks of the time after compiling, in order of registration."""
    for hook in list(_after.values()):
        hook()
