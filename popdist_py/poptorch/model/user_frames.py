"""Shortened tracebacks of errors in a model, which show only frames of the user's program.

The full traceback of an error in a forward method contains about twenty frames of the compiler, of
the back ends that run the replicas, and of torch's modes. A shortened traceback shows the program's
call of the model wrapper and then the frames of the forward method. At the log level DEBUG,
tracebacks are not shortened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

import popdist_py
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = ["frames_folded"]

_OURS: Final = str(Path(popdist_py.__file__).parent) + os.sep
_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_PYTHON: Final = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES: Final = ("site-packages", "dist-packages")
# A shortened traceback leaves out frames of generated code, and of wrapper functions in torch and
# Python that only call another function.
_BETWEEN: Final = frozenset(
    {
        "<recorded graph>",
        contextlib.__file__,
        *(_TORCH + name for name in ("utils/_contextlib.py", "overrides.py", "_ops.py")),
    }
)
_MODULE: Final = _TORCH + "nn/modules/module.py"
_MODULE_CALLS: Final = ("_wrapped_call_impl", "_call_impl", "inner")


class _FramesFolded:
    """A context manager that shortens the traceback of an error that leaves the ``with`` block."""

    def __enter__(self) -> None:
        """Enter the ``with`` block without any preparation."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Shorten the traceback of the error, unless the log level is DEBUG."""
        if isinstance(error, Exception) and not logger.isEnabledFor(logging.DEBUG):
            for each in _chain(error):
                each.__traceback__ = _folded(each, keeps_first=each is error)


frames_folded: Final = _FramesFolded()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the earlier errors that Python prints before it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _folded(error: BaseException, *, keeps_first: bool) -> TracebackType | None:
    """Return the traceback of an error without the frames of this package.

    If a fault in this package caused the error, the full traceback is returned.

    Args:
        error: The error whose traceback is shortened.
        keeps_first: Whether the result includes the first frame, which contains the program's call
            of the model wrapper.
    """
    entries = []
    at = error.__traceback__
    while at is not None:
        entries.append(at)
        at = at.tb_next
    if not _concerns_the_program(error, entries[1:]):
        return error.__traceback__
    kept = [
        entry
        for number, entry in enumerate(entries)
        if (number == 0 and keeps_first) or not _is_between(entry, entries[number + 1 : number + 2])
    ]
    folded: TracebackType | None = None
    for entry in reversed(kept):
        folded = TracebackType(folded, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return folded


def _concerns_the_program(error: BaseException, entries: Sequence[TracebackType]) -> bool:
    """Tell whether the user's program or model, and not this package, caused the error."""
    if isinstance(error, Error | AssertionError) and error.args:
        return True
    return any(_is_module_call(entry) or _is_of_program(_file(entry)) for entry in entries)


def _is_between(entry: TracebackType, following: Sequence[TracebackType]) -> bool:
    """Tell whether the function of a stack frame only calls another function.

    The result is True for frames of this package, for frames of wrapper functions in torch and
    Python, and for frames of torch that call a TorchFunctionMode.
    """
    file = _file(entry)
    if file.startswith(_OURS) or file in _BETWEEN or _is_module_call(entry):
        return True
    asks_mode = any(_file(after) == _TORCH + "overrides.py" for after in following)
    return asks_mode and file.startswith(_TORCH)


def _is_module_call(entry: TracebackType) -> bool:
    return _file(entry) == _MODULE and entry.tb_frame.f_code.co_name in _MODULE_CALLS


def _is_of_program(file: str) -> bool:
    is_library = any(f"{os.sep}{place}{os.sep}" in file for place in _LIBRARIES)
    is_ours = file.startswith(_OURS) or file in _BETWEEN
    return not (is_library or is_ours or file.startswith((_PYTHON, _TORCH, "<frozen")))


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename
