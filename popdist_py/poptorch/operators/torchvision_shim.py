"""Lets a torchvision wheel for CUDA be imported beside a CPU build of torch.

Such a wheel registers implementations of two operators whose schemas its missing binary would
define. Nothing is done for builds that match.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

__all__ = ["define_missing_operators"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# Kept alive: the definitions end with the object.
_library: torch.library.Library | None = None


def define_missing_operators() -> bool:
    """Define torchvision's operators if its build and torch's differ; return whether it did."""
    global _library
    if _library is not None or torch.version.cuda is not None or not _is_for_cuda():
        return False
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    return True


def _is_for_cuda() -> bool:
    """Tell whether the installed torchvision was built for CUDA, without importing it."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    version = Path(package.origin).with_name("version.py")
    return version.exists() and re.search(r"\+cu\d", version.read_text()) is not None
