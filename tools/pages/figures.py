"""Draws the figures in docs/figures/ that the hands-on texts have.

python -m tools.pages.figures
python -m tools.pages.figures --check
python -m tools.pages.figures --check --only pipeline

Each is drawn by a program of the examples, which tools/pages/seed_texts names. ``--check`` looks
for what each figure has to show, draws those without measured values again, which have to come out
the same, and writes nothing.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from examples.common.arguments import Parser, rate
from tools.pages.seed_texts.index import figures as all_figures
from tools.pages.seed_texts.running import Place, place
from tools.pages.seed_texts.values import Figure

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
_LEAST_MARKS = 3
_SMALLEST = 200  # pixels of a picture's shorter side


def other_matplotlib() -> str | None:
    """Say which matplotlib is here, if it is not the one whose bytes are compared; else None."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^matplotlib==(\S+)$", constraints, re.M)[1]
    found = metadata.version("matplotlib")
    return None if found == pinned else f"matplotlib {found} is here, {pinned} drew the figures"


def draw(figure: Figure, here: Place, patience: float = 1.0) -> tuple[Path, list[str]]:
    """Draw a figure in a copy of the project; returns its file, and what is wrong."""
    path = here.folder / figure.name
    seconds = figure.seconds * patience
    done = here.run(figure.command, ".", {"file": str(path)}, seconds)
    if problem := done.problem(0, seconds):
        return path, ["\n".join([problem, *done.lines])]
    return path, missing(path, figure)


def missing(path: Path, figure: Figure) -> list[str]:
    """Return what the file of a figure does not show, in words; none is well."""
    if not path.exists():
        return ["there is no such file"]
    if path.suffix == ".png":
        return _blank(path)
    if len(figure.marks) < _LEAST_MARKS:
        return [f"{len(figure.marks)} marks are looked for, at least {_LEAST_MARKS} are needed"]
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
    colours = " ".join(element.get("style", "") for element in root.iter())
    return [
        f"{mark!r} is neither an id nor in a text"
        for mark in figure.marks
        if mark not in ids
        and not any(mark in text for text in words)
        and not (mark.startswith("#") and mark in colours)
    ]


def _blank(path: Path) -> list[str]:
    from PIL import Image

    with Image.open(path) as picture:
        shortest, (darkest, lightest) = min(picture.size), picture.convert("L").getextrema()
    if shortest < _SMALLEST:
        return [f"{shortest} pixels, at least {_SMALLEST} are needed"]
    return ["nothing is drawn"] if darkest == lightest else []


def check(figure: Figure, here: Place, patience: float = 1.0) -> list[str]:
    """Look at a figure's file, and compare it with what is drawn now if that does not vary."""
    path = FOLDER / figure.name
    problems = missing(path, figure)
    if problems or not figure.same_each_time:
        return problems
    again, problems = draw(figure, here, patience)
    if not problems and not other_matplotlib() and again.read_bytes() != path.read_bytes():
        problems.append("it comes out otherwise now: make figures")
    return problems


def write(figure: Figure, here: Place, patience: float = 1.0) -> list[str]:
    """Draw a figure into its folder, if all is well with it."""
    path, problems = draw(figure, here, patience)
    if not problems:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / figure.name).write_bytes(path.read_bytes())
    return problems


def chosen(figures: Sequence[Figure], only: str | None) -> list[Figure]:
    """Return the figures whose names have ``only`` in them."""
    return [figure for figure in figures if (only or "") in figure.name]


def main(argv: list[str] | None = None) -> list[str]:
    """Draw or check what is asked for; returns what failed."""
    parser = Parser(
        description=f"{__doc__.splitlines()[0]} Example: python -m tools.pages.figures --check"
    )
    parser.add_argument("--only", metavar="NAME", help="figures with this in their file names")
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, write nothing"
    )
    parser.add_argument(
        "--patience", type=rate, default=1.0, metavar="FACTOR",
        help="multiply every time limit, on a machine that has other work",
    )  # fmt: skip
    args = parser.parse_args(argv)
    figures = all_figures()
    wanted = chosen(figures, args.only)
    if not wanted:
        names = ", ".join(figure.name for figure in figures)
        parser.error(f"--only {args.only}: no figure has that in its name; there are {names}")
    failures = []
    with place() as here, tqdm(wanted, unit="figure", disable=None) as bar:
        for figure in bar:
            bar.set_postfix_str(figure.name)
            problems = (check if args.check else write)(figure, here, args.patience)
            failures += [f"{figure.name}: {problem}" for problem in problems]
    if args.check and (reason := other_matplotlib()):
        sys.stderr.write(f"not compared byte by byte: {reason}\n")
    return failures


if __name__ == "__main__":
    sys.exit("\n".join(f"failed: {failure}" for failure in main()) or 0)
