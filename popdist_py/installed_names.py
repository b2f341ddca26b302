"""The SDK's names as installed packages of a Python environment, and their removal.

``poprun-py --install-names`` writes a small distribution, which pip lists and can uninstall. It has
a package for each name, such as ``poptorch``, with a single file that loads the package from
``sdk_names``. So the start of Python does not take longer, and an update of the library needs no
second installation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

NAMES = ("horovod", "popart", "popdist", "poptorch")
DISTRIBUTION = "poprun-py-names"
_DIST_INFO = DISTRIBUTION.replace("-", "_")
# A .pth file with the same effect, which earlier releases wrote.
_PTH = "zz_popdist_py_sdk_names.pth"
_SDK_NAMES = Path(__file__).resolve().parent / "sdk_names"
_PACKAGE = '''\
"""{name} of the emulation popdist_py, written by poprun-py --install-names."""

from popdist_py.installed_names import load

load(__name__)
'''
_METADATA = """\
Metadata-Version: 2.1
Name: {distribution}
Version: {version}
Summary: The names {names} for the emulation popdist_py of poprun-py
Requires-Dist: poprun-py
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: poprun-py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Prints the library and the packages that Python finds, as JSON. The finder of the .pth file, and
# folders without __init__.py, do not count.
_PROBE = """\
import importlib.util, json, sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_SdkFinder"]
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({n: s.origin or n for n, s in specs.items() if s and s.loader and s.origin}))
"""


class InstallError(Exception):
    """The names cannot be installed or removed; the message says what to do."""


def load(name: str) -> None:
    """Replace the module ``name``, which is being imported, by the package in ``sdk_names``.

    Raises:
        ModuleNotFoundError: The launcher's option --sdk-names forbids the emulation.
    """
    from importlib import util

    if os.environ.get("POPDIST_SDK_NAMES") == "no":
        raise ModuleNotFoundError(
            f"No module named {name!r} (turned off by --sdk-names no)", name=name
        )
    folder = _SDK_NAMES / name
    spec = util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)


def install(site: Path, version: str) -> list[str]:
    """Write the packages of the names that are not installed yet; return sentences about it.

    Args:
        site: The folder of the environment's packages.
        version: The version of the library.

    Raises:
        InstallError: The library is not installed in the environment, all names are taken by other
            packages, or a file cannot be written.
    """
    found = _found_packages()
    if "popdist_py" not in found:
        raise InstallError(
            "poprun-py is not installed in this environment. First run: pip install poprun-py"
        )
    taken = {name: found[name] for name in NAMES if name in found and not _is_ours(found[name])}
    taken |= {
        name: str(site / name)
        for name in NAMES
        if name not in found and _has_other_content(site / name)
    }
    free = [name for name in NAMES if name not in taken]
    others = [
        f"{name} was not installed, because another package is in {taken[name]}" for name in taken
    ]
    if not free:
        raise InstallError(
            f"{'; '.join(others)}. Uninstall these packages first, or use poprun-py --sdk-names yes"
        )
    try:
        _remove_files(site)
        _write(site, _contents(free, version))
    except OSError as error:
        raise _not_writable(error) from None
    return [f"installed {', '.join(free)} in {site} (pip lists them as {DISTRIBUTION})", *others]


def remove(site: Path) -> list[str]:
    """Remove the packages that ``install`` wrote, and return sentences about it.

    A file that has changed since then stays, because another package may have replaced it.

    Raises:
        InstallError: A file cannot be removed.
    """
    try:
        removed, changed = _remove_files(site)
    except OSError as error:
        raise _not_writable(error) from None
    said = [f"removed {', '.join(removed)} from {site}"] if removed else []
    said += [
        f"{path} was not removed, because it was changed after its installation" for path in changed
    ]
    return said or [f"nothing to remove: {site} does not contain packages of the emulation"]


# --- what is in the environment ------------------------------------------------------------------


def _found_packages() -> dict[str, str]:
    """Start a new Python, and return the files of the packages that this Python finds, by name."""
    import json
    import subprocess

    words = [sys.executable, "-I", "-c", _PROBE, "popdist_py", *NAMES]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InstallError(f"cannot start {sys.executable}: {done.stderr.strip()[-300:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _is_ours(file: str) -> bool:
    path = Path(file)
    try:
        return path.read_text(encoding="utf-8") == _PACKAGE.format(name=path.parent.name)
    except (OSError, ValueError):
        return False


def _has_other_content(folder: Path) -> bool:
    """Tell whether a folder contains more than the bytecode that an uninstalled package leaves."""
    files = folder.rglob("*") if folder.is_dir() else ()
    return any(file.is_file() and file.suffix != ".pyc" for file in files) or folder.is_file()


# --- files ---------------------------------------------------------------------------------------


def _contents(names: Iterable[str], version: str) -> dict[str, str]:
    """Return the text of each file by its path, which is relative to the folder of packages."""
    info = f"{_DIST_INFO}-{version}.dist-info"
    files = {f"{name}/__init__.py": _PACKAGE.format(name=name) for name in names}
    metadata = _METADATA.format(distribution=DISTRIBUTION, version=version, names=", ".join(names))
    files |= {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": _WHEEL,
        f"{info}/INSTALLER": "poprun-py\n",
        f"{info}/top_level.txt": "".join(f"{name}\n" for name in names),
    }
    lines = [
        f"{path},sha256={_digest(text.encode())},{len(text)}\n" for path, text in files.items()
    ]
    return {**files, f"{info}/RECORD": "".join([*lines, f"{info}/RECORD,,\n"])}


def _digest(data: bytes) -> str:
    from base64 import urlsafe_b64encode
    from hashlib import sha256

    return urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()


def _write(site: Path, files: Mapping[str, str]) -> None:
    """Write all files. After an error, remove the files that were written before it."""
    written: list[Path] = []
    try:
        for name, text in files.items():
            path = site / name
            path.parent.mkdir(exist_ok=True)
            written.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
            _remove_empty(path.parent)
        raise


def _remove_files(site: Path) -> tuple[list[str], list[Path]]:
    """Remove the recorded files and the .pth file; return the removed names and changed files."""
    removed, changed = [], []
    if (pth := site / _PTH).exists():
        pth.unlink()
        removed.append(_PTH)
    for info in sorted(site.glob(f"{_DIST_INFO}-*.dist-info")):
        for line in (info / "RECORD").read_text(encoding="utf-8").splitlines():
            path, digest = site / line.split(",")[0], line.split(",")[1].removeprefix("sha256=")
            if path.parent == info or not path.is_file():
                continue
            if _digest(path.read_bytes()) != digest:
                changed.append(path)
                continue
            path.unlink()
            removed.append(path.parent.name)
            for bytecode in path.parent.glob("__pycache__/__init__.*.pyc"):
                bytecode.unlink()
            _remove_empty(path.parent / "__pycache__")
            _remove_empty(path.parent)
        for path in info.iterdir():
            path.unlink()
        info.rmdir()
    return removed, changed


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _not_writable(error: OSError) -> InstallError:
    return InstallError(
        f"cannot change {error.filename}: {error.strerror}. Use your own environment "
        "(python -m venv)"
    )
