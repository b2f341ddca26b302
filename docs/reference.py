"""Writes docs/options/ from the declarations of the options: ``python docs/reference.py``.

A test compares the pages with what this makes, so that they cannot fall behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poprun_py.config.launch_config import GROUPS, LaunchConfig, options
from poprun_py.config.option_kinds import FLAG, Option, option_name

INDEX = """# Options of poprun-py

An option is written `--option VALUE` or `--option=VALUE`, and shortened as long as it stays unique;
a `yes|no` value may also be `on`, `off`, `true`, `false`, `1` or `0`. Options end at the program:
what follows it is the program's. In a configuration file (`--export-config`, `--import-config`) the
names are the same, without the leading hyphens.

| group | what it decides |
|---|---|
"""


def pages() -> dict[str, str]:
    """Return every page by file name: an index, and one for each group."""
    index = [INDEX]
    made = {}
    for group, purpose in GROUPS.items():
        name = f"{group.lower().replace(' ', '-')}.md"
        index.append(f"| [{group}]({name}) | {purpose} |\n")
        rows = [_row(field, opt) for field, opt in options().items() if opt.group == group]
        made[name] = (
            f"# {group}\n\n{purpose[0].upper()}{purpose[1:]}. [All groups](index.md).\n\n"
            "| option | default | meaning |\n|---|---|---|\n" + "".join(rows)
        )
    return {"index.md": "".join(index), **made}


def _row(field: str, opt: Option) -> str:
    if field == "verbosity":
        return f"| `-v`, `-vv`, `--verbose`, `--vv` |  | {opt.help} |\n"
    metavar = opt.kind.metavar.replace("|", "\\|")
    value = f"[={metavar}]" if opt.implied else "" if opt.kind is FLAG else f" {metavar}"
    spelled = f"`{opt.short}`, " if opt.short else ""
    repeat = " May be repeated." if opt.repeatable and "repeated" not in opt.help else ""
    default = _default(LaunchConfig.__dataclass_fields__[field].default)
    return f"| {spelled}`{option_name(field)}{value}` | {default} | {opt.help}{repeat} |\n"


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    folder = Path(__file__).with_name("options")
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
