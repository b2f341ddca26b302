"""Lets a torchvision wheel for CUDA be imported beside a CPU build of torch.

Such a wheel registers implementations of two operators whose schemas its missing binary would
define. Nothing is done for builds that match, and an operator that somebody else defined is left
as it is.
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
# Kept alive: the definitions end with the object.
_library: torch.library.Library | None = None


def define_when_imported() -> None:
    """Let the operators be defined when the program imports torchvision, or now if it has.

    Not before, because a program or a tool may define them itself until then: an operator can be
    defined only once, and the second one to do so fails.
    """
    if "torchvision" not in sys.modules:
        with contextlib.suppress(ImportError):
            import popdist_torchvision_hook  # noqa: F401  # importing it sets the hook

            return
    define_missing_operators()


def define_missing_operators() -> bool:
    """Define torchvision's operators if its build and torch's differ; return whether it did."""
    global _library
    if _library is not None or torch.version.cuda is not None or not _is_for_cuda():
        return False
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    # A fragment, because a second owner of the name space would be refused.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(name + _SCHEMAS[name])
    return bool(missing)


def _is_for_cuda() -> bool:
    """Tell whether the installed torchvision was built for CUDA, without importing it."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    version = Path(package.origin).with_name("version.py")
    return version.exists() and re.search(r"\+cu\d", version.read_text()) is not None
