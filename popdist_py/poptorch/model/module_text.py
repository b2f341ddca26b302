"""The printed form of a tree of modules, which shows the BeginBlock annotations of submodules."""

from __future__ import annotations

from typing import Any

from torch import nn

from popdist_py.poptorch.placement.annotations import _BlockHook

__all__ = ["module_repr", "print_module"]


def module_repr(module: nn.Module) -> str:
    """Return ``module`` as text, with ``BeginBlock(...)`` before each annotated submodule."""
    extra = module.extra_repr()
    lines = extra.splitlines() if extra else []
    children = [
        f"({name}): {_indented(_block_text(child) + module_repr(child))}"
        for name, child in module.named_children()
    ]
    name = module._get_name()
    if not children and len(lines) <= 1:
        return f"{name}({extra})"
    return "\n".join([f"{name}(", *(f"  {line}" for line in lines + children), ")"])


def _indented(text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(f"  {line}" for line in rest)])


def _block_text(module: nn.Module) -> str:
    hooks = module._forward_pre_hooks.values()
    return "".join(f"{hook!r} " for hook in hooks if isinstance(hook, _BlockHook))


def print_module(module: Any, *more: Any, **kwargs: Any) -> None:
    """Print a module as a tree, and print any other value like Python's ``print`` function."""
    text = module_repr(module) if isinstance(module, nn.Module) else module
    print(text, *more, **kwargs)  # noqa: T201
