"""The verbs of partitions: create, list, get, reset, fail, remove."""

from __future__ import annotations

import click

from popdist_py.pods.values import PartitionRequest, SyncType
from poprun_py.errors import UsageError
from poprun_py.pod_tools.command_grammar import NAME, Names, Sync, action
from poprun_py.pod_tools.documents import ipuof_config, partition_document
from poprun_py.pod_tools.pod_access import (
    doing,
    known_names,
    opened_pod,
    print_json,
    success,
    wait_until_active,
    wants_json,
)
from poprun_py.pod_tools.pod_objects import partition_facts, partition_table
from poprun_py.pod_tools.routing import ROUTINGS, misrouted
from poprun_py.terminal import print_out, print_warning

_KIND = "partition"
_KNOWN = click.argument(
    "name", type=Names(known_names(lambda store: [each.name for each in store.partitions()]))
)
_ALLOCATIONS = Names(known_names(lambda store: [each.name for each in store.pod().allocations]))
_CLUSTERS = Names(known_names(lambda store: [each.name for each in store.pod().clusters]))
_WAIT = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait until it is ACTIVE, at most so long. Unset: not at all.",
)


@action(
    "partition",
    "create partition p16 --size 16 --reconfigurable",
    "create partition p64 --size 64 --num-gcds 4 --total-num-replicas 16",
    "create partition p128 --size 128 --num-ilds 2 --sync-type pod-native-default",
)
@NAME
@click.option("--size", type=int, required=True, metavar="IPUS", help="Its IPUs, a power of two.")
@click.option(
    "--num-gcds",
    "--gcds",
    type=int,
    default=1,
    metavar="N",
    show_default=True,
    help="Graph compilation domains: parts that one process each targets.",
)
@click.option(
    "--num-ilds",
    "--num-ipulink-segments",
    type=int,
    metavar="N",
    help="IPU-Link domains that it lies in. Unset: as few as hold it.",
)
@click.option(
    "--total-num-replicas",
    "--gcd-sync-replicas",
    type=int,
    metavar="N",
    help="Replicas of all GCDs together.  [default: the number of GCDs]",
)
@click.option(
    "--reconfigurable",
    is_flag=True,
    help="Offer every single IPU and every aligned group of 2, 4, 8, ... as a device.",
)
@click.option(
    "--sync-type",
    type=Sync(),
    metavar="TYPE",
    help="c2-compatible (the default), pod-native-default, ..., or the protocol's name.",
)
@click.option(
    "--routing",
    type=click.Choice(list(ROUTINGS), case_sensitive=False),
    help="Of the IPU-Links. Size and topology choose it; a warning says where it is another one.",
)
@click.option("--allocation", type=_ALLOCATIONS, metavar="NAME", help="Where its IPUs are from.")
@click.option("--cluster", type=_CLUSTERS, metavar="NAME", help="The same; use --allocation.")
@_WAIT
def CREATE(
    *, name: str, size: int, num_gcds: int, num_ilds: int | None,
    total_num_replicas: int | None, reconfigurable: bool, sync_type: SyncType | None,
    routing: str | None, allocation: str | None, cluster: str | None, wait: float | None,
) -> None:  # fmt: skip
    """Make a partition of free IPUs."""
    request = PartitionRequest(
        name=name,
        size=size,
        allocation=allocation,
        cluster=cluster,
        num_gcds=num_gcds,
        num_ilds=num_ilds,
        num_replicas=total_num_replicas,
        reconfigurable=reconfigurable,
        sync_type=sync_type,
    )
    with opened_pod() as store, doing("create", _KIND, name):
        partition = store.create_partition(request)
        if routing is not None:
            clusters = {each.name: each for each in store.pod().clusters}
            if fault := misrouted(partition, clusters, routing):
                print_warning(fault)
        if wait is not None:
            wait_until_active(store, "create", partition, wait)
    success("create", _KIND, name)


@action("partitions")
def LIST() -> None:
    """List the partitions of the pod, by name."""
    with opened_pod() as store, doing("list", "partitions"):
        pod, partitions, attachments = store.pod(), store.partitions(), store.attachments()
    if wants_json():
        print_json([partition_document(pod, each, attachments) for each in partitions])
    else:
        print_out(partition_table(pod, partitions))


@action(
    "partition",
    "get partition p64",
    "get partition p64 --gcd 1 --ipuof-configs",
)
@_KNOWN
@click.option("--gcd", type=click.IntRange(min=0), metavar="K", help="The GCD that is meant.")
@click.option(
    "--ipuof-configs", is_flag=True, help="Print the IPUoF configuration of the GCD (0) as JSON."
)
def GET(*, name: str, gcd: int | None, ipuof_configs: bool) -> None:
    """Show a partition: its facts, its IPUs, and who holds them."""
    if gcd is not None and not ipuof_configs:
        raise UsageError("--gcd needs --ipuof-configs")
    with opened_pod() as store, doing("get", _KIND, name):
        partition = store.partition(name)
        pod, attachments = store.pod(), store.attachments()
    if ipuof_configs:
        if (gcd or 0) >= partition.num_gcds:
            last = partition.num_gcds - 1
            raise UsageError(f"--gcd {gcd}: the partition {name} has the GCDs 0 to {last}")
        print_json(ipuof_config(partition, gcd or 0))
    elif wants_json():
        print_json(partition_document(pod, partition, attachments))
    else:
        print_out(partition_facts(pod, partition, attachments))


@action("partition")
@_KNOWN
@_WAIT
def RESET(*, name: str, wait: float | None) -> None:
    """Bring a partition into its initial state; nobody may hold IPUs of it."""
    with opened_pod() as store, doing("reset", _KIND, name):
        partition = store.reset_partition(name)
        if wait is not None:
            wait_until_active(store, "reset", partition, wait)
    success("reset", _KIND, name)


@action("partition")
@_KNOWN
@click.option(
    "--reason", default="failed on request", show_default=True, metavar="TEXT",
    help="What get partition and those who want to use it are told.",
)  # fmt: skip
def FAIL(*, name: str, reason: str) -> None:
    """Put a partition into the state ERROR, as broken hardware would, to see what programs do.

    reset partition brings it back.
    """
    with opened_pod() as store, doing("fail", _KIND, name):
        store.fail_partition(name, reason)
    success("fail", _KIND, name)


@action(
    "partition",
    "remove partition p64",
    "remove partition p64 --force",
)
@_KNOWN
@click.option("--force", is_flag=True, help="Also if it is in use, or another user's.")
def REMOVE(*, name: str, force: bool) -> None:
    """Free the IPUs of a partition."""
    with opened_pod() as store, doing("remove", _KIND, name):
        store.remove_partition(name, force=force)
    success("remove", _KIND, name)
