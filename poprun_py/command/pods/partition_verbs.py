"""The verbs of ``poprun-py-pod`` that change partitions: create, reset, fail and remove."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from popdist_py.pods.model.pod_parts import (
    Partition,
    PartitionRequest,
    PartitionState,
    SyncType,
)
from poprun_py.command.pods.command_grammar import object_command
from poprun_py.command.pods.object_formats import ALLOCATION, CLUSTER, PARTITION, sync_name
from poprun_py.command.pods.pod_access import RefusedError, changed_pod, completion, known_names
from poprun_py.command.pods.pod_snapshot import ild_routing
from poprun_py.terminal import can_rewrite_lines, print_warning, rewrite_line

if TYPE_CHECKING:
    from popdist_py.pods.model.pod_store import PodStore

# The values of --routing, in all of V-IPU's spellings.
_ROUTINGS = ("default", "dnc", "swnc", "btnc", "ringswnc", "ring-swnc")
# The first and the longest pause between two queries of a partition's state.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5
_KNOWN_NAME = click.argument("name", shell_complete=known_names(PARTITION))
_WAIT = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait at most SECONDS until the partition is ACTIVE. Unset: do not wait.",
)


def _sync_type(
    context: click.Context, param: click.Parameter, value: str | None
) -> SyncType | None:
    """Return the sync type that V-IPU's command line or protocol calls ``value``, in any case."""
    if value is None:
        return None
    wanted = value.lower().replace("_", "-")
    for each in SyncType:
        if wanted in (sync_name(each), each.value.lower().replace("_", "-")):
            return each
    names = ", ".join(f"{sync_name(each)} ({each.value})" for each in SyncType)
    raise click.BadParameter(f"{value!r}: expected one of {names}", context, param)


@object_command(
    "partition",
    "create partition p16 --size 16 --reconfigurable",
    "create partition p64 --size 64 --num-gcds 4 --total-num-replicas 16",
    "create partition p128 --size 128 --num-ilds 2 --sync-type pod-native-default",
)
@click.argument("name")
@click.option(
    "--size",
    type=int,
    required=True,
    metavar="IPUS",
    help="The number of IPUs of the partition, a power of two.",
)
@click.option(
    "--num-gcds", "--gcds", type=int, default=1, metavar="N", show_default=True,
    help="The number of graph compilation domains (GCDs). Each process uses one GCD.",
)  # fmt: skip
@click.option(
    "--num-ilds", "--num-ipulink-segments", type=int, metavar="N",
    help="The number of IPU-Link domains of the partition. Unset: as few as possible.",
)  # fmt: skip
@click.option(
    "--total-num-replicas", "--gcd-sync-replicas", "num_replicas", type=int, metavar="N",
    help="The total number of replicas in all GCDs.  [default: the number of GCDs]",
)  # fmt: skip
@click.option(
    "--reconfigurable", is_flag=True,
    help="Make a partition in which every IPU, and every aligned group of 2, 4, 8, ... IPUs, is a "
    "device.",
)  # fmt: skip
@click.option(
    "--sync-type", metavar="TYPE", callback=_sync_type,
    shell_complete=completion(lambda _: map(sync_name, SyncType)),
    help="The sync type of the partition, such as c2-compatible (the default) or "
    "pod-native-default. A name from V-IPU's protocol, such as ST_GS2_DEFAULT, is accepted, too.",
)  # fmt: skip
@click.option(
    "--routing", type=click.Choice(_ROUTINGS, case_sensitive=False),
    help="The expected routing of the IPU-Links. A warning is printed if the size of the "
    "partition and the topology of the cluster lead to a different routing.",
)  # fmt: skip
@click.option(
    "--allocation", shell_complete=known_names(ALLOCATION), metavar="NAME",
    help="The allocation whose IPUs the partition may use. Unset: any allocation.",
)  # fmt: skip
@click.option(
    "--cluster", shell_complete=known_names(CLUSTER), metavar="NAME",
    help="The cluster whose IPUs the partition may use. Prefer the option --allocation.",
)  # fmt: skip
@_WAIT
def create_partition(
    *, name: str, routing: str | None, wait: float | None, **requirements: Any
) -> None:
    """Make a partition of free IPUs."""
    # The options in ``requirements`` are named like the fields of PartitionRequest.
    request = PartitionRequest(name=name, **requirements)
    with changed_pod("create", "partition", name) as store:
        partition = store.create_partition(request)
        if routing is not None:
            wanted = routing.upper().replace("-", "")
            actual = ild_routing(partition, store.pod())
            if wanted not in ("DEFAULT", actual):
                print_warning(
                    f"partition {partition.name} has the routing {actual}, not {wanted}, because "
                    "the partition's size and its cluster's topology determine the routing; "
                    "results on emulated IPUs do not depend on the routing"
                )
        if wait is not None:
            _wait_until_active(store, "create", partition, wait)


@object_command("partition")
@_KNOWN_NAME
@_WAIT
def reset_partition(*, name: str, wait: float | None) -> None:
    """Reset a partition to its initial state. The partition's IPUs must not be in use."""
    with changed_pod("reset", "partition", name) as store:
        partition = store.reset_partition(name)
        if wait is not None:
            _wait_until_active(store, "reset", partition, wait)


@object_command("partition")
@_KNOWN_NAME
@click.option(
    "--reason", default="failed on request", show_default=True, metavar="TEXT",
    help="The reason for the state ERROR, which \"get partition\" and error messages show.",
)  # fmt: skip
def fail_partition(*, name: str, reason: str) -> None:
    """Put a partition into the state ERROR, as broken hardware would.

    Use this command to test how programs handle the state ERROR. The command "reset partition"
    makes the partition usable again.
    """
    with changed_pod("fail", "partition", name) as store:
        store.fail_partition(name, reason)


@object_command("partition", "remove partition p64", "remove partition p64 --force")
@_KNOWN_NAME
@click.option(
    "--force",
    is_flag=True,
    help="Remove the partition even if it is in use or belongs to another user.",
)
def remove_partition(*, name: str, force: bool) -> None:
    """Remove a partition and free its IPUs."""
    with changed_pod("remove", "partition", name) as store:
        store.remove_partition(name, force=force)


def _wait_until_active(store: PodStore, verb: str, partition: Partition, seconds: float) -> None:
    """Wait until a partition is ACTIVE. During the wait, a terminal shows a progress line.

    Raises:
        RefusedError: The partition is in the state ERROR, or still PENDING after ``seconds``.
    """
    name = partition.name
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    with _progress_line(f"{verb} partition ({name}): waiting until the partition is ACTIVE"):
        while partition.state is PartitionState.PENDING and time.monotonic() < deadline:
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
            partition = store.partition(name)
    failed = f"{verb} partition ({name}): failed: "
    if partition.state is PartitionState.ERROR:
        raise RefusedError(f"{failed}the partition is in the state ERROR: {partition.error}")
    if partition.state is PartitionState.PENDING:
        raise RefusedError(
            f"{failed}the partition is still PENDING after {seconds:g} s: wait longer with --wait, "
            f"or show the partition's state with poprun-py-pod get partition {name}"
        )


@contextlib.contextmanager
def _progress_line(text: str) -> Iterator[None]:
    if not can_rewrite_lines():
        yield
        return
    rewrite_line(text)
    try:
        yield
    finally:
        rewrite_line("")
