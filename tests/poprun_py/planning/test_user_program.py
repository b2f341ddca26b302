"""The program of a job, and Python modules that are found without an import."""

from __future__ import annotations

import sys

import pytest

from poprun_py.errors import StartError
from poprun_py.planning.user_program import require_program, resolve_program


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "alone.py": "",
        "pkg/__init__.py": "raise SystemExit('imported')",
        "pkg/mod.py": "raise SystemExit('imported')",
        "pkg/sub/__init__.py": "",
        "pkg/sub/__main__.py": "",
        "spaced/deep/tool.py": "",
        "moving/__init__.py": "__path__.append('/elsewhere')",
        "lib/elsewhere.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def problem(module, environ=None):
    """Return the error text for a module; empty if it can run."""
    program = resolve_program(("-m", module, "--lr", "1"))
    assert program == (sys.executable, "-m", module, "--lr", "1")
    try:
        require_program(program, {"PATH": "/bin", **(environ or {})})
    except StartError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "module",
    ["alone", "pkg.mod", "pkg.sub", "spaced.deep.tool", "moving.away", "json.tool", "pytest"],
)
def test_modules_that_python_would_run(module, folder):
    assert problem(module) == ""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("gone", "module gone was not found in "),
        ("pkg.gone", "module pkg.gone was not found in "),
        ("pkg.mod.x", "module pkg.mod.x was not found: pkg.mod is not a package"),
        (
            "pkg",
            (
                "module pkg is a package without __main__.py; give the name of a module in "
                "the package"
            ),
        ),
        ("spaced.deep", "is a package without __main__.py"),
        ("pkg..mod", "was not found"),
        ("alone.py", "module alone.py was not found: alone is not a package"),
        ("a/b", "was not found"),
    ],
)
def test_modules_that_python_would_not_run(module, said, folder):
    assert said in problem(module)


def test_variables_of_python_are_respected(folder):
    assert "was not found" in problem("elsewhere")
    assert problem("elsewhere", {"PYTHONPATH": "/nowhere:lib"}) == ""
    assert problem("elsewhere", {"PYTHONPATH": str(folder / "lib")}) == ""
    assert problem("alone") == ""
    assert "was not found" in problem("alone", {"PYTHONSAFEPATH": "1"})
