"""The verbs of what partitions are made of: clusters, allocations, agents, IPUs."""

from __future__ import annotations

import click

from popdist_py.pods.errors import UnknownNameError
from popdist_py.pods.values import Allocation, Cluster, Pod
from poprun_py.errors import nearest
from poprun_py.pod_tools.command_grammar import NAME, Names, action
from poprun_py.pod_tools.documents import (
    agent_document,
    allocation_document,
    cluster_document,
    device_documents,
)
from poprun_py.pod_tools.pod_access import (
    doing,
    known_names,
    opened_pod,
    print_json,
    success,
    wants_json,
)
from poprun_py.pod_tools.pod_objects import (
    agent_facts,
    agent_table,
    allocation_facts,
    allocation_table,
    attribute_rows,
    attribute_table,
    cluster_facts,
    cluster_table,
    device_table,
)
from poprun_py.terminal import print_out

_CLUSTER = Names(known_names(lambda store: [each.name for each in store.pod().clusters]))
_ALLOCATION = Names(known_names(lambda store: [each.name for each in store.pod().allocations]))
_AGENT = Names(known_names(lambda store: [each.name for each in store.pod().agents]))


def _agent_names(text: str | None) -> tuple[str, ...]:
    """Return the names between commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _checked(pod: Pod, kind: str, name: str) -> None:
    """Refuse a name that the pod does not have.

    Raises:
        UnknownNameError: there is no such object.
    """
    names = {
        "cluster": [each.name for each in pod.clusters],
        "allocation": [each.name for each in pod.allocations],
        "agent": [each.name for each in pod.agents],
    }[kind]
    if name not in names:
        hint = nearest(name, names) or f"; list {kind}s shows all"
        raise UnknownNameError(f"there is no {kind} {name!r}{hint}")


# --- clusters -----------------------------------------------------------------------------------


@action(
    "cluster",
    "create cluster c1 --agents a1,a2,a3,a4",
    "create cluster c128 --num-ipulinkdomains 2 --topology torus --cluster-topology looped",
)
@NAME
@click.option("--agents", metavar="A,B,...", help="Its agents. Unset: all that are in no cluster.")
@click.option(
    "--num-ipulinkdomains",
    "--num-ilds",
    "num_ilds",
    type=int,
    default=1,
    metavar="N",
    show_default=True,
    help="Its IPU-Link domains, of equally many agents.",
)
@click.option(
    "--topology",
    type=click.Choice(["mesh", "torus"]),
    default="mesh",
    show_default=True,
    help="How IPU-Links join a domain: a torus closes the loop.",
)
@click.option(
    "--cluster-topology",
    type=click.Choice(["line", "looped"]),
    default="line",
    show_default=True,
    help="How GW-Links join the domains: looped in a ring.",
)
def CREATE_CLUSTER(
    *, name: str, agents: str | None, num_ilds: int, topology: str, cluster_topology: str
) -> None:  # fmt: skip
    """Join agents that belong to no cluster."""
    with opened_pod() as store, doing("create", "cluster", name):
        chosen = _agent_names(agents)
        if agents is None:
            pod = store.pod()
            taken = {agent for cluster in pod.clusters for agent in cluster.agents}
            chosen = tuple(each.name for each in pod.agents if each.name not in taken)
        store.create_cluster(
            Cluster(
                name=name,
                agents=chosen,
                num_ilds=num_ilds,
                topology=topology,
                is_looped=cluster_topology == "looped",
            )
        )
    success("create", "cluster", name)


@action("clusters")
def LIST_CLUSTERS() -> None:
    """List the clusters of the pod."""
    with opened_pod() as store, doing("list", "clusters"):
        pod = store.pod()
    if wants_json():
        print_json([cluster_document(pod, each) for each in pod.clusters])
    else:
        print_out(cluster_table(pod))


@action("cluster")
@click.argument("name", type=_CLUSTER)
def GET_CLUSTER(*, name: str) -> None:
    """Show a cluster: its agents, allocations and partitions."""
    with opened_pod() as store, doing("get", "cluster", name):
        pod, partitions = store.pod(), store.partitions()
        _checked(pod, "cluster", name)
    if wants_json():
        found = next(each for each in pod.clusters if each.name == name)
        print_json(cluster_document(pod, found))
    else:
        print_out(cluster_facts(pod, name, partitions))


@action("cluster")
@click.argument("name", type=_CLUSTER)
def REMOVE_CLUSTER(*, name: str) -> None:
    """Take a cluster apart; it may have no allocations."""
    with opened_pod() as store, doing("remove", "cluster", name):
        store.remove_cluster(name)
    success("remove", "cluster", name)


# --- allocations --------------------------------------------------------------------------------


@action(
    "allocation",
    "create allocation team --cluster c64 --agents a1,a2,a3,a4",
    "create allocation everybody",
)
@NAME
@click.option("--cluster", type=_CLUSTER, metavar="NAME", help="Unset: the only cluster.")
@click.option("--agents", metavar="A,B,...", help="Its agents. Unset: all of the cluster.")
def CREATE_ALLOCATION(*, name: str, cluster: str | None, agents: str | None) -> None:
    """Let users have partitions of agents of one cluster."""
    with opened_pod() as store, doing("create", "allocation", name):
        pod = store.pod()
        if cluster is None:
            if len(pod.clusters) != 1:
                names = ", ".join(each.name for each in pod.clusters) or "no cluster"
                raise click.UsageError(f"expected --cluster NAME: the pod has {names}")
            cluster = pod.clusters[0].name
        _checked(pod, "cluster", cluster)
        joined = next(each for each in pod.clusters if each.name == cluster)
        chosen = joined.agents if agents is None else _agent_names(agents)
        store.create_allocation(Allocation(name=name, cluster=cluster, agents=chosen))
    success("create", "allocation", name)


@action("allocations")
def LIST_ALLOCATIONS() -> None:
    """List the allocations of the pod."""
    with opened_pod() as store, doing("list", "allocations"):
        pod = store.pod()
    if wants_json():
        print_json([allocation_document(each) for each in pod.allocations])
    else:
        print_out(allocation_table(pod))


@action("allocation")
@click.argument("name", type=_ALLOCATION)
def GET_ALLOCATION(*, name: str) -> None:
    """Show an allocation: its agents, its free IPUs, its partitions."""
    with opened_pod() as store, doing("get", "allocation", name):
        pod, partitions = store.pod(), store.partitions()
        _checked(pod, "allocation", name)
    if wants_json():
        found = next(each for each in pod.allocations if each.name == name)
        print_json(allocation_document(found))
    else:
        print_out(allocation_facts(pod, name, partitions))


@action("allocation")
@click.argument("name", type=_ALLOCATION)
def REMOVE_ALLOCATION(*, name: str) -> None:
    """Take an allocation away; it may have no partitions."""
    with opened_pod() as store, doing("remove", "allocation", name):
        store.remove_allocation(name)
    success("remove", "allocation", name)


# --- agents and IPUs ----------------------------------------------------------------------------


@action("agents")
def LIST_AGENTS() -> None:
    """List the agents of the pod: its IPU-Machines."""
    with opened_pod() as store, doing("list", "agents"):
        pod = store.pod()
    if wants_json():
        print_json([agent_document(pod, each) for each in pod.agents])
    else:
        print_out(agent_table(pod))


@action("agent")
@click.argument("name", type=_AGENT)
def GET_AGENT(*, name: str) -> None:
    """Show an agent: its host, its free IPUs, its partitions."""
    with opened_pod() as store, doing("get", "agent", name):
        pod, partitions = store.pod(), store.partitions()
        _checked(pod, "agent", name)
    agent = next(each for each in pod.agents if each.name == name)
    if wants_json():
        print_json(agent_document(pod, agent))
    else:
        print_out(agent_facts(pod, agent, partitions))


@action("ipu-attrs")
def LIST_ATTRIBUTES() -> None:
    """List the cluster, IPU-Link domain and partition of every IPU."""
    _show_attributes("list", None)


@action("ipu-attrs")
@click.argument("agent", type=_AGENT)
def GET_ATTRIBUTES(*, agent: str) -> None:
    """Show the attributes of the IPUs of one agent."""
    _show_attributes("get", agent)


def _show_attributes(verb: str, agent: str | None) -> None:
    with opened_pod() as store, doing(verb, "ipu-attrs", agent or ""):
        pod, partitions = store.pod(), store.partitions()
        if agent is not None:
            _checked(pod, "agent", agent)
    ipus = [ipu for ipu in pod.ipus() if agent is None or ipu.agent == agent]
    rows = attribute_rows(ipus, partitions)
    if wants_json():
        names = ("agent", "ipu", "attribute", "value")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_out(attribute_table(rows))


@action("devices")
def LIST_DEVICES() -> None:
    """List every IPU of the pod: free or taken, and by whom.

    gc-info -l lists the devices of a partition, as programs attach to them.
    """
    with opened_pod() as store, doing("list", "devices"):
        pod, partitions, attachments = store.pod(), store.partitions(), store.attachments()
    if wants_json():
        print_json(device_documents(pod, partitions, attachments))
    else:
        print_out(device_table(pod, partitions, attachments))
