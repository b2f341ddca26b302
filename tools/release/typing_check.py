"""Type checkers read a user's program against the installed wheel; the checkout is out of sight."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from release.checking import Release, run
from release.environments import environments


def typing(release: Release) -> str:
    """In each environment: mypy and basedpyright make of a user's program what it says."""
    place = release.environments / "typing"
    place.mkdir(exist_ok=True)
    program = place / "user_code.py"
    ours = release.root / "tests" / "typing"
    shutil.copyfile(ours / program.name, program)
    settings = json.loads((ours / "pyrightconfig.json").read_text(encoding="utf-8"))
    del settings["extraPaths"]  # the checkout
    (place / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
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
