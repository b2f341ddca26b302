"""The verbs ``list`` and ``get`` of ``poprun-py-pod``, for every kind of object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from popdist_py.pods.model import Partition
from poprun_py.command.pods.command_grammar import ObjectCommand, ObjectName, object_command
from poprun_py.command.pods.pod_access import (
    json_text,
    known_names,
    opened_pod,
    refusals,
    wants_json,
)
from poprun_py.command.pods.pod_objects import (
    AGENT,
    ALLOCATION,
    CLUSTER,
    DEVICE,
    IPU_ATTRIBUTE,
    PARTITION,
    ObjectKind,
    devices_text,
    partition_text,
)
from poprun_py.command.pods.pod_snapshot import PodSnapshot
from poprun_py.errors import UsageError
from poprun_py.terminal import print_out

T = TypeVar("T")
# The name of the architecture of Mk2 IPUs in an IPUoF configuration.
_IPU_ARCHITECTURE = "ipu2"
_FIRST_PORT = 50051


def _list_verb(
    kind: ObjectKind[T], text: str, table: Callable[[PodSnapshot], str] | None = None
) -> ObjectCommand:
    """Return the command that lists all objects of a kind.

    Args:
        kind: The kind of object.
        text: The command's help text.
        table: Returns the table to print; None for the table of ``kind``.
    """

    def show() -> None:
        with opened_pod() as store, refusals("list", f"{kind.name}s"):
            snapshot = PodSnapshot(store)
            if table is not None and not wants_json():
                shown = table(snapshot)
            else:
                shown = _table_or_json(kind, snapshot, kind.find_all(snapshot))
        print_out(shown)

    return object_command(f"{kind.name}s", text=text)(show)


def _table_or_json(kind: ObjectKind[T], snapshot: PodSnapshot, items: Sequence[T]) -> str:
    if wants_json():
        return json_text([kind.to_json(snapshot, each) for each in items])
    return kind.table(snapshot, items)


def _get_verb(kind: ObjectKind[T], text: str) -> ObjectCommand:
    """Return the command that shows one object of a kind."""

    @click.argument("name", type=ObjectName(known_names(kind)))
    def show(*, name: str) -> None:
        with opened_pod() as store, refusals("get", kind.name, name):
            snapshot = PodSnapshot(store)
            found = kind.find(snapshot, name)
            if wants_json():
                shown = json_text(kind.to_json(snapshot, found))
            else:
                shown = kind.fact_lines(snapshot, found)
        print_out(shown)

    return object_command(kind.name, text=text)(show)


# --- get partition ------------------------------------------------------------------------------


@object_command("partition", "get partition p64", "get partition p64 --gcd 1 --ipuof-configs")
@click.argument("name", type=ObjectName(known_names(PARTITION)))
@click.option(
    "--gcd", type=click.IntRange(min=0), metavar="K", help="The GCD for --ipuof-configs. Unset: 0."
)
@click.option(
    "--ipuof-configs", is_flag=True, help="Print the IPUoF configuration of a GCD as JSON."
)
def _get_partition(*, name: str, gcd: int | None, ipuof_configs: bool) -> None:
    """Show a partition with its IPUs and their holders."""
    if gcd is not None and not ipuof_configs:
        raise UsageError("--gcd needs --ipuof-configs")
    with opened_pod() as store, refusals("get", "partition", name):
        partition, snapshot = store.partition(name), PodSnapshot(store)
        if ipuof_configs:
            shown = json_text(_ipuof_config(partition, gcd or 0))
        elif wants_json():
            shown = json_text(PARTITION.to_json(snapshot, partition))
        else:
            shown = partition_text(snapshot, partition)
    print_out(shown)


def _ipuof_config(partition: Partition, gcd: int) -> Mapping[str, Any]:
    """Return the IPUoF configuration of one GCD, with the field names of V-IPU's protocol.

    Emulated IPUs do not listen on ports. The port numbers only distinguish the IPUs of a host. For
    GCD 0, the attribute ``GCD Id`` is left out.

    Raises:
        UsageError: The partition does not have this GCD.
    """
    if gcd >= partition.num_gcds:
        raise UsageError(
            f"--gcd {gcd}: the partition {partition.name} has the GCDs 0 to "
            f"{partition.num_gcds - 1}"
        )
    share = partition.size // partition.num_gcds
    devices = [
        {
            "ip": ipu.host,
            "server_port": _FIRST_PORT + ipu.index,
            "rdma_port": _FIRST_PORT + ipu.index,
            "device_id": ipu.number,
            "ipulink_segment_id": partition.domain_of(gcd * share + number),
            "routing_id": number,
            "ipu_arch_id": _IPU_ARCHITECTURE,
            "ipu_id": ipu.index,
            "chip_id": ipu.number,
            "versions": {"emulated": "1"},
        }
        for number, ipu in enumerate(partition.ipus[gcd * share : (gcd + 1) * share])
    ]
    return {"devices": devices, "attributes": {"GCD Id": str(gcd)} if gcd else {}}


# --- get ipu-attrs ------------------------------------------------------------------------------


@object_command("ipu-attrs")
@click.argument("agent", type=ObjectName(known_names(AGENT)))
def _get_attributes(*, agent: str) -> None:
    """Show the attributes of the IPUs of one agent."""
    with opened_pod() as store, refusals("get", "ipu-attrs", agent):
        snapshot = PodSnapshot(store)
        AGENT.find(snapshot, agent)
        found = [each for each in IPU_ATTRIBUTE.find_all(snapshot) if each.agent == agent]
        shown = _table_or_json(IPU_ATTRIBUTE, snapshot, found)
    print_out(shown)


# --- the commands of list and get, in the order of the help -------------------------------------

LIST_VERBS = (
    _list_verb(PARTITION, "List the partitions of the pod, sorted by name."),
    _list_verb(
        DEVICE,
        "List all IPUs of the pod, with their partitions and holders.\n\n"
        "gc-info -l lists the devices of a partition, which are single IPUs and groups of IPUs.",
        table=devices_text,
    ),
    _list_verb(ALLOCATION, "List the allocations of the pod."),
    _list_verb(CLUSTER, "List the clusters of the pod."),
    _list_verb(AGENT, "List the agents of the pod, which are its IPU-Machines."),
    _list_verb(IPU_ATTRIBUTE, "List the cluster, IPU-Link domain and partition of every IPU."),
)
GET_VERBS = (
    _get_partition,
    _get_verb(ALLOCATION, "Show an allocation with its agents, free IPUs and partitions."),
    _get_verb(CLUSTER, "Show a cluster with its agents, allocations and partitions."),
    _get_verb(AGENT, "Show an agent with its host, free IPUs and partitions."),
    _get_attributes,
)
