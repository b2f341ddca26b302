"""Excludes methods of this back end from torch.compile.

torch.compile compiles every Python function that a compiled function calls. It cannot compile the
methods of this back end's process group, which use threads, sockets and shared memory. Back ends in
C++ need no exclusion, because torch.compile does not read C++ code.

This module does not import torch's compiler, because that import takes a second.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

# Before torch 2.5, ``eval_frame`` is not a module, so ``import torch._C._dynamo.eval_frame`` fails.
from torch._C._dynamo import eval_frame

__all__ = ["never_compiled"]

_Class = TypeVar("_Class", bound=type)
# Typed as Any because the names in ``eval_frame`` differ between versions of torch.
_compiler: Any = eval_frame


def never_compiled(cls: _Class) -> _Class:
    """Exclude the methods of a class, and all functions that they call, from torch.compile."""
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
