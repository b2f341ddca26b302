"""What ``make release-check`` calls red: each of its judgements, over small inputs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from support.repository import ROOT

from tools import release_check
from tools.release import archives, dependencies, environments, pythons, tree
from tools.release.checking import LeftOut, Red, Release, run

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- A.

## [0.1.0] - 2026-11-21

### Fixed

- B.
"""


@pytest.fixture
def release(tmp_path):
    (tmp_path / "out").mkdir()
    return Release(tmp_path, tmp_path / "out", tmp_path / "environments", ())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[Unreleased]", "[0.2.0]", "the first section"),
        ("- 2026-11-21", "- Unreleased", "is not ## [X.Y.Z] - YYYY-MM-DD"),
        ("### Fixed", "### Bugs", "### Bugs is none of"),
        ("- B.", "", "### Fixed has no entry"),
        ("### Fixed", "### Added\n\n- C.\n\n### Added", "twice"),
        ("[0.1.0]", "[0.2.0]", "still to come"),
        ("[0.1.0] -", "[0.1.0] - 2026-11-20\n\n## [0.1.5] -", "newest"),
    ],
)
def test_a_changelog_of_another_form_is_named(old, new, problem):
    assert tree.changelog_problems(CHANGELOG, "0.2.0", tagged=False) == []
    found = tree.changelog_problems(CHANGELOG.replace(old, new), "0.2.0", tagged=False)
    assert any(problem in each for each in found), found


def test_a_tag_without_a_section_is_named():
    assert tree.changelog_problems(CHANGELOG, "0.1.0", tagged=True) == []
    (problem,) = tree.changelog_problems(CHANGELOG, "0.2.0", tagged=True)
    assert "no section ## [0.2.0]" in problem


def test_an_import_that_is_not_declared_and_an_unused_declaration_are_named(tmp_path):
    for name in ("poprun_py", "popdist_py", "examples", "tests", "docs", "benchmarks", "tools"):
        (tmp_path / name).mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "popdist_torchvision_hook.py").touch()
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    (tmp_path / "setup.cfg").write_text(text)
    (tmp_path / "poprun_py" / "a.py").write_text("import requests\nimport click.types\n")
    found = dependencies.problems(tmp_path)
    assert "poprun_py/a.py imports requests, which setup.cfg does not ask for" in found
    assert "install_requires asks for psutil, which nothing imports" in found
    assert not any("click" in each for each in found)


def test_contents_that_lack_or_have_too_much_are_named():
    manual = "poprun_py-1.data/data/share/man/man1/poprun-py.1"
    whole = [*archives._IN_WHEEL, manual, "poprun_py-1.dist-info/licenses/LICENSE"]
    assert archives.wheel_problems(whole) == []
    assert archives.wheel_problems(whole[1:]) == [f"{whole[0]} is missing"]
    assert archives.wheel_problems(whole[:-1]) == ["the licence is missing"]
    for extra in ("tests/conftest.py", "poprun_py/__pycache__/a.pyc", ".venv/bin/python"):
        assert archives.wheel_problems([*whole, extra]) == [f"{extra} must not be in it"]
    sources = [*archives._IN_SOURCES]
    assert archives.sources_problems(sources) == []
    assert archives.sources_problems([*sources[1:], ".mypy_cache/a"]) == [
        f"{sources[0]} is missing", ".mypy_cache/a must not be in it",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("(BSD-3-Clause AND Zlib) OR GPL-3.0-only", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("MIT AND GPL-3.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("UNKNOWN", False),
    ],
)
def test_licences_are_judged_by_their_expression(licence, allowed):
    one = {"Name": "a", "Version": "1", "License-Expression": licence,
           "License-Metadata": "UNKNOWN", "License-Classifier": "UNKNOWN"}  # fmt: skip
    assert (environments.refused_licences([one]) == []) is allowed


def test_a_command_that_fails_is_red_with_its_last_lines(tmp_path):
    with pytest.raises(Red, match="exit code 3\nwhy"):
        run(sys.executable, "-c", "print('why'); raise SystemExit(3)", cwd=tmp_path)
    with pytest.raises(Red, match="took more than"):
        run("tail", "-f", "/dev/null", cwd=tmp_path, seconds=0.2)
    with pytest.raises(Red, match="is not installed"):
        run("no-such-command", cwd=tmp_path)


def test_a_python_that_is_not_there_is_named(capsys):
    assert release_check.main(["--pythons", "2.0", "--only", "changelog"]) == 2
    assert "no Python 2.0 here" in capsys.readouterr().err


def test_a_red_step_gives_exit_code_1_and_hides_no_other(monkeypatch, capsys):
    def red(_):
        raise Red("this, so do that")

    def left_out(_):
        raise LeftOut("no git")

    steps = {"a": red, "b": lambda _: 1 / 0, "c": left_out, "d": lambda _: "well"}
    monkeypatch.setattr(release_check, "STEPS", steps)
    assert release_check.main(["--quick", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["state"], one["text"]) for one in found] == [
        ("a", "red", "this, so do that"),
        ("b", "red", "ZeroDivisionError: division by zero"),
        ("c", "left out", "no git"),
        ("d", "green", "well"),
    ]
    assert release_check.main(["--quick", "--only", "d"]) == 0
    assert capsys.readouterr().out.startswith("d             green")


@pytest.fixture
def repository(release):
    """Make a git repository of two packages that name their version."""
    for name in ("poprun_py", "popdist_py"):
        (release.root / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", release.root / name)
    (release.root / ".gitignore").write_text("/out/\n")
    git = ("git", "-C", release.root, "-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "One"], check=True)
    return release


def test_packages_that_name_different_versions_are_red(repository):
    assert tree.clean_tree(repository).startswith("commit ")
    (repository.root / "popdist_py" / "__init__.py").write_text('__version__ = "9.0.0.dev0"\n')
    with pytest.raises(Red, match="different versions"):
        tree.next_version(repository.root)
    with pytest.raises(Red, match=r"1 changes .* popdist_py/__init__.py"):
        tree.clean_tree(repository)
    (repository.root / "popdist_py" / "__init__.py").write_text('__version__ = "9.0"\n')
    with pytest.raises(Red, match="no line __version__"):
        tree.next_version(repository.root)


def test_the_quick_check_leaves_out_what_takes_longest(release):
    quick = replace(release, quick=True)
    for step in (archives.equal_bytes, environments.versions):
        with pytest.raises(LeftOut, match="a part of the whole check"):
            step(quick)


def test_uv_takes_the_folders_of_wheels_that_pip_is_told_of():
    assert pythons.uv_environ({"PIP_FIND_LINKS": "/a"})["UV_FIND_LINKS"] == "/a"
    assert (
        pythons.uv_environ({"PIP_FIND_LINKS": "/a", "UV_FIND_LINKS": "/b"})["UV_FIND_LINKS"] == "/b"
    )
    assert pythons.uv_environ({}) == {}
