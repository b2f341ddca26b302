"""Functions (hooks) that a program registers to run before or after every model compilation."""

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
    """Register a function that is called before every compilation of a model.

    Args:
        hook: The function to call before a compilation, without arguments.

    Returns:
        A handle, whose method remove() unregisters the function.

    Raises:
        RuntimeError: ``hook`` is not callable.
    """
    return _register(_before, hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Register a function that is called after every compilation of a model.

    Args:
        hook: The function to call after a compilation, without arguments.

    Returns:
        A handle, whose method remove() unregisters the function.

    Raises:
        RuntimeError: ``hook`` is not callable.
    """
    return _register(_after, hook)


def before_compile() -> None:
    """Call the registered functions for the start of a compilation, the oldest first."""
    for hook in list(_before.values()):
        hook()


def after_compile() -> None:
    """Call the registered functions for the end of a compilation, the oldest first."""
    for hook in list(_after.values()):
        hook()
