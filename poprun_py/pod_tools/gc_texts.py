"""Partitions as ``gc-monitor`` shows them: a table of IPUs, and one of processes that hold them.

Pure: partitions in, text or values for JSON out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from popdist_py.errors import counted
from poprun_py.pod_tools.gc_partitions import (
    CLOCK_MHZ,
    MACHINE_TYPE,
    Holder,
    Partition,
)

_CARD_COLUMNS = {"IPU-M": 30, "Serial": 10, "IPU-M SW": 8, "Type": 10, "ID": 5, "IPU#": 4,
                 "Routing": 7, "Clock": 9}  # fmt: skip
_PROCESS_COLUMNS = {"PID": 9, "Command": 30, "Time": 9, "User": 16, "Instance": 8, "ID": 5,
                    "Clock": 9}  # fmt: skip
_UNKNOWN = "N/A"


def monitor_text(partitions: Sequence[Partition], *, card_info: bool = True) -> str:
    """Return the tables of all partitions.

    Args:
        partitions: in their order.
        card_info: whether the tables of IPUs are there.
    """
    tables = []
    for partition in partitions:
        if card_info:
            title = f"Partition: {partition.name} [{partition.state}] has {_counted(partition)}"
            cards = [_card(partition, ipu) for ipu in range(partition.num_ipus)]
            tables.append(_table(f"gc-monitor   {title}", _CARD_COLUMNS, cards))
        rows = [_process(holder, ipu) for holder in partition.holders for ipu in holder.ipus]
        title = f"Attached processes in partition {partition.name}"
        if rows:
            tables.append(_table(title, _PROCESS_COLUMNS, rows))
        else:
            title = f"No attached processes in partition {partition.name}"
            tables.append(_box(title, sum(_CARD_COLUMNS.values()) + 3 * len(_CARD_COLUMNS) - 1))
    return "\n".join(tables)


def _counted(partition: Partition) -> str:
    kind = "reconfigurable " if partition.is_reconfigurable else ""
    return counted(partition.num_ipus, f"{kind}IPU")


def _card(partition: Partition, ipu: int) -> list[str]:
    return [
        partition.host_of(ipu), _UNKNOWN, _UNKNOWN, MACHINE_TYPE, str(ipu),
        str(partition.number_of(ipu)), "DNC", f"{CLOCK_MHZ}MHz",
    ]  # fmt: skip


def _process(holder: Holder, ipu: int) -> list[str]:
    return [
        str(holder.pid), holder.command or _UNKNOWN, _elapsed(holder.seconds),
        holder.user or _UNKNOWN,
        _UNKNOWN if holder.instance is None else str(holder.instance), str(ipu), f"{CLOCK_MHZ}MHz",
    ]  # fmt: skip


def _elapsed(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _table(title: str, columns: dict[str, int], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a title over its columns; too long values keep their end."""
    widths = [width + 2 for width in columns.values()]
    rule = f"+{'+'.join('-' * width for width in widths)}+"
    lines = [_box(title, len(rule) - 2), _row(list(columns), widths), rule]
    return "\n".join([*lines, *(_row(row, widths) for row in rows), rule])


def _box(title: str, width: int) -> str:
    rule = f"+{'-' * width}+"
    if len(title) > width:
        title = f"{title[: width - 3]}..."
    return f"{rule}\n|{title:^{width}}|\n{rule}"


def _row(values: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        f"{_cut(value, width - 2):^{width}}" for value, width in zip(values, widths, strict=True)
    )
    return f"|{'|'.join(cells)}|"


def _cut(value: str, width: int) -> str:
    return value if len(value) <= width else f"...{value[len(value) - width + 3 :]}"


def monitor_json(partitions: Sequence[Partition]) -> dict[str, Any]:
    """Return what ``gc-monitor --json`` prints."""
    return {"partitions": [_partition_json(partition) for partition in partitions]}


def _partition_json(partition: Partition) -> dict[str, Any]:
    holders = partition.holders_by_ipu()
    return {
        "name": partition.name,
        "state": partition.state,
        "launcher": partition.launcher,
        "ipus": [
            {
                "id": ipu,
                "ipu_number": partition.number_of(ipu),
                "host": partition.host_of(ipu),
                "type": MACHINE_TYPE,
                "clock_mhz": CLOCK_MHZ,
                "pid": holders[ipu].pid if ipu in holders else None,
            }
            for ipu in range(partition.num_ipus)
        ],
        "processes": [
            {
                "pid": holder.pid,
                "instance": holder.instance,
                "host": holder.host,
                "command": holder.command or None,
                "user": holder.user or None,
                "seconds": holder.seconds,
                "ipus": list(holder.ipus),
            }
            for holder in partition.holders
        ],
    }
