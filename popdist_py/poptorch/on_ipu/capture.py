"""TEMPORARY: stands for the module that captures a forward until that is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.on_ipu.captured import Captured
from popdist_py.poptorch.options.options import Options

__all__ = ["capture"]


def capture(
    model: nn.Module,
    options: Options,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
) -> Captured:
    """Return the forward of one micro-batch."""
    raise Error(f"not yet: {type(model)}, {options}, {args}, {kwargs}, {training}")
