"""The launcher in an environment with the packages of requirements-launcher.txt and no others.

The environment has links to the installed packages, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.repository import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]
COMMANDS = {"poprun-py": "poprun_py.__main__", "pod": "poprun_py.command.pods.pod_command"}
# An instance that waits until the file ``go`` is in the folder of the test.
WAITS = "echo instance $RANK; until [ -e go ]; do sleep 0.02; done"


def needed_packages() -> set[str]:
    """Return the packages of the file and the packages that these need, without extras."""
    lines = (ROOT / "requirements-launcher.txt").read_text().splitlines()
    rest = [line for line in lines if not line.startswith("#")]
    found: set[str] = set()
    while rest:
        name = re.match(r"[\w.-]+", rest.pop())[0].lower()
        if name not in found:
            found.add(name)
            needs = metadata.requires(name) or []
            # On Python 3.11 and newer, none of these packages needs one with another marker.
            rest += [need for need in needs if ";" not in need]
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Return the Python of the environment."""
    folder = tmp_path_factory.mktemp("light") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "project.pth").write_text(f"{ROOT}\n")
    for name in needed_packages():
        for file in metadata.files(name):
            here = Path(file.locate())
            if file.name in ("mpirun", "prterun"):
                (folder / "bin" / file.name).symlink_to(os.path.realpath(here))
            elif len(file.parts) > 1 and ".." not in file.parts:
                link = site / file.parts[0]
                if not link.exists():
                    link.symlink_to(here.parents[len(file.parts) - 2])
    return folder / "bin" / "python"


@pytest.fixture
def run(light, tmp_path):
    """Run a command of the project in the environment."""

    def call(command, *words, **environ):
        code = f"import sys; from {COMMANDS[command]} import main; main()"
        return subprocess.run(
            [light, "-c", code, *map(str, words)],
            cwd=tmp_path, env={**clean_environ(tmp_path), **environ},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50,
        )  # fmt: skip

    return call


def clean_environ(folder):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**environ, "XDG_RUNTIME_DIR": str(folder), "POPRUN_PODS": str(folder / "pods")}


def test_the_launcher_runs_records_and_reports_a_job(run, light, tmp_path):
    missing = "torch", "torchvision", "plotly", "falcon", "waitress", "numpy", "mpi4py", "psutil"
    code = f"from importlib.util import find_spec; print([*map(find_spec, {missing})])"
    done = subprocess.run([light, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{[None] * len(missing)}\n", done.stderr

    code = f"import sys; from {COMMANDS['poprun-py']} import main; main()"
    words = ("-n", "2", "--oversubscribe", "--output-dir", "runs", "sh", "-c", WAITS)
    with subprocess.Popen(
        [light, "-c", code, *words], cwd=tmp_path, env=clean_environ(tmp_path),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        try:
            first = job.stdout.readline()
            state = run("poprun-py", "--status", job.pid)
        finally:
            (tmp_path / "go").touch()
        # communicate() would lose a second line that readline() has read ahead.
        output, errors = job.stdout.read(), job.stderr.read()
    assert (state.returncode, state.stderr) == (0, "")
    assert "2 instances" in state.stdout
    assert job.wait(30) == 0, errors
    assert sorted(line.rpartition(":")[2] for line in (first + output).splitlines()) == [
        "instance 0", "instance 1",
    ]  # fmt: skip
    assert "warning" not in errors, errors
    assert (tmp_path / "runs/latest/report.html").exists()

    (tmp_path / "runs/latest/report.html").unlink()
    done = run("poprun-py", "report", "runs/latest")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "runs/latest/report.html").exists()


def test_the_launcher_plans_a_job(run):
    done = run(
        *("poprun-py", "-n", 2, "--num-replicas", 8, "--oversubscribe"),
        *("--dry-run", "--print-topology", "tree", "true"),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "start_wrapper.py" in done.stdout


def test_the_server_of_a_pod_names_the_missing_packages(run):
    assert run("pod", "create", "pod", "lab", "--type", "POD4").returncode == 0
    done = run("pod", "serve")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-1].endswith(
        ": the server of a pod needs the package waitress, which is not installed: "
        "pip install falcon waitress"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "from popdist_py import poptorch",
            "popdist_py.poptorch needs the package torch, which is not installed: "
            "pip install torch torchvision",
        ),
        (
            "import popdist_py.horovod.torch",
            "popdist_py.horovod.torch needs the package torch, which is not installed: "
            "pip install torch",
        ),
        (
            "import popdist_py; popdist_py.init(); popdist_py.all_reduce(1)",
            "a collective of popdist_py needs the package numpy, which is not installed: "
            "pip install numpy",
        ),
    ],
)
def test_a_program_learns_which_package_is_missing(light, code, message):
    done = subprocess.run([light, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"
