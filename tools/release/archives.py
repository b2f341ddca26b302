"""The archive of sources and the wheel: how they are built, and what is in them."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from tools.release.checking import LeftOut, Red, Release, run
from tools.release.tree import fresh_clone

# Files whose absence an installed job would notice late: types, templates of pages, hooks of
# Python's start, names of the SDK.
_IN_WHEEL = (
    "poprun_py/py.typed",
    *(f"popdist_py/html_pages/{name}.js" for name in ("charts", "tables")),
    *(f"popdist_py/html_pages/{name}.css" for name in ("page", "style")),
    *(f"popdist_py/html_pages/{name}.html.jinja" for name in ("fragment", "page", "parts")),
    "popdist_py/__init__.pyi",
    "popdist_py/py.typed",
    "popdist_py/sdk_names/poptorch/py.typed",
    "popdist_torchvision_hook.py",
    "popdist_torchvision_hook.pth",
    "poprun_py/instance/diagnostics_hook/sitecustomize.py",
    "popdist_py/start_hook/sitecustomize.py",
)
_IN_SOURCES = (
    *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("setup.py", "setup.cfg", "pyproject.toml", "constraints.txt", "Makefile"),
    *("docs/architecture.md", "examples/train.py", "tests/conftest.py"),
)
_TOP_OF_WHEEL = re.compile(
    r"(poprun_py|popdist_py|popdist_torchvision_hook\.(py|pth)$|poprun_py-[^/]+\.(dist-info|data))(/|$)"
)
_NEVER = re.compile(
    r"(^|/)(__pycache__|\.venv|\.git|[^/]*_cache|poprun-runs|build|dist)/|\.py[co]$"
)


def build(release: Release) -> str:
    """Build the archive of sources from a clean tree, and the wheel from that archive."""
    source = fresh_clone(release, release.source.name)
    shutil.rmtree(release.dist, ignore_errors=True)
    _build(source, release.dist)
    release.wheel.stat()
    release.sources.stat()
    sizes = (f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in release.dist.iterdir())
    return ", ".join(sorted(sizes))


def equal_bytes(release: Release) -> str:
    """A second build, of another clone, gives the same bytes."""
    if release.quick:
        raise LeftOut("a part of the whole check")
    again = release.out / "dist-again"
    shutil.rmtree(again, ignore_errors=True)
    _build(fresh_clone(release, "source-again"), again)
    for first in (release.wheel, release.sources):
        if first.read_bytes() != (again / first.name).read_bytes():
            raise Red(f"{first.name}: two builds of one commit differ; compare {first} and {again}")
    digest = hashlib.sha256(release.wheel.read_bytes()).hexdigest()
    return f"two builds of one commit are equal; wheel sha256 {digest[:16]}"


def _build(source: Path, target: Path) -> None:
    epoch = run("git", "log", "-1", "--format=%ct", cwd=source).strip()
    run(
        *(sys.executable, "-m", "build", "--installer", "uv", "--outdir", target, source),
        cwd=source,
        env={"SOURCE_DATE_EPOCH": epoch},
    )


def metadata(release: Release) -> str:
    """Indexes accept the metadata, and can show the README."""
    files = (release.sources, release.wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=release.out)
    return "twine check --strict"


def wheel_problems(names: list[str]) -> list[str]:
    """Return what a wheel with members of these names lacks, and what it must not have."""
    missing = [f"{name} is missing" for name in _IN_WHEEL if name not in names]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        missing.append("the licence is missing")
    if not any(name.endswith(".data/data/share/man/man1/poprun-py.1") for name in names):
        missing.append("the manual page is missing")
    extra = [name for name in names if not _TOP_OF_WHEEL.match(name) or _NEVER.search(name)]
    return missing + [f"{name} must not be in it" for name in extra[:5]]


def sources_problems(names: list[str]) -> list[str]:
    """Return what an archive of sources with these members, without its folder, lacks or has."""
    missing = [f"{name} is missing" for name in _IN_SOURCES if name not in names]
    return missing + [f"{name} must not be in it" for name in names if _NEVER.search(name)][:5]


def contents(release: Release) -> str:
    """The wheel has the packages, types, hooks and licence alone; the sources have all."""
    in_wheel = zipfile.ZipFile(release.wheel).namelist()
    with tarfile.open(release.sources) as archive:
        in_sources = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    problems = [f"wheel: {problem}" for problem in wheel_problems(in_wheel)]
    problems += [f"sources: {problem}" for problem in sources_problems(in_sources)]
    modules = {name for name in in_sources if re.match(r"pop(run|dist)_py/.*\.py$", name)}
    problems += [f"wheel: {name} is missing" for name in sorted(modules - set(in_wheel))[:5]]
    if problems:
        raise Red("; ".join(problems))
    run(
        *(sys.executable, "-m", "check_wheel_contents", release.wheel),
        *("--ignore", "W009"),  # two packages and the module that Python's start reads
        cwd=release.out,
    )
    return f"{len(in_wheel)} files in the wheel, {len(in_sources)} in the archive of sources"
