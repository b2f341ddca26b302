"""Commands that readers type in the folders of examples: pip with requirements.txt, and pytest."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from support.repository import ROOT

pytestmark = pytest.mark.examples

EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*/requirements.txt"))
OWN = "../.."
# jupytext makes the notebook of examples/pipelining, and pytest runs the tests of examples/cnns.
OF_MAKERS = {"jupytext", "pytest"}


def declared() -> dict[str, Requirement]:
    """Return the requirements in setup.cfg by name: those of poprun-py and of its extras."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].splitlines()
    for extra in ("tutorials", "examples", "wandb"):
        lines += parser["options.extras_require"][extra].splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {each.name: each for each in found}


def lines_of(file):
    """Return the lines of a file that pip reads."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def imports_of(folder) -> set[str]:
    """Return the packages that the programs of a folder import."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_requirements_are_those_that_setup_cfg_names(file):
    first, *others = lines_of(file)
    # pip reads a path from the folder in which it is called.
    assert first == OWN
    assert (file.parent / first).resolve() == ROOT
    known = declared()
    for line in others:
        asked = Requirement(line)
        assert asked.name in known, line
        assert not asked.specifier or asked.specifier == known[asked.name].specifier, line


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_requirements_hold_what_the_programs_import(file):
    listed = {Requirement(line).name for line in lines_of(file)[1:]} | {"poprun-py"}
    # Not listed: packages that poprun-py requires itself, and those only for making a folder.
    own = {Requirement(line).name for line in importlib.metadata.requires("poprun-py")
           if "extra ==" not in line}  # fmt: skip
    known = {_folded(name) for name in listed | own | OF_MAKERS}
    installed = importlib.metadata.packages_distributions()
    for module in imports_of(file.parent) & installed.keys():
        # Several packages may share a module's name, such as google.
        assert known & {_folded(name) for name in installed[module]}, module


def _folded(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_cnns_bring_weights_and_biases():
    names = {Requirement(line).name for line in lines_of(EXAMPLES / "cnns/requirements.txt")[1:]}
    assert "wandb" in names


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("folder", "program"),
    [("cnns", "train.py --config mk2_resnet8_test --epochs 1 --wandb --log-dir {out}"),
     ("data_loading", "data_loading.py --help"), ("hands_on", "main.py --help"),
     ("pipelining", "mnist_pipeline.py --help")],
    ids=lambda value: value.partition(" ")[0],
)  # fmt: skip
def test_requirements_install_in_a_clean_environment(tmp_path, folder, program):
    environ = {name: value for name, value in os.environ.items()
               if not name.startswith(("PYTHON", "VIRTUAL_ENV", "WANDB"))}  # fmt: skip
    # The versions of CI, because other builds of torch contain gigabytes for GPUs.
    environ |= {"WANDB_MODE": "offline", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    for words in (
        ["-m", "pip", "install", "-q", "-r", "requirements.txt"],
        program.format(out=tmp_path / "logs").split(),
    ):
        done = subprocess.run(
            [str(python), *words], cwd=EXAMPLES / folder, env=environ, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_pytest_in_the_folder_of_the_cnns_runs_their_tests():
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    here = "tests/examples/test_cnns_schedules.py"

    def collected(folder, *more):
        done = subprocess.run([*words, *more], cwd=folder, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    assert collected(EXAMPLES / "cnns", "-k", "test_cnns_schedules") == collected(ROOT, here)
    assert collected(EXAMPLES / "cnns", "test", "-k", "test_cnns_schedules")
