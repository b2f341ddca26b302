"""The two examples of a new option in CONTRIBUTING.md, applied to a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]

# A sentence that names a file, a place in it, and the block that belongs there.
_STEP = re.compile(
    r"^(?:Insert in|Append to) `([^`]+)`(?:, (before|after) `([^`]+)`)?:\n\n```\w+\n(.*?)^```$",
    re.M | re.S,
)
_LAUNCH = """
import os, sys
import poprun_py
def seed():
    import os
    return os.environ["PYTHONHASHSEED"]
print(poprun_py.launch(seed, num_instances=2, hash_seed=7))
"""


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the project without what was built there."""
    left_out = shutil.ignore_patterns(".[!c]*", "build", "__pycache__", "*.egg-info")
    return Path(shutil.copytree(ROOT, tmp_path / "tree", ignore=left_out))


def texts(tree):
    """Return the bytes of every file by its path, without bytecode."""
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & {*path.parts}
    }


def apply_steps(heading, tree):
    """Insert the blocks below a heading where the page says, and return the files' names."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = []
    for name, where, anchor, block in _STEP.findall(section):
        names.append(name)
        lines = (tree / name).read_text(encoding="utf-8").splitlines(keepends=True)
        if not where:
            (tree / name).write_text("".join([*lines, "\n\n", block]), encoding="utf-8")
            continue
        index = next(i for i, line in enumerate(lines) if anchor in line)
        indent = re.match(" *", lines[index])[0]
        added = [
            indent + line if line.strip() else line for line in block.splitlines(keepends=True)
        ]
        if lines[index].lstrip().startswith("def "):
            added.append("\n")
        # A blank line follows a heading.
        index += 2 if where == "after" else 0
        (tree / name).write_text(
            "".join([*lines[:index], *added, *lines[index:]]), encoding="utf-8"
        )
    return names


def run(tree, *words, **variables):
    """Run Python in the tree, and return its standard output."""
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree), **variables}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_code(tree, names):
    """Run ruff on the changed modules of the tree, as ``make check`` does."""
    modules = [name for name in names if name.endswith(".py")]
    run(tree, "-m", "ruff", "check", "-q", "--no-cache", *modules)
    run(tree, "-m", "ruff", "format", "-q", "--no-cache", "--check", *modules)


@pytest.mark.mpi
def test_option_of_the_launcher(tree):
    before = texts(tree)
    written = apply_steps("A new option of the launcher", tree)
    run(tree, "-m", "tools.pages.generated")
    after = texts(tree)
    changed = {name for name in after if after[name] != before.get(name)}
    assert len(written) == 4
    assert changed == {*written, "poprun_py/options/keyword_types.py"}
    check_code(tree, changed)
    tests = next(name for name in written if name.startswith("tests/"))
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "tests/poprun_py/options")

    text = run(tree, "-m", "poprun_py", "--help", "hash-seed")
    assert "--hash-seed" in text
    words = " ".join(text.split())
    assert "variable POPRUN_HASH_SEED also sets --hash-seed" in words
    assert "so does hash-seed in a configuration file" in words
    plan = run(tree, "-m", "poprun_py", "--dry-run", "true", POPRUN_HASH_SEED="7")
    assert "PYTHONHASHSEED=7" in plan
    (tree / "seed.py").write_text(_LAUNCH, encoding="utf-8")
    assert run(tree, "seed.py").strip() == "['7', '7']"


def test_option_of_poptorch(tree):
    before = texts(tree)
    written = apply_steps("A new option of PopTorch", tree)
    run(tree, "-m", "tools.pages.generated")
    after = texts(tree)
    assert len(written) == 5
    assert {name for name in after if after[name] != before.get(name)} == {*written}
    check_code(tree, written)
    tests = next(name for name in written if name.startswith("tests/"))
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "tests/poptorch/options")
