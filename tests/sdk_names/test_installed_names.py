"""The SDK's names as packages of an environment, and the advice for a program without them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdk_names.places import PACKAGES
from support.repository import ROOT
from support.surroundings import new_environment

LOOK = "import popdist; print('getNumInstances' in popdist.__all__, popdist.__file__)"
ADVICE = (
    "popdist_py: this environment emulates poptorch: run the program with poprun-py PROGRAM, or "
    "install the names once with poprun-py --install-names\n"
)


@pytest.fixture
def run(python_with_names, tmp_path):
    """Run the environment's Python with the words that follow; return its whole output."""

    def run(*words, code=0, **environ):
        done = subprocess.run(
            [python_with_names[0], *map(str, words)],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    yield run
    run("-m", "popdist_py", "--remove-names")


@pytest.fixture
def site(python_with_names):
    return Path(python_with_names[1])


def files_in(site):
    """Return the files and folders below ``site``, except those of the library."""
    found = (str(path.relative_to(site)) for path in site.rglob("*"))
    return {path for path in found if "popdist_" not in path and path != "__pycache__"}


def test_names_are_installed_and_removed(run, site):
    before = files_in(site)
    wrote = f"installed {', '.join(PACKAGES)} in {site} (pip lists them as poprun-py-names)\n"
    for _ in range(2):
        assert run("-m", "popdist_py", "--install-names") == wrote
    ours = f"True {site}/popdist_py/sdk_names/popdist/__init__.py\n"
    assert run("-c", LOOK) == ours
    assert run("-I", "-c", LOOK) == ours
    assert run("-c", "import horovod.common.util as u, horovod; print(horovod.__version__)")
    # The launcher and python -m popdist_py find the same packages.
    for mode in ("auto", "yes"):
        assert run("-m", "popdist_py", "--sdk-names", mode, "-c", LOOK) == ours
    assert "No module named 'popdist'" in run("-c", LOOK, code=1, POPDIST_SDK_NAMES="no")
    # pip uninstall removes the files that are in the record.
    (record,) = site.glob("poprun_py_names-*.dist-info/RECORD")
    recorded = {row[0] for row in csv.reader(record.read_text().splitlines())}
    written = {path for path in files_in(site) - before if not path.endswith(".pyc")}
    assert {path for path in written if (site / path).is_file()} == recorded
    said = run("-m", "popdist_py", "--remove-names")
    assert said == f"removed {', '.join(PACKAGES)} from {site}\n"
    assert files_in(site) == before
    assert "nothing to remove" in run("-m", "popdist_py", "--remove-names")


@pytest.mark.sweep
def test_pip_lists_and_uninstalls_them(run, site, python_with_names):
    before = files_in(site)
    run("-m", "popdist_py", "--install-names")
    pip = (sys.executable, "-m", "pip", "--python", python_with_names[0])
    for words in (("show", "poprun-py-names"), ("uninstall", "-y", "poprun-py-names")):
        done = subprocess.run(
            [*pip, *words], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
    assert "Successfully uninstalled poprun-py-names" in done.stdout
    assert files_in(site) == before


def test_other_packages_stay(run, site, tmp_path):
    real = site / "horovod" / "__init__.py"
    elsewhere = tmp_path / "base" / "popart.py"
    for path in (real, elsewhere):
        path.parent.mkdir()
        path.write_text("mine = True\n")
    (site / "zzz_base.pth").write_text(f"{elsewhere.parent}\n")
    try:
        said = run("-m", "popdist_py", "--install-names")
        assert said == (
            f"installed popdist, poptorch in {site} (pip lists them as poprun-py-names)\n"
            f"horovod was not installed, because another package is in {real}\n"
            f"popart was not installed, because another package is in {elsewhere}\n"
        )
        assert (
            run("-c", "import horovod, popart; print(horovod.mine, popart.mine)") == "True True\n"
        )
        # A package that replaces ours later is not removed with ours.
        (site / "poptorch" / "__init__.py").write_text("mine = True\n")
        said = run("-m", "popdist_py", "--remove-names")
        assert said.startswith(f"removed popdist from {site}\n")
        assert f"{site}/poptorch/__init__.py was not removed, because it was changed" in said
        for name in ("poptorch", "popdist"):
            (site / name).mkdir(exist_ok=True)
            (site / name / "__init__.py").write_text("mine = True\n")
        before = files_in(site)
        refused = run("-m", "popdist_py", "--install-names", code=2)
        assert "poptorch was not installed, because" in refused
        assert "Uninstall these packages first" in refused
        assert {path for path in files_in(site) if not path.endswith(".pyc")} <= before
    finally:
        for name in ("horovod", "poptorch", "popdist"):
            if (site / name / "__init__.py").exists():
                (site / name / "__init__.py").unlink()
        (site / "zzz_base.pth").unlink()


def test_the_file_of_an_earlier_release_is_replaced(run, site):
    old = site / "zz_popdist_py_sdk_names.pth"
    old.write_text("import sys\n")
    assert run("-m", "popdist_py", "--install-names").startswith("installed horovod, ")
    assert not old.exists()


def test_a_program_without_the_names_is_told_how_to_run(run, site, tmp_path, request):
    hook = site / "popdist_torchvision_hook.pth"
    hook.write_text("import popdist_torchvision_hook\n")
    request.addfinalizer(hook.unlink)
    program = tmp_path / "vae.py"
    program.write_text("import poptorch\n")
    said = run(program, code=1)
    assert said.endswith(f"ModuleNotFoundError: No module named 'poptorch'\n{ADVICE}")
    assert "popdist_py: " not in run(program, code=1, POPDIST_SDK_NAMES="no")
    # Programs that ask whether the name is there get the same answer as ever.
    program.write_text(
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('poptorch'))\n"
        "try:\n    import horovod.torch\nexcept ImportError as error:\n    print(repr(error))\n"
        "import missing\n"
    )
    said = run(program, code=1)
    assert said.startswith("None\nModuleNotFoundError(\"No module named 'horovod'\")\nTraceback")
    assert said.endswith("ModuleNotFoundError: No module named 'missing'\n")
    # A hook of the program still shows the traceback. Other programs keep Python's own hook.
    own = "import sys\nsys.excepthook = lambda *_: print('mine')\nimport popdist\n"
    program.write_text(own)
    assert run(program, code=1) == f"mine\n{ADVICE.replace('poptorch', 'popdist')}"
    assert run("-c", "import sys; print(sys.excepthook is sys.__excepthook__)") == "True\n"
    # A finder that stands behind the hook is still asked.
    program.write_text(
        "import sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        print('asked for', name)\n"
        "sys.meta_path.append(Finder)\n"
        "try:\n    import popart\nexcept ImportError:\n    pass\n"
    )
    assert run(program) == "asked for popart\n"


def test_the_command_installs_the_names_too(tmp_path):
    def command(*words, code=0):
        done = subprocess.run(
            [python, "-m", "poprun_py", *words], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    python = new_environment(tmp_path / "environment")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site / "editable.pth").write_text(f"{ROOT}\n")
    assert command("--install-names").startswith("installed horovod, popart, popdist, poptorch in ")
    for words in (("-n", "2", "--install-names"), ("--install-names", "true")):
        assert "--install-names cannot be used with" in command(*words, code=2)
    assert command("--remove-names").startswith("removed horovod, popart, popdist, poptorch from ")
    (site / "editable.pth").unlink()


def test_names_are_given_only_to_an_environment_that_has_the_library(python, tmp_path):
    executable = new_environment(tmp_path / "environment")
    done = python("--install-names", executable=executable)
    assert done.returncode == 2
    assert "not installed in this environment. First run: pip install" in done.stderr
    assert not list(tmp_path.glob("environment/lib/*/site-packages/*popdist*"))
