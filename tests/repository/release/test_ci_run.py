"""CI's script: the order of its groups, second tries, its record, and what makes it fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support.repository import ROOT

SCRIPTS = ROOT / ".ci"
GROUPS = ["install", "check", "release-check", "test", "test-examples", "test-sweep", "test-hosts",
          "test-numa", "test-trainers"]  # fmt: skip
# The targets of the real one: each prints its name, and what the test adds.
TARGET = """
{name}:
\t@echo "{name} runs"
{recipe}
"""
RUNS_TESTS = f"""\
\t@cat test.py > /dev/null
\t@{sys.executable} -m pytest -q -p xdist.plugin -n 0 --rootdir . -c /dev/null test.py $(ARGS)
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
    """Run the script over a Makefile of its own.

    ``tests`` is what the target ``test`` runs by pytest; the other words are recipes of targets.
    """

    def run(tests=None, **recipes):
        folder = tmp_path / "checkout"
        shutil.copytree(SCRIPTS, folder / ".ci", dirs_exist_ok=True)
        (folder / "tools").mkdir(exist_ok=True)
        (folder / "tools/machine_state.py").write_text(STATE)
        if tests is not None:
            recipes["test"] = RUNS_TESTS
        if tests:
            (folder / "test.py").write_text(tests)
        (folder / "Makefile").write_text(
            "".join(
                TARGET.format(name=name, recipe=recipes.get(name.replace("-", "_"), ""))
                for name in (*GROUPS, "system-packages")
            )
        )
        # An emulator of machines is installed.
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir(exist_ok=True)
        (bin_folder / "qemu-system-x86_64").touch(mode=0o755)
        return subprocess.run(
            [folder / ".ci/run"], capture_output=True, text=True, timeout=300, cwd="/",
            env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}",
                 "XDG_STATE_HOME": str(tmp_path / "state"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip

    return run


def ran(done):
    return [line.removesuffix(" runs") for line in done.stdout.splitlines() if "runs" in line]


def test_all_groups_run_in_order_and_their_times_are_told(ci):
    # The second of two groups side by side would be seen first, if it were not kept apart.
    done = ci(test_hosts="\t@while [ ! -e numa ]; do sleep 0.01; done", test_numa="\t@touch numa")
    assert done.returncode == 0, done.stdout
    assert [name for name in ran(done) if name != "system-packages"] == GROUPS
    _, shown = done.stdout.split("=== times:")
    for name in ("make install", "run_tests test-sweep", "side_by_side test-hosts test-numa"):
        assert f" s  {name}\n" in shown
    assert shown.splitlines()[-1].endswith("s of 1200 s in total")


@pytest.mark.parametrize("group", ["test-hosts", "test-numa"])
def test_a_failure_of_one_of_two_groups_side_by_side_is_red(ci, group):
    done = ci(**{group.replace("-", "_"): "\t@exit 1"})
    assert done.returncode == 1, done.stdout
    assert {"test-hosts", "test-numa"} < set(ran(done))
    assert "test-trainers" not in ran(done)


def test_tests_that_pass_the_second_time_are_named_last_and_by_the_next_run(ci):
    names = ["test.py::test_flaky[0]", "test.py::test_flaky[1]"]
    done = ci(PASSES + FLAKY.format(count=2, mended=True))
    assert done.returncode == 0, done.stdout
    _, last, shown = done.stdout.rpartition(LAST)
    assert last
    assert sorted(shown.split()) == ["===", "===", *names]
    again = ci()
    earlier, _, _ = again.stdout.partition("=== make install")
    assert all(name in earlier for name in names), again.stdout
    assert LAST not in again.stdout


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
    done = ci(test="\t@touch left")
    assert done.returncode == 1, done.stdout
    assert "compare" in done.stdout.partition("=== times:")[0].splitlines()[-1]


def test_trainers_run_until_they_have_passed_with_the_same_code(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / ".ci")
    (tmp_path / ".ci/trainers-passed-with.txt").unlink(missing_ok=True)

    def git(*words):
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def trainers(word):
        done = subprocess.run([tmp_path / ".ci/trainers", word], capture_output=True, text=True)
        return done.returncode, done.stdout

    def commit(text):
        for folder in ("collectives", "horovod", "torch_backend"):
            (tmp_path / "popdist_py" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "popdist_py" / folder / "code.py").write_text(text)
        for folder in ("frameworks", "pytorch"):
            (tmp_path / "tests" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "tests" / folder / "code.py").write_text("")
        git("add", "popdist_py", "tests")
        git("commit", "-q", "-m", "x")

    assert trainers("changed")[0] == 0  # without git
    git("init", "-q")
    commit("1")
    assert trainers("changed")[0] == 0
    code, said = trainers("passed")
    assert code == 0
    assert "commit .ci/trainers-passed-with.txt" in said
    code, said = trainers("changed")
    assert code == 1
    assert "left out" in said
    commit("2")
    assert trainers("changed")[0] == 0
    # What passed is not what is committed.
    (tmp_path / "popdist_py/horovod/code.py").write_text("3")
    assert "not written" in trainers("passed")[1]
    assert trainers("changed")[0] == 0
