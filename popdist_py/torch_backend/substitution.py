"""The back end that a program gets for the one that it names: ours for gloo, or gloo for ours.

torch.distributed reads every name of a back end in one place, ``Backend(name)``: that of
``init_process_group``, of ``new_group``, of a mesh, and of each device in "cpu:gloo,cuda:nccl".
Nothing here makes a group, and a name that is not replaced goes to torch as it is.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from popdist_py.environment import TORCH_BACKEND, TORCH_BACKENDS
from popdist_py.errors import WireError

__all__ = ["substitute"]

# What stands for the choice of torch: that of ``init_process_group()``.
_NOTHING = dist.Backend.UNDEFINED
_REPLACED: dict[str, dict[str, str]] = {
    "popdist": {"gloo": "popdist", _NOTHING: "popdist"},
    "gloo": {"popdist": "gloo"},
}


def substitute(wanted: str) -> None:
    """Give programs the back end ``wanted`` where they name gloo, popdist or nothing.

    gloo and the choice of torch also carry the tensors of accelerators, which popdist does not:
    where torch sees one, they stay, with a warning.

    Args:
        wanted: "auto", which replaces nothing, "gloo" or "popdist".

    Raises:
        WireError: it is none of these.
    """
    if wanted not in TORCH_BACKENDS:
        accepted = ", ".join(TORCH_BACKENDS[:-1])
        raise WireError(
            f"{TORCH_BACKEND}={wanted!r}: {accepted} or {TORCH_BACKENDS[-1]} is expected"
        )
    names = _REPLACED.get(wanted, {})
    original = dist.Backend.__new__

    @functools.wraps(original)
    def read(cls: type[dist.Backend], name: str) -> Any:
        value = original(cls, name)
        other = names.get(value)
        if other is None or (other == "popdist" and _accelerator_stays()):
            return value
        return other

    dist.Backend.__new__ = read  # type: ignore[method-assign]


@functools.cache
def _accelerator_stays() -> bool:
    """Tell whether torch sees an accelerator, with a warning the first time."""
    # torch before 2.6 has no general question.
    accelerators = getattr(torch, "accelerator", torch.cuda)
    if not accelerators.is_available():
        return False
    warnings.warn(
        "the back end popdist is for CPU tensors, and torch sees an accelerator: programs get the "
        "back end that they name; hide it (CUDA_VISIBLE_DEVICES=) or name popdist",
        stacklevel=4,
    )
    return True
