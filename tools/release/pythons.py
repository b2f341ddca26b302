"""Which Pythons this machine has: the one we run with, those of pyenv, those on PATH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def python_of(version: str) -> str | None:
    """Return a Python of this version, such as ``3.12``, that makes environments; else None."""
    own = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    here = ".".join(map(str, sys.version_info[:2]))
    ours = [sys.executable] if version == here else []
    for path in (*ours, *map(str, own), shutil.which(f"python{version}")):
        if path and _makes_environments(path):
            return path
    return None


def _makes_environments(path: str) -> bool:
    asked = [path, "-c", "import ensurepip, venv"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def uv() -> str:
    """Return the command uv, beside this Python or on PATH; SystemExit without one."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise SystemExit("no uv beside this Python or on PATH: install it (pip install uv)")
    return found


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` where uv takes wheels of the folders that pip is told of, too."""
    folders = environ.get("PIP_FIND_LINKS")
    return {**({"UV_FIND_LINKS": folders} if folders else {}), **environ}
