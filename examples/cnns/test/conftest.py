"""``python3 -m pytest`` in the folder of the CNN application: its tests, in tests/examples.

They use fixtures of the project's tests, and therefore stand among them. All but those with the
marker ``long`` run. Options such as ``-x`` and ``-k NAME`` are passed on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def pytest_cmdline_main(config: pytest.Config) -> int:
    """Run the tests of the application in place of a search for some here."""
    files = sorted(map(str, (ROOT / "tests" / "examples").glob("test_cnns_*.py")))
    if not files:
        raise pytest.UsageError(
            f"{ROOT} has no tests/examples: run pytest in a copy of the whole repository"
        )
    called_in = config.invocation_params.dir
    words = [word for word in config.invocation_params.args if (called_in / word).resolve() != HERE]
    command = [sys.executable, "-m", "pytest", "-m", "not long", *words, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
