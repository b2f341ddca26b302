"""The function ipu_print_tensor, which prints tensors while a wrapped model runs.

The printed text has the same format as on an IPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Any, Final

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing import current_forward

__all__ = ["ipu_print_tensor"]

_FORMATS: Final = ("auto", "fixed", "scientific", "none")
# The range of decimal exponents for which the format "auto" uses fixed-point notation.
_FIXED_EXPONENTS: Final = range(-4, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    summarise_threshold: int
    edge_items: int
    max_line_width: int
    digits: int
    float_format: str
    separator: str
    open_bracket: str
    close_bracket: str


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor to stderr each time the wrapped model runs.

    Outside the forward method of a wrapped model, ``ipu_print_tensor`` does not print anything.

    Args:
        tensor: The tensor to print.
        title: The text to print before the tensor. The text before the tensor's gradient also ends
            with "_gradient".
        print_gradient: Whether to also print the gradient of the tensor in the backward pass.
        summarise_threshold: The maximum number of elements of a tensor that is printed in full. For
            a tensor with more elements, only the first and last elements of each dimension are
            printed.
        edge_items: The number of elements to print at each end of a dimension if the tensor is
            larger than ``summarise_threshold``.
        max_line_width: The maximum length of a printed line. A longer row of the tensor continues
            on the next line.
        digits: The number of significant digits of each printed number.
        float_format: The notation of numbers: "auto", "fixed", "scientific" or "none".
        separator: The text to print between two elements of a row.
        open_bracket: The text to print at the beginning of each dimension.
        close_bracket: The text to print at the end of each dimension.

    Returns:
        A view of ``tensor``. The model must use the view instead of ``tensor``, so that the
        gradient is printed too.

    Raises:
        Error: ``tensor`` is not a tensor, or ``float_format`` is unknown.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"ipu_print_tensor needs a torch.Tensor, got {type(tensor).__name__}")
    if float_format not in _FORMATS:
        raise Error(
            f"ipu_print_tensor got float_format={float_format!r}: expected one of "
            f"{', '.join(_FORMATS)}"
        )
    result = tensor.view_as(tensor)
    current_forward.require_python()
    if not current_forward.is_running() or current_forward.is_tracing():
        return result
    style = _Style(
        summarise_threshold=summarise_threshold,
        edge_items=edge_items,
        max_line_width=max_line_width,
        digits=digits,
        float_format=float_format,
        separator=separator,
        open_bracket=open_bracket,
        close_bracket=close_bracket,
    )
    _write(title, tensor, style)
    if print_gradient and result.requires_grad:
        result.register_hook(lambda gradient: _write(f"{title}_gradient", gradient, style))
    return result


def _write(title: str, tensor: torch.Tensor, style: _Style) -> None:
    sys.stderr.write(f"{title}: {_text(tensor.detach(), style)}\n")
    sys.stderr.flush()


def _text(tensor: torch.Tensor, style: _Style) -> str:
    """Return the printed form of a tensor, without a newline at the end."""
    summarise = tensor.numel() > style.summarise_threshold
    values: Any = tensor.tolist()
    if tensor.dim() == 0:
        return _number(values, style)
    return "\n".join(_lines(values, tensor.dim(), 0, summarise, style))


def _lines(values: Any, dims: int, level: int, summarise: bool, style: _Style) -> list[str]:
    indent = " " * level
    if summarise and len(values) > 2 * style.edge_items:
        head, tail = values[: style.edge_items], values[-style.edge_items :]
    else:
        head, tail = values, None
    if dims == 1:
        words = [_number(value, style) for value in head]
        if tail is not None:
            words += ["...", *(_number(value, style) for value in tail)]
        return _row(words, indent, style)
    lines = [indent + style.open_bracket]
    for value in head:
        lines += _lines(value, dims - 1, level + 1, summarise, style)
    if tail is not None:
        lines.append(f"{indent} ...")
        for value in tail:
            lines += _lines(value, dims - 1, level + 1, summarise, style)
    return [*lines, indent + style.close_bracket]


def _row(words: list[str], indent: str, style: _Style) -> list[str]:
    """Return the lines for one row of a tensor; all lines except the first are indented."""
    lines = []
    line = indent + style.open_bracket
    for index, word in enumerate(words):
        piece = word + (style.separator if index + 1 < len(words) else style.close_bracket)
        if index and len(line) + len(piece.rstrip()) > style.max_line_width:
            lines.append(line.rstrip())
            line = f"{indent}  "
        line += piece
    return [*lines, line if words else line + style.close_bracket]


def _number(value: Any, style: _Style) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, float) or not isfinite(value):
        return str(value)
    if style.float_format == "none":
        return f"{value:g}"
    exponent = floor(log10(abs(value))) if value else 0
    fixed = style.float_format == "fixed" or (
        style.float_format == "auto" and exponent in _FIXED_EXPONENTS
    )
    if fixed:
        return f"{value:.{max(0, style.digits - 1 - exponent)}f}"
    return f"{value:.{style.digits - 1}e}"
