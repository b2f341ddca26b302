"""Writes poprun_py/options/keyword_types.py: the options of a launch as keywords with types.

LaunchConfig declares every option; what a type checker and an editor read is written out from
there, by ``make generated``.
"""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path

from poprun_py.options import option_types as kinds
from poprun_py.options.launch_config import GROUPS, LaunchConfig, options
from poprun_py.options.metrics_destinations import METRICS_DESTINATION
from poprun_py.options.option_types import Option
from poprun_py.options.python_keywords import COMMAND_LINE_ONLY

TARGET = Path(__file__).resolve().parents[1] / "poprun_py/options/keyword_types.py"

_HEAD = '''"""The options of a launch as keywords, with the types that checkers and editors read.

Written by tools/keyword_types.py from what LaunchConfig declares; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict

# What becomes a word of a command line or the value of a variable.
Word: TypeAlias = str | int | float | PathLike[str]


class LaunchOptions(TypedDict, total=False):
    """Every option that a launch from Python takes; one that is left out has its default."""
'''

_TYPES = {
    kinds.TEXT: "str",
    kinds.NAME: "str",
    kinds.PATH: "str | PathLike[str]",
    kinds.FILE_OR_AUTO: "str | PathLike[str]",
    kinds.YES_NO: "bool",
    kinds.FLAG: "bool",
    kinds.SECONDS: "float | str",
    kinds.SECONDS_OR_AUTO: "float | str",
    kinds.SECONDS_OR_FOREVER: "float | str",
    kinds.INDICES: "int | str | Sequence[int]",
    kinds.COUNT_OR_AUTO: 'int | Literal["auto", "cpu"]',
    METRICS_DESTINATION: "str",
}

_HOSTS = 'Hosts as a list, such as ["a", "b:2"], or as the text of ``host``; not together with it.'


def keyword_types() -> str:
    """Return the text of the module."""
    defaults = {field.name: field.default for field in fields(LaunchConfig)}
    parts = [_HEAD]
    for group, about in GROUPS.items():
        members = [
            (name, opt)
            for name, opt in options().items()
            if opt.group == group and name not in COMMAND_LINE_ONLY
        ]
        if not members:
            continue
        parts.append(f"    # {group}: {about}.\n")
        for name, opt in members:
            if name == "host":
                parts.append(_entry("hosts", "str | Sequence[str] | None", _HOSTS))
            parts.append(_entry(name, _type(name, opt, defaults[name]), opt.help))
    return "\n".join(parts)


def _type(name: str, opt: Option, default: object) -> str:
    if name == "env":
        return "Mapping[str, Word] | Sequence[str]"
    kind = opt.kind
    # Equal kinds may be several values: their functions are made anew.
    known = next((text for one, text in _TYPES.items() if one is kind), None)
    if kind.choices:
        words = ", ".join(f'"{word}"' for word in kind.choices)
        known = f"Literal[{words}]"
    elif known is None:
        known = "str | PathLike[str]" if kind.metavar in ("POD", "JOB") else "int"
    if opt.repeatable:
        known = f"Sequence[{known}]"
    return f"{known} | None" if default is None else known


def _entry(name: str, kind: str, help_sentence: str) -> str:
    line = f"    {name}: {kind}\n"
    if len(line) > 100:
        words = "".join(f"        {part.rstrip(',')},\n" for part in kind[8:-1].split(", "))
        line = f"    {name}: Literal[\n{words}    ]\n"
        if kind.endswith(" | None"):
            words = "".join(f"            {part},\n" for part in kind[8:-8].split(", "))
            line = f"    {name}: (\n        Literal[\n{words}        ]\n        | None\n    )\n"
    text = help_sentence.replace("\\", "\\\\")
    one = f'    """{text}"""\n'
    if len(one) <= 101:
        return line + one
    wrapped = textwrap.wrap(text, 92, break_on_hyphens=False, break_long_words=False)
    first, *rest = wrapped
    return line + f'    """{first}\n' + "".join(f"    {each}\n" for each in rest) + '    """\n'


def files() -> dict[Path, str]:
    """Return the text of the module by its file."""
    return {TARGET: keyword_types()}
