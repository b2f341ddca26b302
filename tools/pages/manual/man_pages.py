"""Writes the manual pages of the commands: ``python -m tools.pages.manual.man_pages FOLDER``.

setup.py runs this module. An installation has the pages in share/man, where ``man poprun-py`` finds
them. A page does not contain a date or a version, so that two builds of a commit have equal bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from poprun_py.options.declared_options import GROUPS, OPTION_VARIABLES
from poprun_py.options.help_pages import (
    COMMAND,
    EXAMPLES,
    GRAMMAR,
    PLACES,
    PURPOSE,
    USAGE,
    HelpOption,
)
from tools.pages.manual.commands import (
    FILES,
    LAUNCHER,
    Described,
    Paragraph,
    described,
    shared_options,
)
from tools.pages.manual.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[3]
# The program apropos shows these lines.
_PURPOSES = {
    "poprun-py": "start the instances of a distributed job",
    "poprun-py-pod": "partitions of a pod of emulated IPUs",
    "gc-info": "list the emulated IPUs and who holds them",
    "gc-monitor": "show the emulated IPUs and the processes that hold them now",
}
_EXIT_CODE = re.compile(r"^\| (?P<code>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
_MARKS = re.compile(r"\[([^\]]+)\]\([^)]+\)|`([^`]+)`")


def pages() -> dict[str, str]:
    """Return every page by file name; ``poprun`` is another name of ``poprun-py``."""
    made = {f"{name}.1": _page(name, _of_command(name, command)) for name, command in FILES.items()}
    made["poprun-py.1"] = _page("poprun-py", _of_launcher())
    made["poprun.1"] = ".so man1/poprun-py.1\n"
    return made


def _page(name: str, body: Iterable[str]) -> str:
    others = ", ".join(f"\\fB{_text(other)}\\fR(1)" for other in sorted(_PURPOSES) if other != name)
    lines = [
        f'.TH {_text(name.upper())} 1 "" "poprun\\-py" "User Commands"',
        *(".SH NAME", f"{_text(name)} \\- {_text(_PURPOSES[name])}"),
        *body,
        *(".SH SEE ALSO", others),
    ]
    return "\n".join(lines) + "\n"


def _of_launcher() -> Iterator[str]:
    yield from (".SH SYNOPSIS", f"\\fBpoprun\\-py\\fR {_text(USAGE)}", ".br")
    commands = "|".join(str(command.name) for command in LAUNCHER.values())
    yield f"\\fBpoprun\\-py\\fR {commands} [OPTIONS] ..."
    yield from (".SH DESCRIPTION", _text(PURPOSE), ".PP", _text(GRAMMAR))
    yield ".SH OPTIONS"
    context = click.Context(COMMAND, info_name="poprun-py")
    declared = [param for param in COMMAND.params if isinstance(param, HelpOption)]
    for group, purpose in {**GROUPS, "Help": "help texts and the version"}.items():
        records = (o.get_help_record(context) for o in declared if o.group == group)
        yield from (f".SS {_text(group)}: {_text(purpose)}", *_list(r for r in records if r))
    yield ".SH COMMANDS"
    for name, command in LAUNCHER.items():
        for each in described(name, command):
            yield from (f".SS {_text(each.usage)}", *_told(each))
    yield from (".SH PLACES OF OPTIONS", _text(PLACES))
    yield from (".SH ENVIRONMENT", *_environment())
    yield from (".SH EXIT STATUS", *_list(_exit_codes()))
    yield from (".SH EXAMPLES", *_kept("\n".join(f"poprun-py {words}" for words in EXAMPLES)))


def _of_command(name: str, command: click.Command) -> Iterator[str]:
    first, *others = described(name, command)
    yield from (".SH SYNOPSIS", _text(first.usage), ".SH DESCRIPTION", *_paragraphs(first))
    if first.options:
        yield from (".SH OPTIONS", *_list(first.options))
    shared = shared_options(others)
    if shared:
        yield from (".SH OPTIONS OF ALL COMMANDS", *_list(shared))
    if others:
        yield ".SH COMMANDS"
    for each in others:
        yield from (f".SS {_text(each.usage)}", *_told(each, shared))


def _told(each: Described, shared: tuple[tuple[str, str], ...] = ()) -> Iterator[str]:
    yield from _paragraphs(each)
    yield from _list(option for option in each.options if option not in shared)


def _environment() -> Iterator[str]:
    yield "Each of these environment variables sets the option with the same name:"
    # Hyphenating a line of names would make new ones.
    yield from (".PP", ".nh", ",\n".join(_text(name) for name in sorted(OPTION_VARIABLES)) + ".")
    yield ".hy"
    for place, variables in VARIABLES.items():
        rows = [(name, _MARKS.sub(r"\1\2", meaning)) for name, meaning in variables.items()]
        yield from (f".SS {_text(place)}", *_list(rows))


def _exit_codes() -> Iterator[tuple[str, str]]:
    """Yield codes and meanings as the page about failures has them."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = page.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    for row in list(_EXIT_CODE.finditer(section))[2:]:
        yield row["code"], _MARKS.sub(r"\1\2", row["meaning"])


# --- roff ---------------------------------------------------------------------------------------


def _list(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, meaning in rows:
        yield from (".TP", f"\\fB{_text(term)}\\fR", _text(meaning))


def _paragraphs(each: Described) -> Iterator[str]:
    for position, paragraph in enumerate(each.paragraphs):
        if position:
            yield ".PP"
        yield from _paragraph(paragraph)


def _paragraph(paragraph: Paragraph) -> Iterator[str]:
    if paragraph.is_kept:
        yield from _kept(paragraph.text)
    else:
        yield _text(paragraph.text)


def _kept(text: str) -> Iterator[str]:
    yield from (".nf", *map(_text, text.splitlines()), ".fi")


def _text(text: str) -> str:
    """Return text with escapes, so that roff shows each character unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main(folder: str) -> None:
    """Write every page into a folder."""
    for name, text in pages().items():
        Path(folder, name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
