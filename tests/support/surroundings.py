"""Surroundings that a job may find: other users, closed folders, new environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a wheel is built from.
_SOURCES = (
    *("poprun_py", "popdist_py", "popdist_torchvision_hook.py"),
    *("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"),
    # The manual pages are made of these.
    *("tools/__init__.py", "tools/pages/__init__.py", "tools/pages/manual", "docs/reliability.md"),
)
# Mounts what it is told to where only its own children see it, and runs the rest.
_MOUNTED = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"',
)
# A user without an entry in passwd. Its Python may lie in root's home, which it cannot enter.
_STRANGER = """
if [ -n "$1" ]; then
  mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 tmpfs "$HOME_OF_ROOT" &&
  mkdir -p "$1" && mount --bind "$2" "$1" && cd "$PWD" || exit 1
fi
shift 2
unset HOME_OF_ROOT
exec setpriv --reuid 54321 --regid 54321 --clear-groups "$@"
"""


@cache
def _can_mount() -> bool:
    try:
        done = subprocess.run([*_MOUNTED, "sh", "size=4k", "/mnt", "true"], check=False,
                              capture_output=True, timeout=10)  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0


def mounted(folder: Path, how: str) -> tuple[str, ...]:
    """Return the words that run a command with an empty ``folder``: ``ro``, or ``size=64k``."""
    if not _can_mount():
        pytest.skip("mounting a file system needs root and unshare")
    return (*_MOUNTED, "sh", how, str(folder))


def as_stranger(folder: Path) -> tuple[str, ...]:
    """Return the words that run a command as a user without a name; ``folder`` is for mounts."""
    if not _can_mount() or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root, unshare and setpriv")
    home = Path("~root").expanduser()
    base = Path(sys.base_prefix).resolve()
    hidden = str(base) if base.is_relative_to(home) else ""
    return ("env", f"HOME_OF_ROOT={home}", "unshare", "-m", "sh", "-c", _STRANGER, "sh", hidden,
            str(folder))  # fmt: skip


def new_environment(folder: Path) -> Path:
    """Make a virtual environment with what this one has, except this project; return its Python.

    A path of this environment is added, so that nothing is downloaded; its own .pth files, such as
    that of an editable install, do not count there.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    purelib = sysconfig.get_path("purelib")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "shared.pth").write_text(f"{purelib}\n")
    return folder / "bin" / "python"


def copied_sources(folder: Path) -> Path:
    """Copy what a wheel is built from, so that building leaves nothing in the project."""
    folder.mkdir()
    for name in _SOURCES:
        source = ROOT / name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def install(python: Path, *what: str | Path) -> None:
    """Let this environment's pip install into another one, without looking anything up."""
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps",
         "--no-build-isolation", "--no-index", *map(str, what)],
        check=True, timeout=100, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
