"""Operator schemas that let programs import a CUDA build of torchvision with a CPU build of torch.

The Python code of torchvision registers implementations of two operators. The schemas of the two
operators are defined in torchvision's binary library, but the library of a CUDA build is not
available with a CPU build of torch. For a CUDA build of torchvision with a CPU build of torch, the
module ``torchvision_shim`` defines the schemas of the two operators. For all other builds, the
module ``torchvision_shim`` does nothing. The module ``torchvision_shim`` does not change an
operator that other code has already defined.
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
# The torch library object with the defined operators. The library object is stored in a variable of
# the module, because torch removes the operators when the object is deleted.
_library: torch.library.Library | None = None


def define_when_imported() -> None:
    """Define the missing torchvision operators as soon as torchvision is imported.

    If torchvision is already imported, ``define_when_imported`` defines the operators at once. If
    torchvision is not imported yet, ``define_when_imported`` waits for the import, because other
    code may define the operators before the import. A second definition of a torch operator fails
    with an error.
    """
    if "torchvision" not in sys.modules:
        with contextlib.suppress(ImportError):
            import popdist_torchvision_hook  # noqa: F401  # importing it sets the hook

            return
    define_missing_operators()


def define_missing_operators() -> bool:
    """Define torchvision's missing operators, if it is a CUDA build and torch is a CPU build.

    Returns:
        Whether the call of the function has defined any operator.
    """
    global _library
    if _library is not None or torch.version.cuda is not None or not _is_for_cuda():
        return False
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    # The new library has the kind FRAGMENT, because torch refuses a second full library for the
    # namespace "torchvision".
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(name + _SCHEMAS[name])
    return bool(missing)


def _is_for_cuda() -> bool:
    """Tell whether the installed torchvision is a CUDA build, without importing torchvision."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    version = Path(package.origin).with_name("version.py")
    return version.exists() and re.search(r"\+cu\d", version.read_text()) is not None
