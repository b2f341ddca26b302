"""The commands ``gc-info`` and ``gc-monitor``: words -> what is shown -> exit code.

A small set of the options of Graphcore's tools, which have many for hardware alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from popdist_py.pods.values import Device
from poprun_py.errors import UsageError
from poprun_py.pod_tools.gc_listing import device_info as info_of_device
from poprun_py.pod_tools.gc_listing import device_listing
from poprun_py.pod_tools.gc_partitions import (
    ARCHITECTURE,
    CLOCK_MHZ,
    Partition,
    find_partition,
)
from poprun_py.pod_tools.gc_pod_survey import PodSurvey, survey_pod
from poprun_py.pod_tools.gc_survey import survey
from poprun_py.pod_tools.gc_texts import monitor_json, monitor_text
from poprun_py.terminal import (
    PrintedHelp,
    exit_code_of,
    exit_with,
    prepare_streams,
    print_out,
    print_warning,
)
from poprun_py.versions import version_text

# The partition of Graphcore's tools is named by this variable.
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Command(PrintedHelp, click.Command):
    pass


_ALL_PARTITIONS = click.option(
    "--all-partitions", is_flag=True, help="Show the partitions of all users of the pod."
)


def _partitions(every: bool) -> tuple[list[Partition], bool]:
    """Return the partitions that are meant, and whether they are those of a pod.

    Args:
        every: whether those of others, and those that the variable does not name, are too.

    Raises:
        UsageError: the pod has none of the variable's name.
        StartError: the pod cannot be asked.
    """
    pod = survey_pod(os.environ)
    if pod is None:
        partitions, silent = survey()
    else:
        partitions, silent = _of_pod(pod, every), pod.silent
    for launcher in silent:
        print_warning(
            f"the launcher {launcher} does not answer: is it stopped (Ctrl-Z)? What its job holds "
            "is not shown"
        )
    return partitions, pod is not None


def _of_pod(pod: PodSurvey, every: bool) -> list[Partition]:
    wanted = os.environ.get(_PARTITION)
    named = [each for each in pod.partitions if each.name == wanted]
    if wanted and not named:
        names = ", ".join(each.name for each in pod.partitions) or "no partition"
        raise UsageError(f"{_PARTITION}={wanted}: the pod {pod.where} has {names}")
    if every:
        return [*named, *(each for each in pod.partitions if each not in named)]
    shown = named or pod.own()
    if not shown:
        print_warning(
            f"the pod {pod.where} has no partition of yours: poprun-py-pod create partition NAME "
            "--size N makes one, --all-partitions shows those of others"
        )
    return shown


@click.command("gc-info", cls=_Command, context_settings=_HELP)
@click.option("-l", "--list-devices", is_flag=True, help="List all devices.")
@click.option("-d", "--device-id", type=int, metavar="ID", help="The device that is asked about.")
@click.option("-i", "--device-info", is_flag=True, help="Show one device: needs -d.")
@click.option("--ipu-arch", is_flag=True, help="Show the architecture of a device.")
@click.option("--ipu-count", is_flag=True, help="Show the number of IPUs, of a device or of all.")
@click.option("--tile-clock-speed", is_flag=True, help="Show the clock of the tiles.")
@_ALL_PARTITIONS
@click.option("-v", "--version", is_flag=True, help="Show the version.")
def GC_INFO(
    *,
    list_devices: bool,
    device_id: int | None,
    device_info: bool,
    ipu_arch: bool,
    ipu_count: bool,
    tile_clock_speed: bool,
    all_partitions: bool,
    version: bool,
) -> None:
    """List the emulated IPUs of this machine, and which processes hold them.

    IPUs of the partition "emulated" are free: any program gets them. Every running job of poprun-py
    has a partition of its own. -d looks at the partition that IPUOF_VIPU_API_PARTITION_ID names,
    or else at the free one.

    Where a pod is configured (poprun-py-pod --help) the IPUs are those of your partitions in it, or
    of the one that the variable names.
    """
    if version:
        print_out(version_text("text"))
        return
    if not (list_devices or device_info or ipu_arch or ipu_count or tile_clock_speed):
        raise UsageError("expected one of --list-devices, --device-info and others; see --help")
    partitions, is_pod = _partitions(all_partitions)
    asks_one = device_info or ipu_arch or ipu_count or tile_clock_speed or device_id is not None
    if not asks_one:
        print_out(device_listing(partitions))
        return
    partition = _meant(partitions, is_pod)
    device = _device(partition, device_id)
    if device_info and device is None:
        raise UsageError("--device-info: expected a device, --device-id ID; see --list-devices")
    if list_devices:
        print_out(device_listing(partitions))
    if device_info and device is not None:
        print_out(info_of_device(partition, device))
    if ipu_arch:
        print_out(ARCHITECTURE)
    if ipu_count:
        print_out(str(partition.num_ipus if device is None else len(device.ipus)))
    if tile_clock_speed:
        print_out(f"{CLOCK_MHZ} MHz")


def _meant(partitions: Sequence[Partition], is_pod: bool) -> Partition:
    """Return the partition that one device is asked of.

    Raises:
        UsageError: the pod has none, or several and the variable names none of them.
    """
    wanted = os.environ.get(_PARTITION)
    if is_pod and not wanted and len(partitions) != 1:
        names = ", ".join(each.name for each in partitions) or "no partition"
        raise UsageError(f"expected the name of a partition in {_PARTITION}; there is {names}")
    return find_partition(partitions, wanted)


def _device(partition: Partition, wanted: int | None) -> Device | None:
    """Return the device of this id; None where none is asked for.

    Raises:
        UsageError: the partition has no such device.
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
@click.option("--no-card-info", is_flag=True, help="Show the processes only.")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON.")
@_ALL_PARTITIONS
@click.option("-v", "--version", is_flag=True, help="Show the version.")
def GC_MONITOR(
    *, no_card_info: bool, as_json: bool, all_partitions: bool, version: bool
) -> None:  # fmt: skip
    """Show the emulated IPUs of this machine, and the processes that hold them now.

    The partition "emulated" are the IPUs that any program gets; every running job of poprun-py has
    a partition of its own. Where IPUOF_VIPU_API_PARTITION_ID names one, only that is shown. To look
    again and again: watch gc-monitor.

    Where a pod is configured (poprun-py-pod --help) the partitions are yours in it.
    """
    if version:
        print_out(version_text("text"))
        return
    partitions, _ = _partitions(all_partitions)
    named = [each for each in partitions if each.name == os.environ.get(_PARTITION)]
    partitions = partitions if all_partitions else named or partitions
    if as_json:
        print_out(json.dumps(monitor_json(partitions), indent=2))
    elif partitions:
        print_out(monitor_text(partitions, card_info=not no_card_info))


def run(command: click.Command, words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code."""
    return exit_code_of(lambda: _answer(command, words))


def _answer(command: click.Command, words: Sequence[str]) -> int:
    try:
        command.main(list(words), prog_name=command.name, standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None
    return 0


def _main(command: click.Command) -> Callable[[], NoReturn]:
    def main() -> NoReturn:
        prepare_streams()
        exit_with(run(command, sys.argv[1:]))

    return main


gc_info, gc_monitor = _main(GC_INFO), _main(GC_MONITOR)
