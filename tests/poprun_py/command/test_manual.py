"""The help topic ``manual``, and the folders where the manual page may be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from poprun_py.command.manual import find_page, page_folders


def test_the_first_folder_with_the_page_counts(tmp_path):
    empty, first, second = (tmp_path / name for name in ("empty", "first", "second"))
    for folder in (empty, first, second):
        folder.mkdir()
    assert find_page([empty, tmp_path / "missing"]) is None
    for folder in (second, first):
        (folder / "poprun-py.1").touch()
    assert find_page([empty, first, second]) == first / "poprun-py.1"


def test_the_page_of_this_environment_comes_first():
    assert page_folders()[0] == Path(sys.prefix, "share", "man", "man1")


def manual(path):
    return subprocess.run(
        [sys.executable, "-m", "poprun_py", "--help", "manual"],
        env={**os.environ, "PATH": path, "MANPAGER": "cat"},
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


@pytest.mark.skipif(not shutil.which("man"), reason="the program man is not installed")
def test_the_manual_is_shown():
    shown = manual(os.environ["PATH"])
    assert shown.startswith("POPRUN-PY(1)")
    assert "--num-instances N" in shown


def test_without_man_the_whole_help_is_shown(tmp_path):
    shown = manual(str(tmp_path))
    assert shown.startswith("Usage: poprun-py [OPTIONS] PROGRAM")
    assert "--vipu-partition NAME" in shown
