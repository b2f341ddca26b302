"""The automatic casts of PopTorch releases before 3.0, which this library accepts and ignores.

In the emulation, operations that mix float16 and float32 tensors follow torch's rules. The results
of the emulation are at least as precise as with PopTorch's automatic casts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ContextDecorator
from typing import Any

from popdist_py.poptorch import old_spellings

__all__ = ["Policy", "autocast", "default"]


class Policy:
    """The lists of operations that PopTorch casts to a given dtype, which the emulation ignores.

    Args:
        fp16: The operations that should run in float16.
        fp32: The operations that should run in float32.
        promote: The operations that should run in the widest dtype of their inputs.
        demote: The operations that should run in the narrowest dtype of their inputs.
    """

    def __init__(
        self,
        fp16: Iterable[Any] | None = None,
        fp32: Iterable[Any] | None = None,
        promote: Iterable[Any] | None = None,
        demote: Iterable[Any] | None = None,
    ) -> None:
        self.fp16 = list(fp16 or ())
        self.fp32 = list(fp32 or ())
        self.promote = list(promote or ())
        self.demote = list(demote or ())


default = Policy()


class autocast(ContextDecorator):  # PopTorch's class has the lower-case name ``autocast``
    """A context manager and decorator for old programs, which does not cast any tensor."""

    def __init__(self, enabled: bool = True) -> None:
        old_spellings.say("poptorch", "autocast")
        self.enabled = enabled

    def __enter__(self) -> autocast:
        return self

    def __exit__(self, *_: object) -> None:
        return None
