"""Type checkers read a user's program against the installed wheel; the checkout is out of sight."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tools.release.checking import Release, run
from tools.release.environments import environments

_OURS = Path(__file__).with_name("user_program")


def typing(release: Release) -> str:
    """In each environment: mypy and basedpyright make of a user's program what it says."""
    place = release.environments / "typing"
    place.mkdir(exist_ok=True)
    program = place / "user_code.py"
    for name in (program.name, "pyrightconfig.json"):
        shutil.copyfile(_OURS / name, place / name)
    checked = 0
    for folder in environments(release):
        _check(release, program, folder / "bin" / "python")
        checked += 1
    return f"{checked} environments: mypy, basedpyright"


def _check(release: Release, program: Path, python: Path) -> None:
    place = program.parent
    run(
        *(sys.executable, "-m", "mypy", "--config-file", release.root / "setup.cfg"),
        *("--python-executable", python, program),
        cwd=place,
    )
    run(
        *(sys.executable, "-m", "basedpyright", "--project", place, "--pythonpath", python),
        cwd=place,
    )
