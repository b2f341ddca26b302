"""What keeps torch.compile out of our methods: it compiles whatever runs beneath a compiled frame.

A method of a process group works with threads, sockets and memory of which its compiler knows
nothing; those of back ends in C++ it cannot see.

Nothing here imports the compiler, which takes a second.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

# Before torch 2.5 it is no module of its own, only a name there.
from torch._C._dynamo import eval_frame

__all__ = ["never_compiled"]

_Class = TypeVar("_Class", bound=type)
# Without its stubs: versions differ in what they have.
_compiler: Any = eval_frame


def never_compiled(cls: _Class) -> _Class:
    """Let the methods of a class, and what they call, run as they are."""
    for value in vars(cls).values():
        if isinstance(value, types.FunctionType):
            _skip(value.__code__)
    return cls


def _skip(code: types.CodeType) -> None:
    if hasattr(_compiler, "set_code_exec_strategy"):
        skip = _compiler._FrameAction.SKIP
        _compiler.set_code_exec_strategy(code, _compiler._FrameExecStrategy(skip, skip))
    elif hasattr(_compiler, "skip_code"):  # an older PyTorch
        _compiler.skip_code(code)
