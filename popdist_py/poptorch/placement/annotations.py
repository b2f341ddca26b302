"""The marks a model carries: blocks (which IPU runs what), names and attributes of operations.

They tell the recorder of the forward that is being traced, if there is one; everywhere else, and
for the numbers, they do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing.block_recorder import current_blocks

__all__ = [
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "NameScope",
    "is_block",
    "removeBlocks",
]

_Layer = TypeVar("_Layer", bound=Callable[..., Any])


class _Context:
    """A context manager that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class Block(_Context):
    """The operations inside belong to one block; when it ends, no block is active.

    Args:
        user_id: the block's id; blocks with the same id are one block. None takes the next of
            "0", "1", ...
        ipu_id: index of the IPU within a replica; None leaves it to the strategy.
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __repr__(self) -> str:
        return f"Block(user_id={self._user_id}, ipu_id={self._ipu_id})"

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        blocks = current_blocks()
        if blocks is not None:
            blocks.end_block()

    @staticmethod
    def useAutoId() -> None:
        """Count blocks without an id from "0" again; call it at the start of forward."""
        blocks = current_blocks()
        if blocks is not None:
            blocks.restart_auto_ids()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that goes on until the next one begins."""
        blocks = current_blocks()
        if blocks is not None:
            blocks.begin_block(user_id, ipu_id)


class _BlockHook:
    """A forward pre-hook that begins a block; an object, so that modules can be pickled."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def register(self, module: torch.nn.Module) -> None:
        """Become a hook of ``module``."""
        # A module that is loaded brings the handle along. Without it the new process would give
        # the hook's number to the next hook of the module, which would replace this one.
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class _BlockCallable:
    """A callable that begins a block before each call."""

    def __init__(self, layer: Callable[..., Any], user_id: str | None, ipu_id: int | None) -> None:
        self._layer_to_call = layer
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id}) {self._layer_to_call!r}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Block.start(self._user_id, self._ipu_id)
        return self._layer_to_call(*args, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """Begin a block when ``layer_to_call`` is called; everything after belongs to it.

    Args:
        layer_to_call: a module, which gets a hook and is returned itself, or another callable,
            which is wrapped.
        user_id: the block's id; None takes the next of "0", "1", ...
        ipu_id: index of the IPU within a replica; None leaves it to the strategy.

    Raises:
        Error: the module begins a block already, or the layer cannot be called.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return _BlockCallable(layer_to_call, user_id, ipu_id)
        raise Error(
            f"module is not an instance of torch.nn.Module or a function: got "
            f"{type(layer_to_call).__name__}"
        )
    if _block_hooks(layer_to_call):
        raise Error(
            "module has already been assigned to a block: call poptorch.removeBlocks(module) to "
            "assign it to another one"
        )
    _BlockHook(user_id, ipu_id).register(layer_to_call)
    # Read when a model is printed; past Module.__setattr__, which knows only tensors and modules.
    layer_to_call.__dict__.update(_user_id=user_id, _ipu_id=ipu_id)
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[_Layer], _Layer]:
    """Put all operations of the decorated function into one block, as :class:`Block` does."""

    def decorate(function: _Layer) -> _Layer:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Undo :func:`BeginBlock` for the module and all modules inside it.

    Raises:
        AssertionError: not a module.
    """
    assert isinstance(module, torch.nn.Module), (
        f"removeBlocks needs a torch.nn.Module, got {type(module).__name__}"
    )
    for part in module.modules():
        for key in _block_hooks(part):
            del part._forward_pre_hooks[key]
            part.__dict__.pop("_user_id", None)
            part.__dict__.pop("_ipu_id", None)


def _block_hooks(module: torch.nn.Module) -> list[int]:
    return [key for key, hook in module._forward_pre_hooks.items() if is_block(hook)]


def is_block(hook: object) -> bool:
    """Tell whether a forward pre-hook is one of :func:`BeginBlock`."""
    return isinstance(hook, _BlockHook)


class NameScope(_Context):
    """Prefixes the names of the operations inside.

    Raises:
        AssertionError: the name is not a string.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"the name of a scope is a string, got {type(name).__name__}"
        self.name = name
        self._blocks: Any = None

    def __enter__(self) -> None:
        self._blocks = current_blocks()
        if self._blocks is not None:
            self._blocks.names.begin_scope(self.name)

    def __exit__(self, *_: object) -> None:
        if self._blocks is not None:
            self._blocks.names.end_scope()


class Attribute(_Context):
    """Sets attributes of the operations inside; without effect on the numbers.

    Args:
        **attributes: by name, as dictionaries: ``__outline={"layer": "embedding"}``.
    """

    def __init__(self, **attributes: dict[str, Any]) -> None:
        self.attributes = attributes
