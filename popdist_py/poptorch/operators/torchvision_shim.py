"""Operator schemas that let a program import a CUDA build of torchvision with a CPU torch.

The Python code of torchvision registers implementations of two operators. The schemas of these
operators are defined in torchvision's binary library, but the library of a CUDA build is not
available with a CPU build of torch. If the two builds differ in this way, this module defines the
schemas. Otherwise, it does nothing. An operator that other code has defined is not changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import torch

__all__ = ["define_missing_operators", "define_when_imported"]

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# This reference keeps the library object alive, because torch removes the operators together with
# the object.
_library: torch.library.Library | None = None


def define_when_imported() -> None:
    """Define the operators when the program imports torchvision, or now if it already has.

    The operators are not defined before torchvision is imported, because a program or a tool may
    also define them. An operator can be defined only once, and a second definition fails.
    """
    if "torchvision" not in sys.modules:
        with contextlib.suppress(ImportError):
            import popdist_torchvision_hook  # noqa: F401  # importing it sets the hook

            return
    define_missing_operators()


def define_missing_operators() -> bool:
    """Define the missing operators if torchvision was built for CUDA and torch was not.

    Returns:
        Whether this call defined an operator.
    """
    global _library
    if _library is not None or torch.version.cuda is not None or not _is_for_cuda():
        return False
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    # The library is a fragment, because torch refuses a second full library for a namespace.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(name + _SCHEMAS[name])
    return bool(missing)


def _is_for_cuda() -> bool:
    """Return whether the installed torchvision is a CUDA build, without importing torchvision."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    version = Path(package.origin).with_name("version.py")
    return version.exists() and re.search(r"\+cu\d", version.read_text()) is not None
