"""Partitions as ``gc-info`` lists them, one device after the other, and one device in detail.

Pure: partitions in, text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from popdist_py.pods.values import Device
from poprun_py.pod_tools.gc_partitions import (
    ARCHITECTURE,
    CLOCK_MHZ,
    MACHINE_TYPE,
    TILE_BYTES,
    TILES_PER_IPU,
    Holder,
    Partition,
)


def device_listing(partitions: Sequence[Partition]) -> str:
    """Return the listing of ``gc-info -l``: IPUs that a process holds name it at their end."""
    lines = ["Graphcore device listing:"]
    for partition in partitions:
        lines.append(f"Partition: {partition.name} [{partition.state}]")
        for device in partition.devices():
            lines += _lines_of(partition, device)
    return "\n".join(lines)


def _lines_of(partition: Partition, device: Device) -> Iterable[str]:
    if len(device.ipus) == 1:
        place = _place(partition, device.ipus[0])
        held = _held(partition, device.ipus)
        yield f"-+- Id: [{device.id}], target: [Fabric], {place}{held}"
        return
    yield f"-+- Id: [{device.id}], target: [Multi IPU]{_held(partition, device.ipus)}"
    for position, ipu in enumerate(device.ipus):
        yield f" |--- Id: [{ipu}], DNC Id: [{position}], {_place(partition, ipu)}"


def _place(partition: Partition, ipu: int) -> str:
    return f"IPU-M host: [{partition.host_of(ipu)}], IPU#: [{partition.number_of(ipu)}]"


def _held(partition: Partition, ipus: range) -> str:
    """Say which processes hold any of the IPUs."""
    holders = partition.holders_by_ipu()
    pids = dict.fromkeys(str(holders[ipu].pid) for ipu in ipus if ipu in holders)
    return f", in use by: [{' '.join(pids)}]" if pids else ""


def device_info(partition: Partition, device: Device) -> str:
    """Return what ``gc-info -i`` says of a device."""
    holders = partition.holders_by_ipu()
    processes = dict.fromkeys(_process(holders[ipu]) for ipu in device.ipus if ipu in holders)
    facts = {
        "partition": partition.name,
        "device id": device.id,
        "target": "Fabric" if len(device.ipus) == 1 else "Multi IPU",
        "number of IPUs": len(device.ipus),
        "IPUs": " ".join(map(str, device.ipus)),
        "IPU-M host": partition.host_of(device.ipus[0]),
        "type": MACHINE_TYPE,
        "architecture": ARCHITECTURE,
        "tiles per IPU": TILES_PER_IPU,
        "bytes per tile": TILE_BYTES,
        "tile clock": f"{CLOCK_MHZ} MHz",
        "in use by": ", ".join(processes) or "no process",
    }
    return "\n".join(["Device Info:", *(f"  {name}: {value}" for name, value in facts.items())])


def _process(holder: Holder) -> str:
    """Return a process and what it is: an instance, or a program that no launcher started."""
    what = holder.command if holder.instance is None else f"instance {holder.instance}"
    return f"{holder.pid} ({what})" if what else str(holder.pid)
