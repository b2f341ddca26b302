"""The figures of the tutorials in docs/figures/, each drawn by a program of the examples.

python -m tools.pages.figures
python -m tools.pages.figures --check
python -m tools.pages.figures --check --only pipeline

``--check`` writes nothing. It looks for the marks of each figure, and draws the figures without
measured values again, which must give the same bytes.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from examples.common.arguments import Parser
from tools.running.project_copy import ProjectCopy, project_copy

__all__ = ["FIGURES", "FOLDER", "Figure", "check", "main", "missing", "other_matplotlib"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Figure:
    """An SVG file in docs/figures/, and the command that draws it.

    Attributes:
        name: The file's name.
        command: ``python`` and its words, run in the project's root. ``{file}`` is the new file.
        marks: Ids, words and colours that the file must contain.
        same_each_time: Whether each run gives the same bytes, because the figure is not measured.
        seconds: The time limit on two cores.
    """

    name: str
    command: Sequence[str]
    marks: Sequence[str]
    same_each_time: bool = True
    seconds: int = 120


def _words(command: str) -> tuple[str, ...]:
    return ("python", *command.split())


FIGURES: Sequence[Figure] = (
    Figure(
        "data-loading-iterations.svg",
        _words("examples/data_loading/figures.py iterations {file}"),
        ("queue-5", "ipu0-forward-5", "ipu0-backward-5", "80 samples"),
    ),
    Figure(
        "data-loading-batching.svg",
        _words("examples/data_loading/figures.py batching {file}"),
        ("replica1-iteration2-micro1", "44 to 47", "48 samples"),
    ),
    Figure(
        "course-data-parallel.svg",
        _words("examples/course/data_parallel.py --figure {file}"),
        ("one-device", "replicate-model", "compute", "gather-outputs"),
    ),
    Figure(
        "pipelining-ramp-up.svg",
        _words("examples/pipelining/figures.py ramp-up --output {file}"),
        ("all-ipus-work", "after 9 steps", "ramp-up-backward-3-5"),
    ),
    Figure(
        "pipelining-strategies.svg",
        _words("examples/pipelining/figures.py strategies --output {file}"),
        ("pipelined: 22 steps", "sharded: 64 steps", "sharded-forward-3-4"),
    ),
    Figure(
        "cnns-learning-curve.svg",
        _words(
            "-m poprun_py --num-instances 2 --num-replicas 8 examples/cnns/curve.py --figure {file}"
        ),
        ("training-loss", "training-accuracy", "validation-accuracy", "learning-rate", "RN8"),
        same_each_time=False,
        seconds=240,
    ),
)


def other_matplotlib() -> str | None:
    """Return a sentence about a matplotlib whose bytes are not comparable, or None."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^matplotlib==(\S+)$", constraints, re.M)[1]
    found = metadata.version("matplotlib")
    return None if found == pinned else f"matplotlib {found} is here, {pinned} drew the figures"


def draw(figure: Figure, here: ProjectCopy) -> tuple[Path, list[str]]:
    """Draw a figure in a copy of the project. Return its file and the problems."""
    path = here.folder / figure.name
    done = here.run(figure.command, ".", {"file": str(path)}, figure.seconds)
    if problem := done.problem(0, figure.seconds):
        return path, ["\n".join([problem, *done.lines])]
    return path, missing(path, figure)


def missing(path: Path, figure: Figure) -> list[str]:
    """Return sentences about the marks that the figure's file lacks."""
    if not path.exists():
        return ["there is no such file"]
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        return [f"no SVG: {error}"]
    ids = {element.get("id") for element in root.iter()}
    words = [
        " ".join("".join(element.itertext()).split())
        for element in root.iter()
        if element.tag.endswith("}text")
    ]
    return [
        f"{mark!r} is neither an id nor in a text"
        for mark in figure.marks
        if mark not in ids and not any(mark in text for text in words)
    ]


def check(figure: Figure, here: ProjectCopy) -> list[str]:
    """Check a figure's file, and compare it with a new drawing unless the figure is measured."""
    path = FOLDER / figure.name
    problems = missing(path, figure)
    if problems or not figure.same_each_time:
        return problems
    again, problems = draw(figure, here)
    if not problems and not other_matplotlib() and again.read_bytes() != path.read_bytes():
        problems.append("it comes out otherwise now: make figures")
    return problems


def write(figure: Figure, here: ProjectCopy) -> list[str]:
    """Draw a figure into docs/figures/ unless there are problems."""
    path, problems = draw(figure, here)
    if not problems:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / figure.name).write_bytes(path.read_bytes())
    return problems


def main(argv: list[str] | None = None) -> list[str]:
    """Draw or check the chosen figures, and return the failures."""
    parser = Parser(
        description=f"{__doc__.splitlines()[0]} Example: python -m tools.pages.figures --check"
    )
    parser.add_argument("--only", metavar="NAME", help="figures with this in their file names")
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, write nothing"
    )
    args = parser.parse_args(argv)
    wanted = [figure for figure in FIGURES if (args.only or "") in figure.name]
    if not wanted:
        names = ", ".join(figure.name for figure in FIGURES)
        parser.error(f"--only {args.only}: no figure has that in its name; there are {names}")
    failures = []
    with project_copy() as here, tqdm(wanted, unit="figure", disable=None) as bar:
        for figure in bar:
            bar.set_postfix_str(figure.name)
            problems = (check if args.check else write)(figure, here)
            failures += [f"{figure.name}: {problem}" for problem in problems]
    if args.check and (reason := other_matplotlib()):
        sys.stderr.write(f"not compared byte by byte: {reason}\n")
    return failures


if __name__ == "__main__":
    sys.exit("\n".join(f"failed: {failure}" for failure in main()) or 0)
