"""The verbs ``list`` and ``get`` of ``poprun-py-pod``, for every kind of object."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from popdist_py.pods.model.pod_errors import PodError
from popdist_py.pods.model.pod_parts import Partition
from poprun_py.command.pods.command_grammar import ObjectCommand, object_command
from poprun_py.command.pods.object_formats import (
    AGENT,
    ALLOCATION,
    CLUSTER,
    DEVICE,
    IPU_ATTRIBUTE,
    PARTITION,
    POD,
    ObjectKind,
    json_text,
    ruled_table,
)
from poprun_py.command.pods.pod_access import (
    known_names,
    known_pods,
    opened_pod,
    refusals,
    wants_json,
)
from poprun_py.command.pods.pod_snapshot import PodSnapshot
from poprun_py.display.formatting import printable
from poprun_py.errors import UsageError
from poprun_py.terminal import print_out

T = TypeVar("T")
# The name of the architecture of Mk2 IPUs in an IPUoF configuration.
_IPU_ARCHITECTURE = "ipu2"
_FIRST_PORT = 50051
# Maps each heading of the table of ``list pods`` to a key of the JSON document.
_PODS_COLUMNS = {
    "Pod": "id", "IPUs": "num_ipus", "Free": "num_free_ipus", "Partitions": "num_partitions",
    "Folder": "where",
}  # fmt: skip


def _show(
    verb: str, kind: str, name: str, text: Callable[[PodSnapshot], str], pod: str | None = None
) -> None:
    """Print the result of ``text`` for the pod ``pod``, by default the selected pod."""
    with opened_pod(pod) as store, refusals(verb, kind, name):
        shown = text(PodSnapshot(store))
    print_out(shown)


def _list_verb(kind: ObjectKind[T], text: str) -> ObjectCommand:
    """Return the command that lists all objects of a kind; ``text`` is the command's help."""

    def listing(snapshot: PodSnapshot) -> str:
        return kind.list_text(snapshot, kind.find_all(snapshot), as_json=wants_json())

    return object_command(f"{kind.name}s", text=text)(
        lambda: _show("list", f"{kind.name}s", "", listing)
    )


def _get_verb(kind: ObjectKind[T], text: str) -> ObjectCommand:
    """Return the command that shows one object of a kind; ``text`` is the command's help."""

    @click.argument("name", shell_complete=known_names(kind))
    def show(*, name: str) -> None:
        def details(snapshot: PodSnapshot) -> str:
            return kind.get_text(snapshot, kind.find(snapshot, name), as_json=wants_json())

        _show("get", kind.name, name, details)

    return object_command(kind.name, text=text)(show)


@object_command("partition", "get partition p64", "get partition p64 --gcd 1 --ipuof-configs")
@click.argument("name", shell_complete=known_names(PARTITION))
@click.option(
    "--gcd",
    type=click.IntRange(min=0),
    metavar="K",
    help="The number of the GCD for --ipuof-configs. Unset: 0.",
)
@click.option(
    "--ipuof-configs", is_flag=True, help="Print the IPUoF configuration of a GCD as JSON."
)
def _get_partition(*, name: str, gcd: int | None, ipuof_configs: bool) -> None:
    """Show a partition, its IPUs, and the processes that use the IPUs."""
    if gcd is not None and not ipuof_configs:
        raise UsageError("--gcd K can only be used together with --ipuof-configs")

    def details(snapshot: PodSnapshot) -> str:
        partition = snapshot.store.partition(name)
        if ipuof_configs:
            return json_text(_ipuof_config(partition, gcd or 0))
        return PARTITION.get_text(snapshot, partition, as_json=wants_json())

    _show("get", "partition", name, details)


def _ipuof_config(partition: Partition, gcd: int) -> Mapping[str, Any]:
    """Return the IPUoF configuration of one GCD, with the field names of V-IPU's protocol.

    Emulated IPUs do not listen on ports. The port numbers only distinguish the IPUs of a host. The
    configuration of GCD 0 omits the attribute ``GCD Id``.
    """
    if gcd >= partition.num_gcds:
        raise UsageError(
            f"--gcd {gcd}: expected the number of a GCD of partition {partition.name}, 0 to "
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


@object_command("ipu-attrs")
@click.argument("agent", shell_complete=known_names(AGENT))
def _get_attributes(*, agent: str) -> None:
    """Show the attributes of the IPUs of one agent."""

    def attributes(snapshot: PodSnapshot) -> str:
        AGENT.find(snapshot, agent)
        found = [each for each in IPU_ATTRIBUTE.find_all(snapshot) if each.agent == agent]
        return IPU_ATTRIBUTE.list_text(snapshot, found, as_json=wants_json())

    _show("get", "ipu-attrs", agent, attributes)


@object_command("pod")
@click.argument("name", shell_complete=known_pods, required=False)
def _get_pod(*, name: str | None) -> None:
    """Show a pod of this machine.

    If NAME is missing, the command shows the pod that the global options select.
    """

    def details(snapshot: PodSnapshot) -> str:
        return POD.get_text(snapshot, snapshot.pod, as_json=wants_json())

    _show("get", "pod", name or "", details, pod=name)


@object_command("pods")
def _list_pods() -> None:
    """List the pods of this machine, sorted by name."""
    from popdist_py.pods.folder import pod_folders

    with refusals("list", "pods"):
        root = pod_folders.pods_root(os.environ)
        documents = [_summary(root, name) for name in pod_folders.list_pods(root)]
    if wants_json():
        print_out(json_text(documents))
    else:
        cells = ([each[key] for key in _PODS_COLUMNS.values()] for each in documents)
        rows = [["?" if cell is None else printable(str(cell)) for cell in row] for row in cells]
        print_out(ruled_table(tuple(_PODS_COLUMNS), rows))


def _summary(root: Path, name: str) -> dict[str, str | int | None]:
    """Return the JSON document of a pod for ``list pods``.

    If the pod cannot be read, its numbers of IPUs and partitions are None.
    """
    from popdist_py.pods.folder.pod_folders import open_pod

    names = ("num_ipus", "num_free_ipus", "num_partitions")
    counts: dict[str, int | None] = dict.fromkeys(names)
    with contextlib.suppress(PodError), contextlib.closing(open_pod(root, name)) as store:
        snapshot = PodSnapshot(store)
        counts = {each: POD.value(snapshot, snapshot.pod, each) for each in names}
    return {"id": name, **counts, "where": str(root / name)}


# The commands of the verbs ``list`` and ``get``, in the order in which the help lists them.
LIST_VERBS = (
    _list_verb(PARTITION, "List the partitions of the pod, sorted by name."),
    _list_verb(
        DEVICE,
        "List all IPUs of the pod, their partitions and their processes.\n\n"
        'The command "gc-info -l" lists the devices of a partition, which are IPUs and groups of '
        "IPUs.",
    ),
    _list_verb(ALLOCATION, "List the allocations of the pod."),
    _list_verb(CLUSTER, "List the clusters of the pod."),
    _list_verb(AGENT, "List the agents of the pod, which are its IPU-Machines."),
    _list_verb(IPU_ATTRIBUTE, "List the cluster, IPU-Link domain and partition of every IPU."),
    _list_pods,
)
GET_VERBS = (
    _get_partition,
    _get_verb(ALLOCATION, "Show an allocation with its agents, free IPUs and partitions."),
    _get_verb(CLUSTER, "Show a cluster with its agents, allocations and partitions."),
    _get_verb(AGENT, "Show an agent with its host, free IPUs and partitions."),
    _get_attributes,
    _get_pod,
)
