"""The output of ``gc-info`` and ``gc-monitor``, in the form of Graphcore's tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from popdist_py.errors import counted
from popdist_py.pods.model import Device
from poprun_py.command.pods.gc_partitions import GcPartition, GcProcess

# The properties of Mk2 IPUs. ``poptorch.ipuHardwareVersion()`` returns ``ARCHITECTURE``.
ARCHITECTURE = "ipu2"
CLOCK_MHZ = 1330
_TILES_PER_IPU = 1472
_TILE_BYTES = 638_976
_MACHINE_TYPE = "emulated"

# The columns of the two tables of gc-monitor, with their widths in characters.
_CARD_COLUMNS = {"IPU-M": 30, "Serial": 10, "IPU-M SW": 8, "Type": 10, "ID": 5, "IPU#": 4,
                 "Routing": 7, "Clock": 9}  # fmt: skip
_PROCESS_COLUMNS = {"PID": 9, "Command": 30, "Time": 9, "User": 16, "Instance": 8, "ID": 5,
                    "Clock": 9}  # fmt: skip
_UNKNOWN = "N/A"


# --- output of gc-info --------------------------------------------------------------------------


def device_listing(partitions: Sequence[GcPartition]) -> str:
    """Return the output of ``gc-info -l``: all devices, with the processes that hold them."""
    lines = ["Graphcore device listing:"]
    for partition in partitions:
        lines.append(f"Partition: {partition.name} [{partition.state}]")
        for device in partition.devices():
            lines += _device_lines(partition, device)
    return "\n".join(lines)


def _device_lines(partition: GcPartition, device: Device) -> Iterable[str]:
    holders = partition.processes_by_ipu()
    pids = dict.fromkeys(str(holders[ipu].pid) for ipu in device.ipus if ipu in holders)
    in_use = f", in use by: [{' '.join(pids)}]" if pids else ""
    if len(device.ipus) == 1:
        place = _place(partition, device.ipus[0])
        yield f"-+- Id: [{device.id}], target: [Fabric], {place}{in_use}"
        return
    yield f"-+- Id: [{device.id}], target: [Multi IPU]{in_use}"
    for position, ipu in enumerate(device.ipus):
        yield f" |--- Id: [{ipu}], DNC Id: [{position}], {_place(partition, ipu)}"


def _place(partition: GcPartition, ipu: int) -> str:
    return f"IPU-M host: [{partition.host_of(ipu)}], IPU#: [{partition.number_of(ipu)}]"


def device_info(partition: GcPartition, device: Device) -> str:
    """Return the output of ``gc-info -i`` for a device."""
    holders = partition.processes_by_ipu()
    processes = dict.fromkeys(_holder(holders[ipu]) for ipu in device.ipus if ipu in holders)
    facts = {
        "partition": partition.name,
        "device id": device.id,
        "target": "Fabric" if len(device.ipus) == 1 else "Multi IPU",
        "number of IPUs": len(device.ipus),
        "IPUs": " ".join(map(str, device.ipus)),
        "IPU-M host": partition.host_of(device.ipus[0]),
        "type": _MACHINE_TYPE,
        "architecture": ARCHITECTURE,
        "tiles per IPU": _TILES_PER_IPU,
        "bytes per tile": _TILE_BYTES,
        "tile clock": f"{CLOCK_MHZ} MHz",
        "in use by": ", ".join(processes) or "no process",
    }
    return "\n".join(["Device Info:", *(f"  {name}: {value}" for name, value in facts.items())])


def _holder(process: GcProcess) -> str:
    """Return a process's id and instance, or its id and command if no launcher started it."""
    what = process.command if process.instance is None else f"instance {process.instance}"
    return f"{process.pid} ({what})" if what else str(process.pid)


# --- output of gc-monitor -----------------------------------------------------------------------


def monitor_text(partitions: Sequence[GcPartition], *, card_info: bool = True) -> str:
    """Return the output of ``gc-monitor``: tables of IPUs and of the processes that hold them.

    Args:
        partitions: The partitions to show, in this order.
        card_info: Whether to show the tables of IPUs.
    """
    tables = []
    for partition in partitions:
        if card_info:
            kind = "reconfigurable IPU" if partition.is_reconfigurable else "IPU"
            title = (
                f"gc-monitor   Partition: {partition.name} [{partition.state}] has "
                f"{counted(partition.num_ipus, kind)}"
            )
            cards = [_card_row(partition, ipu) for ipu in range(partition.num_ipus)]
            tables.append(_table(title, _CARD_COLUMNS, cards))
        rows = [_process_row(each, ipu) for each in partition.processes for ipu in each.ipus]
        if rows:
            title = f"Attached processes in partition {partition.name}"
            tables.append(_table(title, _PROCESS_COLUMNS, rows))
        else:
            title = f"No attached processes in partition {partition.name}"
            tables.append(_box(title, sum(_CARD_COLUMNS.values()) + 3 * len(_CARD_COLUMNS) - 1))
    return "\n".join(tables)


def _card_row(partition: GcPartition, ipu: int) -> list[str]:
    return [
        partition.host_of(ipu), _UNKNOWN, _UNKNOWN, _MACHINE_TYPE, str(ipu),
        str(partition.number_of(ipu)), "DNC", f"{CLOCK_MHZ}MHz",
    ]  # fmt: skip


def _process_row(process: GcProcess, ipu: int) -> list[str]:
    return [
        str(process.pid), process.command or _UNKNOWN, _elapsed(process.seconds),
        process.user or _UNKNOWN,
        _UNKNOWN if process.instance is None else str(process.instance), str(ipu),
        f"{CLOCK_MHZ}MHz",
    ]  # fmt: skip


def _elapsed(seconds: float | None) -> str:
    """Return a duration as Graphcore's tools write it: ``1h2m``, ``1m15s`` or ``7s``."""
    if seconds is None:
        return _UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _table(title: str, columns: dict[str, int], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a title. A text that is wider than its column is cut at the start."""
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


def monitor_json(partitions: Sequence[GcPartition]) -> dict[str, Any]:
    """Return the JSON document of ``gc-monitor --json``."""
    return {"partitions": [_partition_json(partition) for partition in partitions]}


def _partition_json(partition: GcPartition) -> dict[str, Any]:
    holders = partition.processes_by_ipu()
    return {
        "name": partition.name,
        "state": partition.state,
        "launcher": partition.launcher,
        "ipus": [
            {
                "id": ipu,
                "ipu_number": partition.number_of(ipu),
                "host": partition.host_of(ipu),
                "type": _MACHINE_TYPE,
                "clock_mhz": CLOCK_MHZ,
                "pid": holders[ipu].pid if ipu in holders else None,
            }
            for ipu in range(partition.num_ipus)
        ],
        "processes": [
            {
                "pid": process.pid,
                "instance": process.instance,
                "host": process.host,
                "command": process.command or None,
                "user": process.user or None,
                "seconds": process.seconds,
                "ipus": list(process.ipus),
            }
            for process in partition.processes
        ],
    }
