"""Printing tensors of a running model, in the format of the device's own printing.

``ipu_print_tensor`` and how it writes numbers; nothing else.
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
_FIXED_EXPONENTS: Final = range(-4, 7)  # decimal exponents that "auto" writes as fixed


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
    """Print a tensor on stderr whenever the model runs; outside of wrapped models print nothing.

    Args:
        tensor: what to print.
        title: printed in front; the gradient has "_gradient" behind it.
        print_gradient: whether to print the gradient in the backward pass too.
        summarise_threshold: number of elements from which only the edges are printed.
        edge_items: how many elements the edges have.
        max_line_width: rows that are longer continue on the next line.
        digits: significant digits.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: between the elements of a row.
        open_bracket: before each dimension.
        close_bracket: after each dimension.

    Returns:
        The tensor; this result must be used.

    Raises:
        Error: not a tensor, or an unknown float_format.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"ipu_print_tensor needs a torch.Tensor, got {type(tensor).__name__}")
    if float_format not in _FORMATS:
        raise Error(f"Invalid float_format {float_format!r}: expected one of {', '.join(_FORMATS)}")
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
    """Return the tensor in brackets, without a line end."""
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
    """Return one row, continued with two more spaces where it gets too long."""
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
