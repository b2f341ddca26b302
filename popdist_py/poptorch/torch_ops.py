"""The operators in ``torch.ops.poptorch``, which programs call instead of PopTorch's functions.

Each operator in ``torch.ops.poptorch`` has the arguments of PopTorch's operator, and calls the
Python function with the same effect. Operators that only build the graph for real IPUs do not exist
in this library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from popdist_py.poptorch import ops
from popdist_py.poptorch.enums import MatMulSerializationMode, OverlapMode, ReductionType
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.placement.annotations import NameScope
from popdist_py.poptorch.tracing.block_places import BlockPlace
from popdist_py.poptorch.tracing.block_recorder import current_blocks
from popdist_py.poptorch.tracing.losses import identity_loss

__all__ = ["OPERATORS", "install"]


# --- Operators for blocks of operations and for prefixes of tensor names --------------------------


def _begin_ipu_block(stage_id: int, phase_id: int, ipu_id: int) -> None:
    """Begin a block of operations on the given IPU, stage and phase (part of the model)."""
    blocks = current_blocks()
    if blocks is not None:
        place = BlockPlace(str(stage_id), ipu_id, max(stage_id, 0), max(phase_id, 0))
        blocks.begin_placed(place)


def _end_ipu_block() -> None:
    blocks = current_blocks()
    if blocks is not None:
        blocks.end_block()


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[NameScope] = []


_scopes: Final = _Scopes()


def _push_name_scope(name: str) -> None:
    scope = NameScope(name)
    scope.__enter__()
    _scopes.open.append(scope)


def _pop_name_scope() -> None:
    if not _scopes.open:
        raise Error("Unexpected pop_name_scope: call push_name_scope before each pop_name_scope")
    _scopes.open.pop().__exit__()


# --- Operators that return tensors or set properties of tensors -----------------------------------

# The notations for printed floating-point numbers. The index of a notation in ``_FLOAT_FORMATS`` is
# PopTorch's number for the notation.
_FLOAT_FORMATS: Final = ("auto", "fixed", "scientific", "none")


def _identity_loss(x: torch.Tensor, reduction: int) -> torch.Tensor:
    return identity_loss(x, ReductionType(reduction))


def _ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: int = 0,
    *brackets: str,
) -> torch.Tensor:
    if not 0 <= float_format < len(_FLOAT_FORMATS):
        accepted = ", ".join(f"{number} ({name})" for number, name in enumerate(_FLOAT_FORMATS))
        raise Error(
            f"ipu_print_tensor got float_format={float_format!r}: expected one of {accepted}"
        )
    return ops.ipu_print_tensor(
        tensor,
        title,
        bool(print_gradient),
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        _FLOAT_FORMATS[float_format],
        *brackets,
    )


def _set_matmul_serialization(matmul: torch.Tensor, mode: str, *_: Any) -> torch.Tensor:
    """Return ``matmul``, a matrix product that a real IPU would compute in several parts."""
    MatMulSerializationMode(mode)
    return ops.nop(matmul)


def _set_overlap_for_input(tensor: torch.Tensor, mode: str) -> Any:
    return ops.set_overlap_for_input(tensor, OverlapMode(mode))


def _set_overlap_for_output(tensor: torch.Tensor, mode: str) -> Any:
    return ops.set_overlap_for_output(tensor, OverlapMode(mode))


def _hint(*_: Any) -> None:
    """Do nothing, because this operator is only a hint for the compiler on real IPUs."""


# --- The name space ``torch.ops.poptorch`` --------------------------------------------------------

OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "begin_ipu_block": _begin_ipu_block,
    "begin_multi_conv": _hint,
    "clear_attribute": _hint,
    "ctc_beam_search_decoder": ops.ctc_beam_search_decoder,
    "dynamic_slice": ops.dynamic_slice,
    "dynamic_update": ops.dynamic_update,
    "end_ipu_block": _end_ipu_block,
    "end_multi_conv": _hint,
    "identity_loss": _identity_loss,
    "ipu_print_tensor": _ipu_print_tensor,
    "nop": ops.nop,
    "pop_name_scope": _pop_name_scope,
    "push_name_scope": _push_name_scope,
    "recomputation_checkpoint": ops.recomputationCheckpoint,
    "set_attribute": _hint,
    "set_available_memory": ops.set_available_memory,
    "set_matmul_serialization": _set_matmul_serialization,
    "set_overlap_for_input": _set_overlap_for_input,
    "set_overlap_for_output": _set_overlap_for_output,
}


def install() -> None:
    """Add the operators to ``torch.ops.poptorch``, except operators that exist there already.

    The operators are plain functions, stored as attributes and not registered with torch. If the
    operators were registered, tracing of a forward pass would not record the calls inside the
    operators. Torch cannot run an operator of ``torch.library`` for several replicas at once.
    """
    for name, function in OPERATORS.items():
        if not hasattr(torch.ops.poptorch, name):
            setattr(torch.ops.poptorch, name, function)
