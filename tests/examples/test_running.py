"""What the programs of the examples share: data made once and whole, and Ctrl-C in one line."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]
DATA = ("--training", "50", "--test", "10")


@pytest.fixture
def shared(monkeypatch):
    """Import a module of examples/common as the programs do."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield lambda name: importlib.import_module(f"common.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]


def maker(text):
    """Return what makes a folder with one file in it."""

    def make(beside):
        (beside / "set").mkdir()
        (beside / "set" / "file").write_text(text)

    return make


def test_a_folder_is_made_once_with_all_above_it(shared, tmp_path):
    make_once = shared("running").make_once
    folder = tmp_path / "a path" / "with blanks" / "set"
    assert make_once(folder, maker("first"))
    assert not make_once(folder, None)  # nothing is made for nothing
    assert (folder / "file").read_text() == "first"
    assert list(folder.parent.iterdir()) == [folder]


def test_the_quicker_of_two_that_make_a_folder_at_once_wins(shared, tmp_path):
    make_once = shared("running").make_once
    folder = tmp_path / "set"

    def slow(beside):
        maker("slow")(beside)
        assert make_once(folder, maker("quick"))

    assert not make_once(folder, slow)
    assert (folder / "file").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_who_is_stopped_while_making_a_folder_leaves_nothing(shared, tmp_path, error):
    def stopped(beside):
        maker("half")(beside)
        raise error

    with pytest.raises(error):
        shared("running").make_once(tmp_path / "set", stopped)
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder_above_is_an_error(shared, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        shared("running").make_once(tmp_path / "file" / "set", maker(""))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_data_that_is_there_stays_as_it_is(shared, tmp_path, capsys, name):
    main = shared("sample_data").main
    main([name, str(tmp_path), *DATA])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert capsys.readouterr().out == f"{name} is in {tmp_path}\n"
    with pytest.raises(SystemExit) as caught:
        main([name, str(tmp_path), "--training", "60"])
    assert caught.value.code == 2
    assert "is there already; remove it" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_data_that_cannot_be_written_are_refused_in_one_line(shared, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        shared("sample_data").main(["mnist", str(tmp_path / "file"), *DATA])
    error = capsys.readouterr().err
    assert (caught.value.code, error.count("\n")) == (2, 1)
    assert "give a folder that can be written" in error


@pytest.mark.parametrize(("rank", "said"), [("0", "\n-c: interrupted\n"), ("1", "")])
def test_ctrl_c_is_one_line_and_exit_code_130(rank, said):
    program = (
        "import os, signal; from common.running import run; "
        "run(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT / "examples", env={"RANK": rank},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


# For the name of each module, a program and arguments with which it imports that module.
# ``{here}`` is an empty folder, in which it runs.
NEEDS = {
    "matplotlib": "pipelining/figures.py ramp-up",
    "PIL": "course/sample_faces.py {here}/faces",
    "pytorch_lightning": "course/lightning_example.py",
    "sklearn": "ddp.py",
    "optuna": "sweeps/optuna_study.py",
    "submitit": "sweeps/submitit_jobs.py --learning-rates 1",
    "yaml": "cnns/train.py --config mk2_resnet8_test",
    "jupytext": "common/notebooks.py {examples}/pipelining/walkthrough.py",
    "wandb": "cnns/train.py --config mk2_resnet8_test --wandb --log-dir {here}",
    "skimage": "course/lfw_dataset.py",
}
WITHOUT = """
import pathlib, runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv = sys.argv[2:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.sweep] * (name != "skimage")) for name in NEEDS],
)
def test_a_missing_package_is_named_in_one_line_with_how_to_install_it(shared, tmp_path, module):
    program, *words = NEEDS[module].format(here=tmp_path, examples=ROOT / "examples").split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, ROOT / "examples" / program, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    name, _ = shared("optional_packages").PACKAGES[module]
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert f"python -m pip install {name}" in done.stderr.splitlines()[-1]


def test_every_optional_package_of_the_examples_is_known_with_its_extra(shared):
    packages = shared("optional_packages").PACKAGES
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    options = config["options"]
    required = {re.split(r"[ ><=]", line)[0] for line in options["install_requires"].split("\n")}
    files = [path for path in (ROOT / "examples").rglob("*.py") if path.parent.name != "test"]
    own = {path.stem for path in files} | {path.parent.name for path in files}
    found = set().union(*(third_party(path) for path in files)) - own - required
    assert found - packages.keys() == {"poprun_py", "popdist_py"}
    assert packages.keys() - found <= {"crc32c"}  # which tfrecord imports
    for name, extra in packages.values():
        lines = config["options.extras_require"][extra].splitlines()
        assert name in {re.split(r"[ ><=]", line)[0] for line in lines}, name


def third_party(path):
    """Return the top-level names of modules outside the standard library that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def test_another_module_that_is_missing_keeps_its_traceback(shared):
    how_to_install = shared("optional_packages").how_to_install
    assert how_to_install(ModuleNotFoundError("no", name="no_such_module")) is None
    assert how_to_install(ImportError("cannot import x", name="PIL")) is None
    assert "needs pillow" in how_to_install(ModuleNotFoundError("no", name="PIL.Image"))
