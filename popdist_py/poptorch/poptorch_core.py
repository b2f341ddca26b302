"""PopTorch's module ``poptorch.poptorch_core``, from which programs import its exceptions."""

from __future__ import annotations

from popdist_py.poptorch.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]
