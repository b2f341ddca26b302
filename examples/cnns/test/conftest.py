"""Hook for ``python3 -m pytest`` in the folder of the CNN application: it runs the tests.

The tests are in tests/examples of the repository, because they use fixtures of that folder. Tests
with the marker ``long`` are left out. Options such as ``-x`` and ``-k NAME`` are passed on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def pytest_cmdline_main(config: pytest.Config) -> int:
    """Run the tests in tests/examples in place of collecting tests from this folder."""
    files = sorted(map(str, (ROOT / "tests" / "examples").glob("test_cnns_*.py")))
    if not files:
        raise pytest.UsageError(
            f"{ROOT} has no tests/examples: run pytest in a copy of the whole repository"
        )
    called_in = config.invocation_params.dir
    words = [word for word in config.invocation_params.args if (called_in / word).resolve() != HERE]
    command = [sys.executable, "-m", "pytest", "-m", "not long", *words, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
