"""Error messages for exceptions that the user's model raises, without lines of this library.

Torch's errors about tensors without values become one sentence each, which names the user's line.
For every other exception, the message contains the traceback lines of the user's code.
"""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from popdist_py.poptorch.errors import Error

__all__ = ["FactoryError", "user_code"]

_LIBRARY: Final = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_PYTHON: Final = f"{Path(inspect.__file__).parent}{os.sep}"
# The folders of installed packages may be inside the folder of Python's standard library.
_PACKAGES: Final = ("site-packages", "dist-packages")
_FRAMES: Final = 4
_FAKE_TENSOR_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")

_READS_VALUES: Final = (
    "{what} reads the values of a tensor{where}, but tensors have no values before the model "
    "runs: compile the model in a program, and call model.memoryReport()"
)
# Sentences for errors of torch that do not explain themselves. The keys are parts of torch's error
# messages.
_KNOWN_MESSAGES: Final = {
    ".numpy() is not supported for tensor subclasses": _READS_VALUES,
    "Cannot access the data pointer": _READS_VALUES,
    "Cannot access data pointer": _READS_VALUES,
    "SparseTensorImpl": (
        "{what} uses sparse tensors{where}, but PopTorch supports only dense tensors: give a "
        "model without sparse tensors"
    ),
    "NestedTensorImpl": (
        "{what} uses nested tensors{where}, but PopTorch supports only tensors with one shape: "
        "give a model that pads its sequences"
    ),
    "torch.classes.quantized": (
        "{what} uses quantized weights{where}, which PopTorch does not support: give the "
        "original model, without quantization"
    ),
    "Storage size calculation overflowed": (
        "{what} makes a tensor of more than 2**63 bytes{where}: give a smaller --batch, or a "
        "smaller shape with --input"
    ),
    "numel: integer multiplication overflow": (
        "{what} makes a tensor of more than 2**63 bytes{where}: give a smaller --batch, or a "
        "smaller shape with --input"
    ),
    "can't allocate memory": (
        "{what} needs more memory than this machine has{where}: make the weights on the device "
        '"meta", as in: with torch.device("meta")'
    ),
}

# Advice for errors of torch whose cause is often an option of the command line.
_HINTS: Final = {
    "Expected more than 1 value per channel": "A normalisation needs several samples in training: "
    "give --batch 2 or more, or --inference",
    "(unbatched) or": "--input must give the shape of one sample, without the micro-batch",
    "following scalar types: Long, Int": "Inputs that are indices need an integer type, as in "
    "--input 128:int64",
    "urlopen error": "If MODEL's function downloads weights, turn the download off with an "
    "argument, as in --set weights=None",
}


class FactoryError(Exception):
    """The error for a user's model or input that cannot be made, with a message for the user."""


@contextmanager
def user_code(what: str, note: str = "") -> Iterator[None]:
    """Convert an exception of the user's code to a ``FactoryError``.

    The message of the ``FactoryError`` contains the traceback lines of the user's code, or one
    sentence about an operation that cannot be estimated.

    Args:
        what: The name of the user's code, such as "the model's forward".
        note: A line that follows the traceback lines in the message.
    """
    # Unless the logger is disabled, torch's logger would print those lines of the traceback that
    # belong to torch.
    _FAKE_TENSOR_LOG.disabled = True
    try:
        yield
    except FactoryError:
        raise
    except (Exception, SystemExit) as error:
        raise FactoryError(_failure_text(what, error, note)) from error
    finally:
        _FAKE_TENSOR_LOG.disabled = False


def _failure_text(what: str, error: BaseException, note: str) -> str:
    """Return the message for an exception that the user's code raised, or that PopTorch raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if isinstance(error, Error):
        return f"{error.message}{_where(own)}"
    # PopTorch raises ``AssertionError`` for wrong arguments and for blocks (parts of the model)
    # that cannot be placed on IPUs.
    if isinstance(error, AssertionError) and frames[-1].filename.startswith(_LIBRARY):
        return f"{error}{_where(own)}"
    sentence = _known_sentence(error)
    if sentence:
        return sentence.format(what=what, where=_where(own))
    lines = ["Traceback (most recent call last):\n"] if own else []
    lines += traceback.format_list(own[-_FRAMES:])
    lines += traceback.format_exception_only(error)
    lines += [f"{line}\n" for line in (note, _hint(error)) if line]
    return f"{what} failed:\n{''.join(lines).rstrip()}"


def _is_users(file: str) -> bool:
    """Return whether a traceback shows lines of a file: not of torch, Python and this library."""
    if file.startswith((_LIBRARY, _TORCH, "<frozen ")):
        return False
    return not file.startswith(_PYTHON) or any(folder in file for folder in _PACKAGES)


def _hint(error: BaseException) -> str:
    return next((hint for part, hint in _HINTS.items() if part in str(error)), "")


def _known_sentence(error: BaseException) -> str:
    """Return the sentence for an error that torch does not explain; empty for other errors."""
    if isinstance(error, DataDependentOutputException):
        return _READS_VALUES
    if isinstance(error, DynamicOutputShapeException):
        # The text of the exception is the name of the operator, such as "aten.nonzero.default".
        operator = str(error).removeprefix("aten.").partition(".")[0].strip("_")
        return (
            f"{{what}} makes a tensor{{where}} whose size depends on values ({operator}), but an "
            "IPU needs all sizes before the model runs: give a model with fixed sizes"
        )
    if isinstance(error, MemoryError):
        return _KNOWN_MESSAGES["can't allocate memory"]
    text = str(error)
    return next((known for part, known in _KNOWN_MESSAGES.items() if part in text), "")


def _where(frames: Sequence[traceback.FrameSummary]) -> str:
    if not frames:
        return ""
    frame = frames[-1]
    code = f": {frame.line}" if frame.line else ""
    return f" ({frame.filename}, line {frame.lineno}{code})"
