"""The commands ``gc-info`` and ``gc-monitor``, with some options of Graphcore's tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import click

from popdist_py.errors import counted
from popdist_py.pods.model.pod_parts import Device
from poprun_py.command.click_commands import CONTEXT, PrintedHelp, run_process, version_option
from poprun_py.command.pods.partitions_in_use import (
    FoundPartitions,
    IpuProcess,
    PartitionInUse,
    find_partitions,
)
from poprun_py.errors import UsageError
from poprun_py.terminal import print_out, print_warning

# An environment variable of Graphcore's tools, which names the partition to show.
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"
# Properties of Graphcore's Mk2 IPUs. The architecture is the value that
# ``poptorch.ipuHardwareVersion()`` returns.
_ARCHITECTURE = "ipu2"
_CLOCK_MHZ = 1330
_TILES_PER_IPU = 1472
_TILE_BYTES = 638_976
_MACHINE_TYPE = "emulated"
_ALL_PARTITIONS = click.option(
    "--all-partitions",
    is_flag=True,
    help="Show the partitions of all users of the pod, not only your own.",
)


# --- gc-info ------------------------------------------------------------------------------------


@click.command("gc-info", cls=PrintedHelp, context_settings=CONTEXT)
@click.option(
    "-l", "--list-devices", is_flag=True, help="List the devices of all shown partitions."
)
@click.option("-d", "--device-id", type=int, metavar="ID", help="The id of the device to show.")
@click.option(
    "-i",
    "--device-info",
    "shows_info",
    is_flag=True,
    help="Show the properties of the device that -d selects.",
)
@click.option("--ipu-arch", is_flag=True, help="Show the architecture of the IPUs.")
@click.option(
    "--ipu-count",
    is_flag=True,
    help="Show the number of IPUs of the device that -d selects, or without -d of the partition.",
)
@click.option(
    "--tile-clock-speed", is_flag=True, help="Show the clock frequency of an IPU's tiles."
)
@_ALL_PARTITIONS
@version_option("-v", "--version")
def GC_INFO(
    *, list_devices: bool, device_id: int | None, shows_info: bool, ipu_arch: bool,
    ipu_count: bool, tile_clock_speed: bool, all_partitions: bool,
) -> None:  # fmt: skip
    """List the emulated IPUs of this machine, and the processes that hold IPUs.

    Any program can use the IPUs of the partition "emulated". Each running job of poprun-py is
    listed as its own partition. The option -d selects a device of the partition that
    IPUOF_VIPU_API_PARTITION_ID names. Without this variable, -d selects a device of the partition
    "emulated".

    If a pod is configured (poprun-py-pod --help), gc-info lists the IPUs of your partitions. If
    IPUOF_VIPU_API_PARTITION_ID names a partition of the pod, gc-info lists only the IPUs of that
    partition.
    """
    asks_device = shows_info or ipu_arch or ipu_count or tile_clock_speed
    if not (list_devices or asks_device):
        raise UsageError(
            "an option is missing: expected --list-devices, --device-info, --ipu-arch, --ipu-count "
            "or --tile-clock-speed"
        )
    found = find_partitions(os.environ)
    partitions = _selected_partitions(found, all_users=all_partitions)
    if not asks_device and device_id is None:
        print_out(device_listing(partitions))
        return
    partition = _only_partition(partitions, is_pod=found.where is not None)
    device = _device(partition, device_id)
    if shows_info and device is None:
        raise UsageError(
            "--device-info needs the option --device-id ID; --list-devices lists the ids of all "
            "devices"
        )
    if list_devices:
        print_out(device_listing(partitions))
    if shows_info and device is not None:
        print_out(device_info(partition, device))
    if ipu_arch:
        print_out(_ARCHITECTURE)
    if ipu_count:
        print_out(str(partition.size if device is None else len(device.ipus)))
    if tile_clock_speed:
        print_out(f"{_CLOCK_MHZ} MHz")


def _selected_partitions(found: FoundPartitions, *, all_users: bool) -> list[PartitionInUse]:
    """Return the partitions to show; from a pod, only the user's, unless ``all_users`` is set."""
    for launcher in found.silent:
        print_warning(
            f"the IPUs of one job are not shown, because the job's launcher (process {launcher}) "
            "does not answer; check whether the launcher is suspended (Ctrl-Z)"
        )
    partitions = found.partitions
    if found.where is None:
        return partitions
    wanted = os.environ.get(_PARTITION)
    named = [each for each in partitions if each.name == wanted]
    if wanted and not named:
        raise UsageError(
            f"{_PARTITION}={wanted}: expected the name of a partition of the pod {found.where} "
            f"(existing partitions: {_names(partitions)})"
        )
    if all_users:
        return [*named, *(each for each in partitions if each not in named)]
    # A partition that stands for a job outside the pod has no owner.
    shown = named or [each for each in partitions if each.owner in ("", found.user)]
    if not shown:
        print_warning(
            f"you have no partition in the pod {found.where}: make a partition with poprun-py-pod "
            "create partition NAME --size N, or show the partitions of other users with "
            "--all-partitions"
        )
    return shown


def _names(partitions: Sequence[PartitionInUse]) -> str:
    return ", ".join(each.name for each in partitions) or "none"


def _only_partition(partitions: Sequence[PartitionInUse], *, is_pod: bool) -> PartitionInUse:
    """Return the partition in which --device-id selects a device."""
    wanted = os.environ.get(_PARTITION)
    if is_pod and not wanted and len(partitions) != 1:
        raise UsageError(
            f"set {_PARTITION} to the name of one partition (existing partitions: "
            f"{_names(partitions)})"
        )
    return next((each for each in partitions if each.name == wanted), partitions[0])


def _device(partition: PartitionInUse, wanted: int | None) -> Device | None:
    """Return the partition's device with the id ``wanted``; None if ``wanted`` is None."""
    if wanted is None:
        return None
    devices = {device.id: device for device in partition.devices()}
    if wanted in devices:
        return devices[wanted]
    raise UsageError(
        f"--device-id {wanted}: expected the id of a device of partition {partition.name}, 0 to "
        f"{max(devices)}; --list-devices lists the devices, and {_PARTITION} selects another "
        "partition"
    )


def device_listing(partitions: Sequence[PartitionInUse]) -> str:
    """Return the output of ``gc-info -l``: all devices, with the processes that hold them."""
    lines = ["Graphcore device listing:"]
    for partition in partitions:
        lines.append(f"Partition: {partition.name} [{partition.state.lower()}]")
        for device in partition.devices():
            lines += _device_lines(partition, device)
    return "\n".join(lines)


def _device_lines(partition: PartitionInUse, device: Device) -> Iterable[str]:
    places = {
        ipu: f"IPU-M host: [{partition.ipus[ipu].host}], IPU#: [{partition.ipus[ipu].number}]"
        for ipu in device.ipus
    }
    pids = [str(pid) for pid in dict.fromkeys(each.pid for each in _holders(partition, device))]
    in_use = f", in use by: [{' '.join(pids)}]" if pids else ""
    if len(device.ipus) == 1:
        yield f"-+- Id: [{device.id}], target: [Fabric], {places[device.ipus[0]]}{in_use}"
        return
    yield f"-+- Id: [{device.id}], target: [Multi IPU]{in_use}"
    for position, ipu in enumerate(device.ipus):
        yield f" |--- Id: [{ipu}], DNC Id: [{position}], {places[ipu]}"


def _holders(partition: PartitionInUse, device: Device) -> list[IpuProcess]:
    holders = partition.processes_by_ipu()
    return [holders[ipu] for ipu in device.ipus if ipu in holders]


def device_info(partition: PartitionInUse, device: Device) -> str:
    """Return the output of ``gc-info -i`` for a device."""
    processes = dict.fromkeys(_process_text(each) for each in _holders(partition, device))
    facts = {
        "partition": partition.name,
        "device id": device.id,
        "target": "Fabric" if len(device.ipus) == 1 else "Multi IPU",
        "number of IPUs": len(device.ipus),
        "IPUs": " ".join(map(str, device.ipus)),
        "IPU-M host": partition.ipus[device.ipus[0]].host,
        "type": _MACHINE_TYPE,
        "architecture": _ARCHITECTURE,
        "tiles per IPU": _TILES_PER_IPU,
        "bytes per tile": _TILE_BYTES,
        "tile clock": f"{_CLOCK_MHZ} MHz",
        "in use by": ", ".join(processes) or "no process",
    }
    return "\n".join(["Device Info:", *(f"  {name}: {value}" for name, value in facts.items())])


def _process_text(process: IpuProcess) -> str:
    """Return a process's id and instance, or its id and command if no launcher started it."""
    what = process.command if process.instance is None else f"instance {process.instance}"
    return f"{process.pid} ({what})" if what else str(process.pid)


# --- gc-monitor ---------------------------------------------------------------------------------


@click.command("gc-monitor", cls=PrintedHelp, context_settings=CONTEXT)
@click.option(
    "--no-card-info",
    is_flag=True,
    help="Show only the table of processes, without the table of IPUs.",
)
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@_ALL_PARTITIONS
@version_option("-v", "--version")
def GC_MONITOR(*, no_card_info: bool, as_json: bool, all_partitions: bool) -> None:
    """Show the emulated IPUs of this machine, and the processes that hold IPUs now.

    Any program can use the IPUs of the partition "emulated". Each running job of poprun-py is
    shown as its own partition. If IPUOF_VIPU_API_PARTITION_ID names a partition, gc-monitor shows
    only that partition. The command "watch gc-monitor" updates the output every two seconds.

    If a pod is configured (poprun-py-pod --help), gc-monitor shows your partitions in the pod.

    The option --json prints a JSON object with the field partitions, a list of objects. Each
    partition has the fields name, state, launcher, ipus and processes. Each IPU has the fields id,
    ipu_number, host, type, clock_mhz and pid (null if no process holds the IPU). Each process has
    the fields pid, instance, host, command, user, seconds and ipus.
    """
    partitions = _selected_partitions(find_partitions(os.environ), all_users=all_partitions)
    named = [each for each in partitions if each.name == os.environ.get(_PARTITION)]
    partitions = partitions if all_partitions else named or partitions
    if as_json:
        print_out(json.dumps(monitor_json(partitions), indent=2))
    elif partitions:
        print_out(monitor_text(partitions, card_info=not no_card_info))


# The columns of the two tables of gc-monitor, with their widths in characters.
_CARD_COLUMNS = {"IPU-M": 30, "Serial": 10, "IPU-M SW": 8, "Type": 10, "ID": 5, "IPU#": 4,
                 "Routing": 7, "Clock": 9}  # fmt: skip
_PROCESS_COLUMNS = {"PID": 9, "Command": 30, "Time": 9, "User": 16, "Instance": 8, "ID": 5,
                    "Clock": 9}  # fmt: skip


def monitor_text(partitions: Sequence[PartitionInUse], *, card_info: bool = True) -> str:
    """Return the output of ``gc-monitor``: tables of IPUs, and of the processes that hold them."""
    clock = f"{_CLOCK_MHZ}MHz"
    tables = []
    for partition in partitions:
        if card_info:
            kind = "reconfigurable IPU" if partition.reconfigurable else "IPU"
            title = (
                f"gc-monitor   Partition: {partition.name} [{partition.state.lower()}] has "
                f"{counted(partition.size, kind)}"
            )
            cards = [
                (ipu.host, None, None, _MACHINE_TYPE, id_, ipu.number, "DNC", clock)
                for id_, ipu in enumerate(partition.ipus)
            ]
            tables.append(_table(title, _CARD_COLUMNS, cards))
        rows = [
            (each.pid, each.command, _elapsed(each.seconds), each.user, each.instance, ipu, clock)
            for each in partition.processes
            for ipu in each.ipus
        ]
        if rows:
            title = f"Attached processes in partition {partition.name}"
            tables.append(_table(title, _PROCESS_COLUMNS, rows))
        else:
            title = f"No attached processes in partition {partition.name}"
            tables.append(_box(title, sum(_CARD_COLUMNS.values()) + 3 * len(_CARD_COLUMNS) - 1))
    return "\n".join(tables)


def _elapsed(seconds: float | None) -> str | None:
    """Return a duration as Graphcore's tools write it: ``1h2m``, ``1m15s`` or ``7s``."""
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _table(title: str, columns: dict[str, int], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with a title. A text that is too wide loses its start."""

    def line(values: Iterable[Any]) -> str:
        texts = ("N/A" if value is None else str(value) for value in values)
        cells = (
            f" {text if len(text) <= width else f'...{text[3 - width :]}':^{width}} "
            for text, width in zip(texts, columns.values(), strict=True)
        )
        return f"|{'|'.join(cells)}|"

    rule = f"+{'+'.join('-' * (width + 2) for width in columns.values())}+"
    return "\n".join([_box(title, len(rule) - 2), line(columns), rule, *map(line, rows), rule])


def _box(title: str, width: int) -> str:
    rule = f"+{'-' * width}+"
    if len(title) > width:
        title = f"{title[: width - 3]}..."
    return f"{rule}\n|{title:^{width}}|\n{rule}"


def monitor_json(partitions: Sequence[PartitionInUse]) -> dict[str, Any]:
    """Return the JSON document of ``gc-monitor --json``."""
    return {"partitions": [_partition_json(partition) for partition in partitions]}


def _partition_json(partition: PartitionInUse) -> dict[str, Any]:
    holders = partition.processes_by_ipu()
    return {
        "name": partition.name,
        "state": partition.state.lower(),
        "launcher": partition.launcher,
        "ipus": [
            {
                "id": id_,
                "ipu_number": ipu.number,
                "host": ipu.host,
                "type": _MACHINE_TYPE,
                "clock_mhz": _CLOCK_MHZ,
                "pid": holders[id_].pid if id_ in holders else None,
            }
            for id_, ipu in enumerate(partition.ipus)
        ],
        "processes": [asdict(process) for process in partition.processes],
    }


def gc_info() -> NoReturn:
    """Run ``gc-info`` with this process's arguments, and exit with the command's exit code."""
    run_process(GC_INFO)


def gc_monitor() -> NoReturn:
    """Run ``gc-monitor`` with this process's arguments, and exit with the command's exit code."""
    run_process(GC_MONITOR)
