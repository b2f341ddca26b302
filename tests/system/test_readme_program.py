"""The program that the README shows runs as it is pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.examples
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_the_function_gives_the_results_that_the_comment_says(script, tmp_path):
    (shown,) = _BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, script(shown, "squares.py")], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == re.search(r"# (\[.*\])", shown)[1]
