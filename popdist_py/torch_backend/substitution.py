"""Use of popdist in programs that name gloo, and of gloo in programs that name popdist.

One function of torch.distributed makes every group and reads the names of back ends. The names may
come from ``init_process_group``, from ``new_group``, from a mesh, or from a list of devices such as
"cpu:gloo,cuda:nccl". This module replaces names only while torch makes a group. A comparison in the
program, such as ``Backend("gloo") == "gloo"``, therefore stays true.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist

from popdist_py.environment import TORCH_BACKEND, TORCH_BACKENDS
from popdist_py.errors import WireError

__all__ = ["substitute"]

# The name that torch uses if the program does not name a back end, as in ``init_process_group()``.
_NOTHING = dist.Backend.UNDEFINED
# A warning skips the stack frames of these modules, so that it names a line of the program.
_INNER = (__name__, "torch.distributed")
_REPLACED: dict[str, dict[str, str]] = {
    "popdist": {"gloo": "popdist", _NOTHING: "popdist"},
    "gloo": {"popdist": "gloo"},
}


def substitute(wanted: str) -> None:
    """Use the back end ``wanted`` in programs that name gloo, popdist or no back end.

    Popdist supports CPU tensors only, while gloo and torch's default back end also support tensors
    of accelerators. Therefore, if torch finds an accelerator, popdist does not replace another back
    end, and the user gets a warning.

    Args:
        wanted: "gloo", "popdist", or "auto" to keep the back end that the program names.

    Raises:
        WireError: ``wanted`` is not "gloo", "popdist" or "auto".
    """
    if wanted not in TORCH_BACKENDS:
        accepted = ", ".join(TORCH_BACKENDS[:-1])
        raise WireError(f"{TORCH_BACKEND}={wanted!r}: expected {accepted} or {TORCH_BACKENDS[-1]}")
    names = _REPLACED.get(wanted, {})
    module: Any = dist.distributed_c10d
    original, make_group = dist.Backend.__new__, module._new_process_group_helper
    position = list(inspect.signature(make_group).parameters).index("backend")
    making = threading.local()

    @functools.wraps(original)
    def read(cls: type[dist.Backend], name: str) -> Any:
        value = original(cls, name)
        other = names.get(value) if getattr(making, "is_here", False) else None
        if other is None or (other == "popdist" and _accelerator_stays()):
            return value
        return other

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        making.is_here = True
        try:
            if len(args) > position:
                args = (*args[:position], dist.Backend(args[position]), *args[position + 1 :])
            else:
                kwargs["backend"] = dist.Backend(kwargs["backend"])
            return make_group(*args, **kwargs)
        finally:
            making.is_here = False

    dist.Backend.__new__ = read  # type: ignore[method-assign]
    module._new_process_group_helper = make


@functools.cache
def _accelerator_stays() -> bool:
    """Return whether torch finds an accelerator; if it does, warn the user on the first call."""
    # torch before 2.6 lacks ``torch.accelerator``. With such a version, only CUDA is checked.
    accelerators = getattr(torch, "accelerator", torch.cuda)
    if not accelerators.is_available():
        return False
    warnings.warn(
        "--torch-backend popdist has no effect, because torch finds an accelerator, and the back "
        "end popdist supports only CPU tensors. To use popdist, hide the accelerator "
        "(CUDA_VISIBLE_DEVICES=), or call init_process_group('popdist')",
        stacklevel=2 + _frames_of_torch(),
    )
    return True


def _frames_of_torch() -> int:
    """Return the number of stack frames from the caller of this function to the program's code."""
    frame, count = sys._getframe(1).f_back, 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER):
        frame, count = frame.f_back, count + 1
    return count
