"""The directives of docs/reference: the options, commands, variables and old spellings of the code.

Each directive makes sections with tables from the declarations, so that no page repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from popdist_py.poptorch.old_spellings import TABLE, How
from poprun_py.options.declared_options import GROUPS, OPTION_VARIABLES, OPTIONS
from poprun_py.options.help_pages import default_text
from poprun_py.options.option_types import FLAG, Option, option_name
from tools.pages.manual.commands import FILES, LAUNCHER, Described, described, shared_options
from tools.pages.manual.variables import VARIABLES

__all__ = ["DIRECTIVES"]

_OLD_SPELLINGS = {
    How.SAME: (
        "Same effect",
        "An old spelling in this table has the same effect as its present spelling.",
        ("old", "write"),
    ),
    How.NOTHING: (
        "No effect",
        "An old spelling in this table has no effect, and a warning in the log says why.",
        ("old", "why"),
    ),
    How.REFUSED: (
        "Refused",
        "A refused name raises AttributeError, and a refused argument raises TypeError. The "
        "message of the error says what to use instead.",
        ("old", "instead"),
    ),
}
_VARIABLES_OF_OPTIONS = (
    "The command poprun-py reads all variables of this table. Jobs that Python code starts read "
    "only `POPRUN_POD`, `POPRUN_SHARE_CORES` and `POPRUN_WAIT_FOR_RESOURCES`."
)
Rows = Iterable[tuple[str, ...]]


class _Sections(SphinxDirective):
    """A directive that returns sections."""

    def section(self, title: str, *content: nodes.Node) -> nodes.section:
        """Return a section with an anchor of its own."""
        made = nodes.section("", nodes.title("", title), *content, names=[title.lower()])
        self.state.document.note_implicit_target(made, made)
        return made


class OptionGroups(_Sections):
    """``option-groups``: the options of the launcher, in a section for each group."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        made: list[nodes.Node] = []
        for group, purpose in GROUPS.items():
            own = [(field, opt) for field, opt in OPTIONS.items() if opt.group == group]
            rows = (_option_row(field, opt) for field, opt in own)
            text = _paragraph(f"{purpose[0].upper()}{purpose[1:]}.")
            made.append(self.section(group, text, _table(("option", "default", "meaning"), rows)))
        return made


class Commands(_Sections):
    """``commands``: the usage, description and options of each command."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command, with sections for the commands below it."""
        made: list[nodes.Node] = []
        for name, command in {**LAUNCHER, **FILES}.items():
            each, *below = described(name, command)
            shared = shared_options(below)
            section = self.section(name, *_description(each))
            if shared:
                section += [
                    _paragraph("Options of all commands in this section:"),
                    _options(shared),
                ]
            section += [self.section(one.name, *_description(one, shared)) for one in below]
            made.append(section)
        return made


class Variables(_Sections):
    """``variables``: the environment variables that users may set."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each place, and one for the variables of options."""
        made: list[nodes.Node] = []
        for place, variables in VARIABLES.items():
            rows = ((f"`{name}`", meaning) for name, meaning in variables.items())
            made.append(self.section(place, _table(("variable", "meaning"), rows)))
        options = (
            (f"`{name}`", f"`{option_name(field)}`")
            for name, field in sorted(OPTION_VARIABLES.items())
        )
        text = _paragraph(_VARIABLES_OF_OPTIONS)
        table = _table(("variable", "option"), options)
        return [*made, self.section("Options of the launcher", text, table)]


class OldSpellings(_Sections):
    """``old-spellings``: the names and arguments of earlier PopTorch releases."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each effect of an old spelling."""
        made: list[nodes.Node] = []
        for how, (title, text, columns) in _OLD_SPELLINGS.items():
            rows = (
                (f"`{each.old_text}`", f"`{each.new_text}`" if each.new_text else each.why)
                for each in TABLE
                if each.how is how
            )
            made.append(self.section(title, _paragraph(text), _table(columns, rows)))
        return made


#: The directives by name.
DIRECTIVES = {
    "option-groups": OptionGroups,
    "commands": Commands,
    "variables": Variables,
    "old-spellings": OldSpellings,
}


def _option_row(field: str, opt: Option) -> tuple[str, ...]:
    if field == "verbosity":
        return "`-v`, `-vv`, `--verbose`, `--vv`", "", opt.help
    value = f"[={opt.type.metavar}]" if opt.implied else f" {opt.type.metavar}"
    value = "" if opt.type is FLAG and not opt.implied else value
    spelled = f"`{opt.short}`, " if opt.short else ""
    repeat = " May be repeated." if opt.repeatable and "repeated" not in opt.help else ""
    return f"{spelled}`{option_name(field)}{value}`", default_text(opt), f"{opt.help}{repeat}"


def _description(
    each: Described, shared: tuple[tuple[str, str], ...] = ()
) -> Iterator[nodes.Element]:
    yield _kept(each.usage)
    for paragraph in each.paragraphs:
        yield (_kept if paragraph.is_kept else _paragraph)(paragraph.text)
    own = tuple(option for option in each.options if option not in shared)
    if own:
        yield _options(own)


def _options(rows: Rows) -> nodes.table:
    return _table(("option", "meaning"), ((f"`{names}`", text) for names, text in rows))


def _kept(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="text")


def _paragraph(text: str) -> nodes.paragraph:
    """Return a paragraph in which text between backticks is code."""
    parts = text.split("`")
    words = [nodes.literal("", part) if number % 2 else nodes.Text(part)
             for number, part in enumerate(parts) if part]  # fmt: skip
    return nodes.paragraph("", "", *words)


def _table(titles: tuple[str, ...], rows: Rows) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in titles), cols=len(titles))
    group += nodes.thead("", _row(titles))
    group += nodes.tbody("", *map(_row, rows))
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: tuple[str, ...]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", _paragraph(text)) for text in cells))
