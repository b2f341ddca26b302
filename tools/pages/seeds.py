"""Runs every command of the hands-on texts as it runs here, and writes docs/seeds.md.

python -m tools.pages.seeds
python -m tools.pages.seeds --only hands_on
python -m tools.pages.seeds --check --only "--eight-bit-io"

What the texts print, and what is run in its place, stands in tools/pages/seed_texts. ``--check``
compares what is printed with the page instead of writing it, without the numbers that vary between
runs.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from examples.common.arguments import Parser, rate
from tools.pages.seed_texts.compared import NO, PARTLY, YES, Comparison, compare
from tools.pages.seed_texts.index import texts as all_texts
from tools.pages.seed_texts.running import place
from tools.pages.seed_texts.values import Text, TextCommand
from tools.running.printed import comparable

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "seeds.md"


@dataclass(frozen=True)
class Shown:
    """What a command showed here, and in how many seconds, rounded up."""

    lines: Sequence[str]
    seconds: int


#: By a text's title and one of its commands, as the text prints it.
Printed = Mapping[tuple[str, str], Shown]

_HOLDS = (YES, PARTLY, NO)
_HEAD = """# The hands-on texts, command by command

Every command that the texts print, in their order: what the text shows below it, what is shown
here when it runs, and why that differs. `make seeds` runs all of them in a copy of the project and
writes this page. The texts' own programs [run as they are printed](tutorials-verbatim.md), too.

- **The text's** is what stands below "The text shows": it was printed on IPUs, or on the machine of
  the text's author.
- **Measured here**, on two cores: times, items a second and what bars say of them; losses and
  accuracies, which come of real training. The pictures are generated files in the format of the
  text's data set, so that accuracies are not those of the text.
- **Modelled:** cycles, bytes and times of an IPU, as far as a program says so itself
  ([how](device.md)). Nothing here ran on an IPU.
- **Left out** of what is shown: bars on their way, and the folders of the run.

Each row ends with a line that says whether the command **holds here**, and what was compared:
lines, fields or numbers that the text shows, or only the exit code if the text shows no output.

- **yes**: all of these are the same here, and the command is run as printed.
- **partly**: some of these are the same, or another command is run in its place: with a smaller
  model, or with less or other data.
- **no**: none of these is the same, or the command is not run.

Lines that are shown only here are not compared.

"""


def page(texts: Iterable[Text], printed: Printed) -> str:
    """Return the page's text."""
    texts = list(texts)
    return "".join([_HEAD, _summary(texts, printed), *(_section(text, printed) for text in texts)])


def _summary(texts: Sequence[Text], printed: Printed) -> str:
    lines = [f"| text | commands | {' | '.join(_HOLDS)} |", "|---|" + "--:|" * 4]
    total: Counter[str] = Counter()
    for text in texts:
        kinds = Counter(
            _compared(one, printed.get((text.title, one.text))).holds for one in text.commands
        )
        total += kinds
        lines.append(f"| [{text.title}](#{_anchor(text.title)}) | {_cells(kinds)} |")
    return "\n".join([*lines, f"| together | {_cells(total)} |"]) + "\n"


def _cells(kinds: Counter[str]) -> str:
    return " | ".join(str(number) for number in (kinds.total(), *(kinds[kind] for kind in _HOLDS)))


def _anchor(title: str) -> str:
    """Return what a heading is called in a link."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(text: Text, printed: Printed) -> str:
    parts = [_command(one, printed.get((text.title, one.text))) for one in text.commands]
    return f"\n## {text.title}\n\nThe tutorial here: [{text.page}]({text.page}).\n{''.join(parts)}"


def _command(command: TextCommand, shown: Shown | None) -> str:
    """Show a command: the text's, ours, and why they differ."""
    parts = [f"\n### `{command.text}`\n"]
    if command.shows:
        parts.append(f"\nThe text shows:\n\n{_block(command.shows)}")
    if command.here:
        parts.append(f"\n{_here(command, shown)}\n\n{_printed(shown)}")
    found = _compared(command, shown)
    parts.append(f"\n**Holds here: {found.holds}.** {found.compared} {command.why}\n")
    return "".join(parts)


def _compared(command: TextCommand, shown: Shown | None) -> Comparison:
    return compare(command, None if shown is None else shown.lines)


def _here(command: TextCommand, shown: Shown | None) -> str:
    """Say in one line what is run, where, and what is special about it."""
    words = shlex.join(re.sub(r"\{(data|out)\}", r"\1", word) for word in command.here)
    folder = "the project" if command.folder in ("", ".") else f"`{command.folder}`"
    code = f", which ends with exit code {command.code}" if command.code else ""
    seconds = f", in about {shown.seconds} s" if shown else ""
    vary = " Numbers vary." if command.numbers_vary else ""
    return f"Here, in {folder}, as `{words}`{code}{seconds}.{vary}"


_NOTHING = "It prints nothing.\n"


def _printed(shown: Shown | None) -> str:
    if not shown:
        return "It has not been run yet.\n"
    return _block(shown.lines) if shown.lines else _NOTHING


def _block(lines: Sequence[str]) -> str:
    text = "\n".join(line.rstrip() for line in lines)
    return f"```text\n{text}\n```\n"


_TITLE = re.compile(r"^## (.+)\n", re.M)
_ONE = re.compile(r"^### `([^\n]+)`\n(.*?)(?=^### `|\Z)", re.M | re.S)
_HERE = re.compile(
    rf"^Here, [^\n]+, in about (\d+) s\.[^\n]*\n\n(?:{_NOTHING}|```text\n(.*?)^```$)", re.M | re.S
)


def printed_on(text: str) -> dict[tuple[str, str], Shown]:
    """Return what a page says was printed here."""
    _, *parts = _TITLE.split(text)
    return {
        (title, command): Shown(tuple((found[2] or "").splitlines()), int(found[1]))
        for title, section in zip(parts[::2], parts[1::2], strict=True)
        for command, body in _ONE.findall(section)
        if (found := _HERE.search(body))
    }


def chosen(texts: Mapping[str, Text], only: str | None) -> list[tuple[Text, TextCommand]]:
    """Return the commands that can run of the texts whose name, or of those whose words, match."""
    return [
        (text, command)
        for name, text in texts.items()
        for command in text.commands
        if command.here
        and (not only or only in (name, text.title, text.page) or only in command.text)
    ]


def run(
    commands: Sequence[tuple[Text, TextCommand]],
    patience: float = 1.0,
    keep: Callable[[Printed], None] = lambda _: None,
) -> tuple[dict[tuple[str, str], Shown], list[str]]:
    """Run the commands; returns what each printed, and what failed, with its output.

    ``keep`` gets what was printed so far, after each: who interrupts the program loses little.
    """
    printed, failures = {}, []
    with place() as here, tqdm(commands, unit="command", disable=None) as bar:
        for index, (text, command) in enumerate(bar):
            bar.set_postfix_str(command.text[-60:])
            out = here.folder / f"out-{index}"
            out.mkdir()
            seconds = command.seconds * patience
            compiling = any(line.startswith("Graph compilation") for line in command.shows)
            values = {"out": str(out)}
            done = here.run(command.here, command.folder, values, seconds, compiling=compiling)
            if problem := done.problem(command.code, seconds):
                failures.append("\n".join([f"{command.text}: {problem}", *done.lines]))
                continue
            lines = tuple(_kept(command, done.lines))
            printed[text.title, command.text] = Shown(lines, math.ceil(done.seconds))
            keep(printed)
    return printed, failures


def _kept(command: TextCommand, lines: Sequence[str]) -> list[str]:
    """Return the lines that the command's patterns are found in."""
    patterns = command.keep or ("",)
    return [line for line in lines if any(re.search(pattern, line) for pattern in patterns)]


def differences(
    commands: Iterable[tuple[Text, TextCommand]], printed: Printed, before: Printed
) -> list[str]:
    """Say which commands print something else than before, numbers that vary left out."""
    found = []
    for text, command in commands:
        key = text.title, command.text
        if key not in printed:
            continue  # it failed, which is said already
        now, then = printed[key].lines, before[key].lines if key in before else ()
        vary = command.numbers_vary
        if comparable([*now], numbers_vary=vary) != comparable([*then], numbers_vary=vary):
            found.append("\n".join([f"{command.text}: the page shows something else", *now]))
    return found


def files() -> dict[Path, str]:
    """Return the page with what it says was printed, and the texts as they are now."""
    printed = printed_on(PAGE.read_text(encoding="utf-8"))
    return {PAGE: page(all_texts().values(), printed)}


def main(argv: list[str] | None = None) -> list[str]:
    """Run what is asked for, write or compare the page; returns what failed."""
    parser = Parser(
        description=f"{__doc__.splitlines()[0]} Example: python -m tools.pages.seeds --check"
    )
    parser.add_argument("--only", metavar="TEXT", help="one module's name, or words of commands")
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument(
        "--patience", type=rate, default=1.0, metavar="FACTOR",
        help="multiply every time limit, on a machine that has other work",
    )  # fmt: skip
    args = parser.parse_args(argv)
    texts = all_texts()
    commands = chosen(texts, args.only)
    if not commands:
        parser.error(
            f"--only {args.only}: no command has that; one of {', '.join(texts)} is a text"
        )
    before = printed_on(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}

    def write(printed: Printed) -> None:
        PAGE.write_text(page(texts.values(), {**before, **printed}), encoding="utf-8")

    if args.check:
        printed, failures = run(commands, args.patience)
        return failures + differences(commands, printed, before)
    write(before)
    return run(commands, args.patience, write)[1]


if __name__ == "__main__":
    sys.exit("\n\n".join(f"failed: {failure}" for failure in main()) or 0)
