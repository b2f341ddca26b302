"""The module ``poptorch.poptorch_core``. Programs import PopTorch's exceptions from this module."""

from __future__ import annotations

from popdist_py.poptorch.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]
