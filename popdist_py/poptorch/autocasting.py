"""Automatic casts of PopTorch before 3.0: accepted, and nothing is cast.

Half and float mix as in torch here, which is never less exact. Only the names live here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ContextDecorator
from typing import Any

from popdist_py.poptorch import old_spellings

__all__ = ["Policy", "autocast", "default"]


class Policy:
    """Which operations would have run in half; kept and not read.

    Args:
        fp16: operations in half.
        fp32: operations in float.
        promote: operations in the wider format of their inputs.
        demote: operations in the narrower one.
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


class autocast(ContextDecorator):  # PopTorch's name
    """A context, or a decorator of functions, in which nothing is cast."""

    def __init__(self, enabled: bool = True) -> None:
        old_spellings.say("poptorch", "autocast")
        self.enabled = enabled

    def __enter__(self) -> autocast:
        return self

    def __exit__(self, *_: object) -> None:
        return None
