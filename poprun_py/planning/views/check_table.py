"""The checks of the hosts as a table: what ``--check`` shows. Only text is made here."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from poprun_py.machines.host_checks import Check, HostChecks
from poprun_py.machines.host_list import compress
from poprun_py.text_tables import rich_lines


def check_table(checked: HostChecks, *, colour: bool = False) -> str:
    """Return the table of ``--check`` with a fix for every red cell, without a final newline.

    One row a check, one column a group of equal hosts; ``!`` marks what is red.

    Args:
        checked: what was found.
        colour: whether to print red cells red.
    """
    fixes = [
        f"{compress(names)}: {check.problem}"
        for checks, names in checked.groups.items()
        for check in checks
        if check.problem
    ]
    sections = [_grid(checked, colour), "\n".join(fixes), checked.network]
    return "\n\n".join(section for section in sections if section)


def _grid(checked: HostChecks, colour: bool) -> str:
    groups = checked.groups
    table = Table.grid(padding=(0, 2, 0, 0))
    # Plain texts: rich takes the brackets of node[0-3] for markup.
    table.add_row("", *(Text(f"  {compress(names)}") for names in groups.values()))
    columns = [{check.name: check for check in checks} for checks in groups]
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = (column.get(name, Check(name=name, text="?")) for column in columns)
        table.add_row(Text(name), *(_cell(check) for check in cells))
    return "\n".join(rich_lines(table, colour=colour))


def _cell(check: Check) -> Text:
    return Text(f"! {check.text}", style="red") if check.problem else Text(f"  {check.text}")
