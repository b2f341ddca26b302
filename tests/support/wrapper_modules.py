"""The wrapper's modules, imported as the wrapper imports them: by bare name, from their folder.

The folder is on the path only meanwhile: ``placement`` or ``hosts`` must not come from there.
"""

from __future__ import annotations

import importlib
import sys

from conftest import ROOT

_FOLDER = str(ROOT / "poprun_py")


def wrapper_module(name: str):
    """Return the wrapper's module ``name``."""
    sys.path.insert(0, _FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(_FOLDER)


vitals = wrapper_module("vitals")
