"""Imports programs of the project that are in no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from conftest import ROOT

__all__ = ["load"]


def load(path: str) -> ModuleType:
    """Import a file of the project by its path, under a name that no other module has."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
