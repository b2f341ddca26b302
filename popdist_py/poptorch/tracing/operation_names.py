"""Names of a forward's operations: the name scopes around each one, then what it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from popdist_py.poptorch.tracing.current_forward import current_watch

__all__ = ["OperationNames"]


class OperationNames:
    """Gives every operation of one forward a name of its own.

    ``fc/0/linear`` is an operation of the module ``fc.0``; a second one there is
    ``fc/0/linear/1``.

    Args:
        module: whose submodules are name scopes; None for none.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._scopes: list[str] = []
        self._count: Counter[str] = Counter()
        self._paths = {} if module is None else {id(m): p for p, m in module.named_modules()}
        self._open: list[str] = []

    @property
    def module(self) -> str:
        """The path of the submodule whose forward runs; empty for the model's own."""
        return self._open[-1] if self._open else ""

    def begin_scope(self, name: str) -> None:
        """Put ``name`` before the names of the operations from here on."""
        self._scopes.append(name)

    def end_scope(self) -> None:
        """End the scope that began last."""
        self._scopes.pop()

    def next(self, func: Callable[..., Any]) -> str:
        """Return the name of an operation that is done now."""
        name = "/".join([*self._scopes, getattr(func, "__name__", str(func)).strip("_")])
        self._count[name] += 1
        count = self._count[name] - 1
        return f"{name}/{count}" if count else name

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Let each submodule be a scope while its forward runs."""
        with ExitStack() as stack:
            for hook in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(hook.remove)
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        path = self._path_of(module)
        if path:
            # Below the module around it, whose own path is there already.
            outer = self._open[-1] + "." if self._open else ""
            self.begin_scope(path.removeprefix(outer).replace(".", "/"))
            self._open.append(path)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._path_of(module):
            self._open.pop()
            self.end_scope()

    def _path_of(self, module: nn.Module) -> str | None:
        """Return the path of a submodule of the forward that is followed; else None or empty.

        Hooks of modules are the process's, and forwards of replicas that run in turns are open at
        the same time.
        """
        watch = current_watch()
        is_followed = watch is not None and watch.blocks is not None and watch.blocks.names is self
        return self._paths.get(id(module)) if is_followed else None
