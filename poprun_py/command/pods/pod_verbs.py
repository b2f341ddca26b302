"""The verbs of ``poprun-py-pod`` for pods, clusters and allocations: create, remove and serve."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from popdist_py.pods.folder.pod_file import read_pod
from popdist_py.pods.model.graphcore_systems import SYSTEMS, machine_pod, system_pod
from popdist_py.pods.model.pod_parts import Allocation, Cluster, Pod
from popdist_py.pods.server.server_url import DEFAULT_PORT
from poprun_py.command.pods.command_grammar import object_command
from poprun_py.command.pods.object_formats import ALLOCATION, CLUSTER
from poprun_py.command.pods.pod_access import (
    changed_pod,
    known_names,
    known_pods,
    opened_pod,
    requested,
)
from poprun_py.command.pods.pod_snapshot import PodSnapshot
from poprun_py.errors import UsageError

# The value of --type for a pod with the IPUs of this host. The other values of --type are
# Graphcore's systems.
_MACHINE = "machine"


def _names(text: str | None) -> tuple[str, ...]:
    """Return the names in a text such as ``a, b``."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


# --- clusters and allocations -------------------------------------------------------------------


@object_command(
    "cluster",
    "create cluster c1 --agents a1,a2,a3,a4",
    "create cluster c128 --num-ipulinkdomains 2 --topology torus --cluster-topology looped",
)
@click.argument("name")
@click.option(
    "--agents", metavar="A,B,...",
    help="The cluster's agents. Unset: all agents that do not belong to a cluster.",
)  # fmt: skip
@click.option(
    "--num-ipulinkdomains", "--num-ilds", "num_ilds", type=int, default=1, metavar="N",
    show_default=True,
    help="The number of IPU-Link domains. Each domain gets the same number of agents.",
)  # fmt: skip
@click.option(
    "--topology", type=click.Choice(["mesh", "torus"]), default="mesh", show_default=True,
    help="The topology of the IPU-Links in each IPU-Link domain. A torus also connects the ends of "
    "the mesh.",
)  # fmt: skip
@click.option(
    "--cluster-topology", type=click.Choice(["line", "looped"]), default="line",
    show_default=True,
    help="The topology of the GW-Links between IPU-Link domains. A looped line is a ring.",
)  # fmt: skip
def create_cluster(
    *, name: str, agents: str | None, num_ilds: int, topology: str, cluster_topology: str
) -> None:  # fmt: skip
    """Make a cluster of agents that do not yet belong to a cluster."""
    with changed_pod("create", "cluster", name) as store:
        if agents is None:
            pod = store.pod()
            taken = {agent for cluster in pod.clusters for agent in cluster.agents}
            members = tuple(each.name for each in pod.agents if each.name not in taken)
        else:
            members = _names(agents)
        store.create_cluster(
            Cluster(
                name=name,
                agents=members,
                num_ilds=num_ilds,
                topology=topology,
                is_looped=cluster_topology == "looped",
            )
        )


@object_command("cluster")
@click.argument("name", shell_complete=known_names(CLUSTER))
def remove_cluster(*, name: str) -> None:
    """Remove a cluster. The cluster's allocations must be removed first."""
    with changed_pod("remove", "cluster", name) as store:
        store.remove_cluster(name)


@object_command(
    "allocation",
    "create allocation team --cluster c64 --agents a1,a2,a3,a4",
    "create allocation everybody",
)
@click.argument("name")
@click.option(
    "--cluster",
    shell_complete=known_names(CLUSTER),
    metavar="NAME",
    help="The cluster that the agents belong to. Unset: the pod's only cluster.",
)
@click.option(
    "--agents", metavar="A,B,...",
    help="The allocation's agents. Unset: all agents of the cluster.",
)  # fmt: skip
def create_allocation(*, name: str, cluster: str | None, agents: str | None) -> None:
    """Make an allocation of agents of one cluster. Users make partitions from an allocation."""
    with changed_pod("create", "allocation", name) as store:
        snapshot = PodSnapshot(store)
        clusters = snapshot.pod.clusters
        if cluster is None and len(clusters) != 1:
            names = ", ".join(each.name for each in clusters) or "none"
            raise click.UsageError(
                "--cluster NAME is missing, which only a pod with exactly one cluster allows; "
                f"clusters of this pod: {names}"
            )
        found = clusters[0] if cluster is None else CLUSTER.find(snapshot, cluster)
        members = found.agents if agents is None else _names(agents)
        store.create_allocation(Allocation(name=name, cluster=found.name, agents=members))


@object_command("allocation")
@click.argument("name", shell_complete=known_names(ALLOCATION))
def remove_allocation(*, name: str) -> None:
    """Remove an allocation. The allocation's partitions must be removed first."""
    with changed_pod("remove", "allocation", name) as store:
        store.remove_allocation(name)


# --- pods ---------------------------------------------------------------------------------------


@object_command(
    "pod",
    "create pod lab --type POD64",
    "create pod lab --type POD128 --hosts node0,node1,node2,node3",
    "create pod lab --file pod.toml",
)
@click.argument("name")
@click.option(
    "--type",
    "system",
    type=click.Choice((*SYSTEMS, _MACHINE)),
    help="The Graphcore system to emulate. The type machine is a pod of 16 IPUs on this host.",
)
@click.option(
    "--hosts", metavar="H1,H2,...", help="The hosts of the pod's IPU-Machines. Unset: this host."
)
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="POD.TOML",
    help="A file that describes the pod, such as the pod.toml of another pod.",
)  # fmt: skip
def create_pod(*, name: str, system: str | None, hosts: str | None, file: Path | None) -> None:
    """Make a pod of emulated IPUs on this machine.

    Each pod has its own folder in POPRUN_PODS (default: ~/.local/state/poprun-py/pods). The file
    pod.toml in the pod's folder describes the pod. The command "poprun-py-pod serve" lets other
    hosts use the pod.
    """
    if (system is None) == (file is None):
        raise UsageError("expected either --type TYPE or --file POD.TOML")
    names = _names(hosts)
    if hosts is not None and (file is not None or system == _MACHINE or not names):
        raise UsageError(
            "--hosts H1,H2,... needs at least one host, and a --type from POD4 to POD256"
        )
    with requested("create", "pod", name):
        from popdist_py.pods.folder.pod_folders import make_pod, pods_root

        make_pod(pods_root(os.environ), _requested_pod(name, system, names, file))


def _requested_pod(name: str, system: str | None, hosts: tuple[str, ...], file: Path | None) -> Pod:
    if file is not None:
        return replace(read_pod(file), name=name)
    if system == _MACHINE:
        return machine_pod(name)
    assert system is not None
    return system_pod(system, name, hosts or None)


@object_command("pod")
@click.argument("name", shell_complete=known_pods)
@click.option(
    "--force", is_flag=True, help="Remove the pod even if it has partitions or is damaged."
)
def remove_pod(*, name: str, force: bool) -> None:
    """Remove a pod of this machine with its partitions and folder."""
    from popdist_py.pods.folder import pod_folders

    with requested("remove", "pod", name):
        pod_folders.remove_pod(pod_folders.pods_root(os.environ), name, force=force)


@object_command(
    "serve",
    "serve --pod lab",
    "serve --pod lab --host 10.1.3.101 --port 8090",
)
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="The address on which the server listens.",
)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port on which the server listens. Port 0 picks a free port.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log every request.")
def serve_pod(*, host: str, port: int, verbose: bool) -> int:
    """Serve a pod of this machine to several hosts until Ctrl-C.

    Clients need the token in the file "token" of the pod's folder. Clients send the token over
    plain HTTP, so connect clients on other hosts only through a trusted network or an SSH tunnel.
    """
    from popdist_py.pods.folder.folder_store import FolderStore

    with opened_pod() as store:
        where = store.where
        if not isinstance(store, FolderStore):
            raise UsageError(
                f"serve works only with a pod of this machine, and {where} is a server"
            )
    from poprun_py.command.pods.pod_server import serve

    return serve(Path(where), host=host, port=port, verbose=verbose)
