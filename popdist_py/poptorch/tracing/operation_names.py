"""The class OperationNames, which gives names to the operations of a forward pass.

The name of an operation consists of the name scopes around the operation and the name of the torch
function, such as ``fc/0/linear``.
"""

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
    """Gives a unique name to every operation of one forward pass.

    For example, a linear operation of the module ``fc.0`` gets the name ``fc/0/linear``. A second
    linear operation of the module ``fc.0`` gets the name ``fc/0/linear/1``.

    Args:
        module: The module whose submodules are name scopes; None if modules are not name scopes.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._scopes: list[str] = []
        self._count: Counter[str] = Counter()
        self._paths = {} if module is None else {id(m): p for p, m in module.named_modules()}
        self._open: list[str] = []

    @property
    def module(self) -> str:
        """The path of the submodule whose forward method runs now; empty for the top module."""
        return self._open[-1] if self._open else ""

    def begin_scope(self, name: str) -> None:
        """Begin a name scope.

        The names of all operations inside a name scope begin with the scope's name.
        """
        self._scopes.append(name)

    def end_scope(self) -> None:
        """End the innermost name scope."""
        self._scopes.pop()

    def next(self, func: Callable[..., Any]) -> str:
        """Return the name of the next operation, which is a call of ``func``."""
        name = "/".join([*self._scopes, getattr(func, "__name__", str(func)).strip("_")])
        self._count[name] += 1
        count = self._count[name] - 1
        return f"{name}/{count}" if count else name

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Make each submodule a name scope while the submodule's forward method runs."""
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
            # The open name scopes already contain the path of the enclosing module, so only the
            # rest of the path becomes a new scope.
            outer = self._open[-1] + "." if self._open else ""
            self.begin_scope(path.removeprefix(outer).replace(".", "/"))
            self._open.append(path)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._path_of(module):
            self._open.pop()
            self.end_scope()

    def _path_of(self, module: nn.Module) -> str | None:
        """Return a submodule's path; None outside the forward pass whose operations get names.

        Each forward pass has its own OperationNames. The path of the top module of the model is
        empty. Torch's global module hooks run for every forward pass in the process, and several
        replicas may be in their forward passes at the same time. Therefore the hooks also call
        ``_path_of`` during the forward passes of other replicas.
        """
        watch = current_watch()
        is_followed = watch is not None and watch.blocks is not None and watch.blocks.names is self
        return self._paths.get(id(module)) if is_followed else None
