"""The verbs of ``poprun-py-pod`` that create and remove clusters and allocations."""

from __future__ import annotations

import click

from popdist_py.pods.model import Allocation, Cluster
from poprun_py.command.pods.command_grammar import NAME, ObjectName, object_command
from poprun_py.command.pods.pod_access import changed_pod, known_names
from poprun_py.command.pods.pod_objects import ALLOCATION, CLUSTER
from poprun_py.command.pods.pod_snapshot import PodSnapshot

_CLUSTER_NAME = ObjectName(known_names(CLUSTER))


def _agent_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@object_command(
    "cluster",
    "create cluster c1 --agents a1,a2,a3,a4",
    "create cluster c128 --num-ipulinkdomains 2 --topology torus --cluster-topology looped",
)
@NAME
@click.option(
    "--agents", metavar="A,B,...",
    help="The cluster's agents. Unset: all agents without a cluster.",
)  # fmt: skip
@click.option(
    "--num-ipulinkdomains", "--num-ilds", "num_ilds", type=int, default=1, metavar="N",
    show_default=True, help="The number of IPU-Link domains. Each gets the same number of agents.",
)  # fmt: skip
@click.option(
    "--topology", type=click.Choice(["mesh", "torus"]), default="mesh", show_default=True,
    help="The topology of the IPU-Links in a domain; a torus closes the loop.",
)  # fmt: skip
@click.option(
    "--cluster-topology", type=click.Choice(["line", "looped"]), default="line",
    show_default=True, help="The topology of the GW-Links between domains; looped is a ring.",
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
            members = _agent_names(agents)
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
@click.argument("name", type=_CLUSTER_NAME)
def remove_cluster(*, name: str) -> None:
    """Remove a cluster. Its allocations must be removed first."""
    with changed_pod("remove", "cluster", name) as store:
        store.remove_cluster(name)


@object_command(
    "allocation",
    "create allocation team --cluster c64 --agents a1,a2,a3,a4",
    "create allocation everybody",
)
@NAME
@click.option(
    "--cluster",
    type=_CLUSTER_NAME,
    metavar="NAME",
    help="The cluster that the agents belong to. Unset: the pod's only cluster.",
)
@click.option(
    "--agents", metavar="A,B,...",
    help="The allocation's agents. Unset: all agents of the cluster.",
)  # fmt: skip
def create_allocation(*, name: str, cluster: str | None, agents: str | None) -> None:
    """Make an allocation. Users make partitions from its agents, which belong to one cluster."""
    with changed_pod("create", "allocation", name) as store:
        snapshot = PodSnapshot(store)
        clusters = snapshot.pod.clusters
        if cluster is None and len(clusters) != 1:
            names = ", ".join(each.name for each in clusters) or "no cluster"
            raise click.UsageError(f"expected --cluster NAME: the pod has {names}")
        found = clusters[0] if cluster is None else CLUSTER.find(snapshot, cluster)
        members = found.agents if agents is None else _agent_names(agents)
        store.create_allocation(Allocation(name=name, cluster=found.name, agents=members))


@object_command("allocation")
@click.argument("name", type=ObjectName(known_names(ALLOCATION)))
def remove_allocation(*, name: str) -> None:
    """Remove an allocation. Its partitions must be removed first."""
    with changed_pod("remove", "allocation", name) as store:
        store.remove_allocation(name)
