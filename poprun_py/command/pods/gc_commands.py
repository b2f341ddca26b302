"""The commands ``gc-info`` and ``gc-monitor``, with some of the options of Graphcore's tools."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from popdist_py.pods.model import Device
from poprun_py.command.click_errors import usage_errors
from poprun_py.command.pods.gc_partitions import (
    GcPartition,
    PodPartitions,
    find_partition,
    machine_partitions,
    pod_partitions,
)
from poprun_py.command.pods.gc_texts import (
    ARCHITECTURE,
    CLOCK_MHZ,
    device_info,
    device_listing,
    monitor_json,
    monitor_text,
)
from poprun_py.errors import UsageError
from poprun_py.terminal import (
    PrintedHelp,
    exit_code_of,
    exit_with,
    prepare_streams,
    print_out,
    print_warning,
)
from poprun_py.versions import version_text

# The environment variable with the name of the partition to show. Graphcore's tools also use this
# variable.
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Command(PrintedHelp, click.Command):
    pass


_ALL_PARTITIONS = click.option(
    "--all-partitions", is_flag=True, help="Show the partitions of all users of the pod."
)


def _selected_partitions(*, all_users: bool) -> tuple[list[GcPartition], bool]:
    """Return the partitions to show, and whether a pod is configured.

    Args:
        all_users: Whether to return the partitions of all users of the pod.

    Raises:
        UsageError: IPUOF_VIPU_API_PARTITION_ID names a partition that the pod does not have.
        StartError: The pod cannot be reached or read.
    """
    pod = pod_partitions(os.environ)
    if pod is None:
        partitions, silent = machine_partitions()
    else:
        partitions, silent = _of_pod(pod, all_users=all_users), pod.silent
    for launcher in silent:
        print_warning(
            f"the launcher {launcher} does not answer: is it stopped (Ctrl-Z)? The IPUs of its job "
            "are not shown"
        )
    return partitions, pod is not None


def _of_pod(pod: PodPartitions, *, all_users: bool) -> list[GcPartition]:
    wanted = os.environ.get(_PARTITION)
    named = [each for each in pod.partitions if each.name == wanted]
    if wanted and not named:
        names = ", ".join(each.name for each in pod.partitions) or "no partition"
        raise UsageError(f"{_PARTITION}={wanted}: the pod {pod.where} has {names}")
    if all_users:
        return [*named, *(each for each in pod.partitions if each not in named)]
    shown = named or pod.own()
    if not shown:
        print_warning(
            f"the pod {pod.where} has no partition of yours: make one with poprun-py-pod create "
            "partition NAME --size N, or show those of other users with --all-partitions"
        )
    return shown


@click.command("gc-info", cls=_Command, context_settings=_HELP)
@click.option("-l", "--list-devices", is_flag=True, help="List all devices.")
@click.option("-d", "--device-id", type=int, metavar="ID", help="The id of the device to show.")
@click.option(
    "-i", "--device-info", "shows_info", is_flag=True, help="Show the device that -d selects."
)
@click.option("--ipu-arch", is_flag=True, help="Show the architecture of a device.")
@click.option("--ipu-count", is_flag=True, help="Show the number of IPUs of a device or partition.")
@click.option("--tile-clock-speed", is_flag=True, help="Show the clock frequency of the tiles.")
@_ALL_PARTITIONS
@click.option("-v", "--version", is_flag=True, help="Show the version.")
def GC_INFO(
    *,
    list_devices: bool,
    device_id: int | None,
    shows_info: bool,
    ipu_arch: bool,
    ipu_count: bool,
    tile_clock_speed: bool,
    all_partitions: bool,
    version: bool,
) -> None:
    """List the emulated IPUs of this machine, and the processes that hold them.

    The partition "emulated" has the IPUs that any program can take. Each running job of poprun-py
    has its own partition. -d selects a device of the partition that IPUOF_VIPU_API_PARTITION_ID
    names, or else of the partition "emulated".

    If a pod is configured (poprun-py-pod --help), the IPUs of your partitions are listed. If
    IPUOF_VIPU_API_PARTITION_ID names a partition, only its IPUs are listed.
    """
    if version:
        print_out(version_text("text"))
        return
    asks_device = shows_info or ipu_arch or ipu_count or tile_clock_speed
    if not (list_devices or asks_device):
        raise UsageError("expected one of --list-devices, --device-info and others; see --help")
    partitions, is_pod = _selected_partitions(all_users=all_partitions)
    if not asks_device and device_id is None:
        print_out(device_listing(partitions))
        return
    partition = _only_partition(partitions, is_pod)
    device = _device(partition, device_id)
    if shows_info and device is None:
        raise UsageError("--device-info: expected a device, --device-id ID; see --list-devices")
    if list_devices:
        print_out(device_listing(partitions))
    if shows_info and device is not None:
        print_out(device_info(partition, device))
    if ipu_arch:
        print_out(ARCHITECTURE)
    if ipu_count:
        print_out(str(partition.num_ipus if device is None else len(device.ipus)))
    if tile_clock_speed:
        print_out(f"{CLOCK_MHZ} MHz")


def _only_partition(partitions: Sequence[GcPartition], is_pod: bool) -> GcPartition:
    """Return the partition in which --device-id selects a device.

    Raises:
        UsageError: The pod does not have exactly one partition, and IPUOF_VIPU_API_PARTITION_ID is
            not set.
    """
    wanted = os.environ.get(_PARTITION)
    if is_pod and not wanted and len(partitions) != 1:
        names = ", ".join(each.name for each in partitions) or "no partition"
        raise UsageError(f"expected the name of a partition in {_PARTITION}; there is {names}")
    return find_partition(partitions, wanted)


def _device(partition: GcPartition, wanted: int | None) -> Device | None:
    """Return the device with the id ``wanted``; None if ``wanted`` is None.

    Raises:
        UsageError: The partition does not have a device with this id.
    """
    if wanted is None:
        return None
    devices = {device.id: device for device in partition.devices()}
    if wanted in devices:
        return devices[wanted]
    last = max(devices)
    raise UsageError(
        f"--device-id {wanted}: the partition {partition.name} has the devices 0 to {last}; see "
        f"--list-devices, and name another partition in {_PARTITION}"
    )


@click.command("gc-monitor", cls=_Command, context_settings=_HELP)
@click.option("--no-card-info", is_flag=True, help="Show only the processes, without the IPUs.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")
@_ALL_PARTITIONS
@click.option("-v", "--version", is_flag=True, help="Show the version.")
def GC_MONITOR(
    *, no_card_info: bool, as_json: bool, all_partitions: bool, version: bool
) -> None:  # fmt: skip
    """Show the emulated IPUs of this machine, and the processes that hold them now.

    The partition "emulated" has the IPUs that any program can take. Each running job of poprun-py
    has its own partition. If IPUOF_VIPU_API_PARTITION_ID names a partition, only that one is shown.
    The command "watch gc-monitor" shows the IPUs repeatedly.

    If a pod is configured (poprun-py-pod --help), your partitions in it are shown.
    """
    if version:
        print_out(version_text("text"))
        return
    partitions, _ = _selected_partitions(all_users=all_partitions)
    named = [each for each in partitions if each.name == os.environ.get(_PARTITION)]
    partitions = partitions if all_partitions else named or partitions
    if as_json:
        print_out(json.dumps(monitor_json(partitions), indent=2))
    elif partitions:
        print_out(monitor_text(partitions, card_info=not no_card_info))


def run(command: click.Command, words: Sequence[str]) -> int:
    """Run ``command`` with the arguments ``words`` and return its exit code."""

    def answer() -> int:
        with usage_errors():
            command.main(list(words), prog_name=command.name, standalone_mode=False)
        return 0

    return exit_code_of(answer)


def _main(command: click.Command) -> Callable[[], NoReturn]:
    def main() -> NoReturn:
        prepare_streams()
        exit_with(run(command, sys.argv[1:]))

    return main


gc_info, gc_monitor = _main(GC_INFO), _main(GC_MONITOR)
