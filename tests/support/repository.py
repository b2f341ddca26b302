"""The repository's root folder, and its programs that are in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "load"]

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """Import a file of the project by its path, under a name that no other module has."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
