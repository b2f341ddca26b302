"""Checks everything that a release needs, from the tree to a job of the installed wheel.

python -m tools.release_check                 all steps, for every Python that is found
python -m tools.release_check --quick         for this Python alone, without the longest steps
python -m tools.release_check --only build contents
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.release import archives, dependencies, environments, tree, typing_check
from tools.release.checking import LeftOut, Red, Release

_ROOT = Path(__file__).resolve().parents[1]
# In this order: some work with what those before them made.
STEPS: dict[str, Callable[[Release], str]] = {
    "tree": tree.clean_tree,
    "version": tree.version_of_tags,
    "changelog": tree.changelog,
    "dependencies": dependencies.dependencies,
    "build": archives.build,
    "metadata": archives.metadata,
    "contents": archives.contents,
    "bytes": archives.equal_bytes,
    "install": environments.install,
    "smoke": environments.smoke,
    "launcher": environments.launcher_alone,
    "typing": typing_check.typing,
    "versions": environments.versions,
    "licences": environments.licences,
    "sbom": environments.bill_of_materials,
}


@dataclass(frozen=True)
class Result:
    """How a step ended: ``green``, ``red`` or ``left out``; what it found, in seconds."""

    step: str
    state: str
    seconds: float
    text: str


def check(name: str, release: Release) -> Result:
    """Do one step, and tell how it ended; an error of its own is red as well."""
    began = time.monotonic()
    try:
        state, text = "green", STEPS[name](release)
    except LeftOut as why:
        state, text = "left out", str(why)
    except Red as why:
        state, text = "red", str(why)
    except Exception as error:  # what a step did not foresee must not hide the other steps
        state, text = "red", f"{type(error).__name__}: {error}"
    return Result(name, state, round(time.monotonic() - began, 1), text)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check everything that a release needs; exit code 1 if a step is red.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    known = ", ".join(STEPS)
    add("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"these steps alone: {known}")
    add("--quick", action="store_true", help="this Python alone, without the longest steps")
    add(
        "--pythons",
        nargs="+",
        default=[],
        metavar="PYTHON",
        help="versions or paths; else all found",
    )
    add(
        "--environments",
        type=Path,
        metavar="DIR",
        help="keep environments there, or use those there",
    )
    add("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Do the steps in their order, show each when it ends, and return the exit code."""
    arguments = _arguments(words)
    wanted = [sys.executable] if arguments.quick else arguments.pythons
    out = _ROOT / "build" / "release"
    out.mkdir(parents=True, exist_ok=True)
    folder = arguments.environments or Path(tempfile.mkdtemp(prefix="poprun-py-release-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = environments.pythons(wanted)
        release = Release(_ROOT, out, folder.resolve(), found, quick=arguments.quick)
        results = []
        for name in (name for name in STEPS if name in (arguments.only or STEPS)):
            results.append(check(name, release))
            if not arguments.json:
                _show(results[-1])
    except Red as why:
        sys.stderr.write(f"{why}\n")
        return 2
    finally:
        if arguments.environments is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    red = [result.step for result in results if result.state == "red"]
    if red and not arguments.json:
        sys.stdout.write(f"red: {', '.join(red)}\n")
    return 1 if red else 0


def _show(result: Result) -> None:
    first, *more = result.text.splitlines() or [""]
    rows = [f"{result.step:<13} {result.state:<9} {result.seconds:6.1f} s  {first}"]
    sys.stdout.write("\n".join([*rows, *(f"{'':34}{line}" for line in more)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
