"""Annotations that a program adds to a model, for example to group operations into blocks.

A block is a group of a model's operations that run on the same IPU. Annotations have an effect only
while a wrapped model's forward pass is traced. Annotations never change the results of a model.
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
    """The base class of the annotations, a context manager that does nothing."""

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
    """A context manager that puts the operations inside it into one block (for one IPU).

    Operations after the ``with`` statement of a Block do not belong to any block.

    Args:
        user_id: The id of the block (a group of operations). Operations with the same block id
            belong to one block. If ``user_id`` is not given, the block gets the next id of the
            series "0", "1", and so on.
        ipu_id: The index of the IPU within a replica (copy of the model). If ``ipu_id`` is not
            given, the execution strategy chooses the IPU.
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
        """Restart the automatic block ids at "0".

        Call ``useAutoId()`` at the start of the model's ``forward``.
        """
        blocks = current_blocks()
        if blocks is not None:
            blocks.restart_auto_ids()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block of operations, which ends where the next block begins."""
        blocks = current_blocks()
        if blocks is not None:
            blocks.begin_block(user_id, ipu_id)


class _BlockHook:
    """A forward pre-hook that begins a block of operations at each call of a module.

    The hook is an object and not a closure, so that a module with this hook can be pickled.
    """

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def register(self, module: torch.nn.Module) -> None:
        """Register this object as a forward pre-hook of ``module``."""
        # The handle that torch returns for a module's hook is stored, so that the handle is pickled
        # with the hook. When a process unpickles the handle of a module's hook, torch reserves the
        # hook's number in this process. Without the stored handle, the next hook of the module
        # could get the same number and replace the hook that begins a block.
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class _BlockCallable:
    """A wrapper of a callable, which begins a block of operations before each call."""

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
    """Change ``layer_to_call`` so that each of its calls begins a block of operations.

    The block that a call begins contains all later operations until the next block begins.

    Args:
        layer_to_call: A torch module or another callable. For a torch module, BeginBlock adds a
            hook to the module and returns the module. If the callable is not a module, BeginBlock
            returns a wrapper function that calls it.
        user_id: The id of the block (a group of operations). If ``user_id`` is not given, the block
            gets the next id of the series "0", "1", and so on.
        ipu_id: The index of the IPU within a replica (copy of the model). If ``ipu_id`` is not
            given, the execution strategy chooses the IPU.

    Raises:
        Error: The module already has a BeginBlock annotation, or ``layer_to_call`` is not callable.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return _BlockCallable(layer_to_call, user_id, ipu_id)
        raise Error(
            "poptorch.BeginBlock needs a torch.nn.Module or a function, got "
            f"{type(layer_to_call).__name__}"
        )
    if _block_hooks(layer_to_call):
        raise Error(
            "module has already been assigned to a block: call poptorch.removeBlocks(module) "
            "before you assign the module to another block"
        )
    _BlockHook(user_id, ipu_id).register(layer_to_call)
    # A program can read a module's block from the attributes ``_user_id`` and ``_ipu_id``. The
    # attributes ``_user_id`` and ``_ipu_id`` are stored through ``__dict__``, because mypy accepts
    # only tensors and modules for Module.__setattr__.
    layer_to_call.__dict__.update(_user_id=user_id, _ipu_id=ipu_id)
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[_Layer], _Layer]:
    """Return a decorator that puts all operations of a function into one block.

    BlockFunction has the same arguments as :class:`Block`.
    """

    def decorate(function: _Layer) -> _Layer:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Remove the BeginBlock annotations of a module and of all modules inside it.

    Raises:
        AssertionError: ``module`` is not a torch module.
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
    """Tell whether a module's forward pre-hook comes from :func:`BeginBlock`."""
    return isinstance(hook, _BlockHook)


class NameScope(_Context):
    """A context manager that adds a prefix to the names of the operations inside it.

    Raises:
        AssertionError: The prefix is not a string.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), (
            f"poptorch.NameScope needs a string as its name, got {type(name).__name__}"
        )
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
    """A context manager that accepts attributes for the operations inside it.

    The emulation ignores the attributes that a program sets with ``Attribute``.

    Args:
        **attributes: Dictionaries of attributes, for example ``__outline={"layer": "embedding"}``.
    """

    def __init__(self, **attributes: dict[str, Any]) -> None:
        self.attributes = attributes
