"""CI runs a few failed tests of a group once more, and says so; more, or a second time, is red.

So is what is left on the machine at its end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from support.repository import ROOT

SCRIPT = ROOT / ".ci/run"
# The other targets do nothing.
MAKEFILE = """
export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
.DEFAULT:
\t@:
test:
\t@cat test.py > /dev/null
\t@{python} -m pytest -p xdist -q -n 0 --rootdir . -c /dev/null test.py $(ARGS)
"""
PASSES = "def test_passes(): pass\n"
# The first time all fail; the second time those for which ``mended`` holds pass.
FLAKY = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    before = pathlib.Path(f"ran-{{number}}")
    ran = before.exists()
    before.touch()
    assert ran and {mended}
"""
# In place of the real one, for others work on this machine: the file says what is left.
STATE = """
import pathlib, sys
if sys.argv[1] == "snapshot":
    pathlib.Path(sys.argv[2]).touch()
sys.exit(pathlib.Path("left").exists() or not pathlib.Path(sys.argv[2]).exists())
"""
LAST = "=== passed only the second time:"


@pytest.fixture
def ci(tmp_path):
    """Run the script over a Makefile of its own, where ``test`` runs the text given."""

    def run(tests):
        (tmp_path / ".ci").mkdir()
        shutil.copy(SCRIPT, tmp_path / ".ci/run")
        (tmp_path / "tools").mkdir()
        (tmp_path / "tools/machine_state.py").write_text(STATE)
        (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
        if tests:
            (tmp_path / "test.py").write_text(tests)
        return subprocess.run(
            [tmp_path / ".ci/run"], capture_output=True, text=True, timeout=90, cwd="/"
        )

    return run


def test_those_that_pass_the_second_time_are_named_last(ci):
    done = ci(PASSES + FLAKY.format(count=2, mended=True))
    assert done.returncode == 0, done.stdout
    _, last, names = done.stdout.rpartition(LAST)
    assert last
    assert sorted(names.split()) == [
        "===",
        "===",
        "test.py::test_flaky[0]",
        "test.py::test_flaky[1]",
    ]
    assert "test-sweep took" in done.stdout


@pytest.mark.parametrize(
    ("tests", "shown"),
    [
        (FLAKY.format(count=2, mended="number == 0"), "=== once more, alone:"),
        (FLAKY.format(count=6, mended=True), ""),
        ("import missing\n" + FLAKY.format(count=1, mended=True), ""),
        ("", ""),
    ],
    ids=["a second time", "too many", "not all ran", "another failure"],
)
def test_what_else_fails_is_red(ci, tests, shown):
    done = ci(tests)
    assert done.returncode == 1, done.stdout
    assert LAST not in done.stdout
    assert ("=== once more, alone:" in done.stdout) == bool(shown)
    assert "test-sweep" not in done.stdout


def test_what_is_left_at_the_end_is_red(ci):
    done = ci("def test_leaves(): open('left', 'w')\n")
    assert done.returncode == 1, done.stdout
    assert "compare" in done.stdout.splitlines()[-1]
