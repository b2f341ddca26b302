"""The output formats of ``poprun-py-pod``: tables, texts and JSON of each kind of object of a pod.

An ``ObjectKind`` declares how one kind of object of a pod is read and shown. The module show_verbs
makes the commands of the verbs ``list`` and ``get`` from the ObjectKinds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from popdist_py.errors import counted
from popdist_py.pods.model.pod_errors import UnknownNameError
from popdist_py.pods.model.pod_parts import (
    Agent,
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    Pod,
    SyncType,
)
from poprun_py.command.pods.pod_snapshot import PlacedIpu, PodSnapshot, gw_routing, ild_routing
from poprun_py.display.formatting import date_text, printable
from poprun_py.display.tables import aligned_rows
from poprun_py.errors import nearest

T = TypeVar("T")
# Maps each table heading, text label or JSON key to the name of the value that is shown there. In
# the layout of a JSON document, a key may also map to another layout.
Layout = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind(Generic[T]):
    """Declares how one kind of object of a pod, such as partitions, is read and shown.

    Attributes:
        name: The name of the kind of object on the command line, in the singular.
        find_all: Returns all objects of this kind in a pod.
        values: Functions that compute a value of an object, keyed by the name of the value. A
            value without a function is an attribute of the object.
        columns: The columns of the table that ``list`` prints.
        totals: Returns the line that ``list`` prints below the table; None for no line.
        facts: The lines of the text that ``get`` prints.
        details: Returns the table that ``get`` prints below the text; None for no table.
        document: The layout of the JSON document that ``--showjson`` prints.
    """

    name: str
    find_all: Callable[[PodSnapshot], Sequence[T]]
    values: Mapping[str, Callable[[PodSnapshot, T], Any]] = field(default_factory=dict)
    columns: Layout = field(default_factory=dict)
    totals: Callable[[Sequence[T]], str] | None = None
    facts: Layout = field(default_factory=dict)
    details: Callable[[PodSnapshot, T], str] | None = None
    document: Layout

    def value(self, snapshot: PodSnapshot, item: T, name: str) -> Any:
        """Return the value of an object with the given name.

        The name ``a.b`` means the attribute ``b`` of the object's attribute ``a``. The value is
        None if ``a`` is None.
        """
        if read := self.values.get(name):
            return read(snapshot, item)
        found: Any = item
        for attribute in name.split("."):
            found = None if found is None else getattr(found, attribute)
        return found

    def find(self, snapshot: PodSnapshot, name: str) -> T:
        """Return the object of this kind with the given name.

        Raises:
            UnknownNameError: The object does not exist; the message suggests a similar name.
        """
        named = {attrgetter("name")(each): each for each in self.find_all(snapshot)}
        if name not in named:
            hint = (
                nearest(name, named) or f": poprun-py-pod list {self.name}s shows all {self.name}s"
            )
            raise UnknownNameError(f"there is no {self.name} {name!r}{hint}")
        return named[name]

    def list_text(self, snapshot: PodSnapshot, items: Sequence[T], *, as_json: bool) -> str:
        """Return the text that the verb ``list`` prints for the objects ``items``."""
        if as_json:
            return json_text([self.to_json(snapshot, each) for each in items])
        table = self.table(snapshot, items, self.columns)
        return table if self.totals is None else f"{table}\n{self.totals(items)}"

    def get_text(self, snapshot: PodSnapshot, item: T, *, as_json: bool) -> str:
        """Return the text that the verb ``get`` prints for an object, without empty values."""
        if as_json:
            return json_text(self.to_json(snapshot, item))
        lines = [f"{self.name.capitalize()} {attrgetter('name')(item)}:"]
        for label, name in self.facts.items():
            text = _text(self.value(snapshot, item, name), ", ")
            lines += [f"  {label}: {text}".rstrip()] if text else []
        if self.details is not None:
            lines += ["", self.details(snapshot, item)]
        return "\n".join(lines)

    def table(self, snapshot: PodSnapshot, items: Iterable[T], columns: Layout) -> str:
        """Return a table with the given columns and a row for each object of ``items``."""
        names = columns.values()
        rows = [[_text(self.value(snapshot, each, name), ",") for name in names] for each in items]
        return ruled_table(tuple(columns), rows)

    def to_json(
        self, snapshot: PodSnapshot, item: T, document: Layout | None = None
    ) -> dict[str, Any]:
        """Return an object's JSON document in a layout, by default in ``self.document``."""
        return {
            key: self.to_json(snapshot, item, name)
            if isinstance(name, Mapping)
            else self.value(snapshot, item, name)
            for key, name in (self.document if document is None else document).items()
        }


def _text(value: Any, separator: str) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        value = separator.join(value)
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def json_text(document: Any) -> str:
    """Return a JSON document as indented text."""
    return json.dumps(document, indent=2)


def ruled_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in V-IPU's style, with vertical bars only between the columns."""
    lines = aligned_rows([columns, *rows], " | ")
    rule = "-" * (len(lines[0]) + 1)
    heading, *shown = (f" {line}".rstrip() for line in lines)
    return "\n".join([heading, rule, *shown, *([rule] if shown else [])])


def sync_name(sync_type: SyncType) -> str:
    """Return a sync type's name on the command line: ``c2-compatible`` for ST_GS2_DEFAULT."""
    return sync_type.name.lower().replace("_", "-")


# --- the kinds of objects -----------------------------------------------------------------------


def _names(items: Iterable[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in items)


def _num_free(num_ipus: int, partitions: Iterable[Partition]) -> int:
    return num_ipus - sum(each.size for each in partitions)


def _process_text(holder: Holder) -> str:
    return f"{holder.pid} on {holder.host}"


def _attachment_json(attachment: Attachment) -> dict[str, Any]:
    holder = attachment.holder
    # The id of an attachment is left out, because a process that knows the id could release the
    # attachment's IPUs.
    return {
        "user": holder.user,
        "program": holder.program,
        "pid": holder.pid,
        "host": holder.host,
        "run_id": holder.run_id,
        "ipus": attachment.ipus,
        "since": attachment.since,
    }


# Layouts of an IPU, which the layouts of devices and partitions contain.
_HOLDER_COLUMNS = {
    "User": "attachment.holder.user", "Program": "attachment.holder.program", "PID": "process",
    "Since": "since",
}  # fmt: skip
_IPU_DOCUMENT = {
    "index": "ipu.index", "agent": "ipu.agent", "host": "ipu.host", "ipu_number": "ipu.number",
    "cluster_id": "ipu.cluster", "ipulink_domain": "ipu.domain",
}  # fmt: skip


def _device_totals(devices: Sequence[PlacedIpu]) -> str:
    num_taken = sum(each.partition is not None for each in devices)
    num_held = sum(each.attachment is not None for each in devices)
    return (
        f"{counted(len(devices), 'IPU')}: {len(devices) - num_taken} free, "
        f"{num_taken} in partitions ({num_held} in use by processes)"
    )


DEVICE: ObjectKind[PlacedIpu] = ObjectKind(
    name="device",
    find_all=PodSnapshot.devices,
    values={
        "partition_or_free": lambda _, each: each.partition.name if each.partition else "free",
        "process": lambda _, each: each.attachment and _process_text(each.attachment.holder),
        "since": lambda _, each: each.attachment and date_text(each.attachment.since),
        "holder": lambda _, each: each.attachment and _attachment_json(each.attachment),
    },
    columns={
        "IPU": "ipu.index", "Agent": "ipu.agent", "Host": "ipu.host", "IPU#": "ipu.number",
        "Cluster": "ipu.cluster", "ILD": "ipu.domain", "Partition": "partition_or_free",
        "ID": "number", **_HOLDER_COLUMNS,
    },
    totals=_device_totals,
    document={**_IPU_DOCUMENT, "partition": "partition.name", "id": "number", "holder": "holder"},
)  # fmt: skip
# The layouts of a partition's IPUs: the columns of their table, and their JSON document.
_PARTITION_COLUMNS = {
    "ID": "number", "GCD": "gcd", "ILD": "segment", "Agent": "ipu.agent", "Host": "ipu.host",
    "IPU#": "ipu.number", **_HOLDER_COLUMNS,
}  # fmt: skip
_PARTITION_DOCUMENT = {
    "id": "number", "gcd": "gcd", "ipulink_segment_id": "segment", **_IPU_DOCUMENT,
}  # fmt: skip

PARTITION: ObjectKind[Partition] = ObjectKind(
    name="partition",
    find_all=lambda snapshot: snapshot.partitions,
    values={
        "gw_routing": lambda snapshot, each: gw_routing(each, snapshot.pod),
        "ild_routing": lambda snapshot, each: ild_routing(each, snapshot.pod),
        "sync_text": lambda _, each: f"{sync_name(each.sync_type)} ({each.sync_type.value})",
        "created_text": lambda _, each: date_text(each.created),
        "ready_state": lambda _, each: f"PS_{each.state.value}",
        "operation_state": lambda _, each: f"POS_{each.operation.value}",
        "ipus": lambda snapshot, each: [
            DEVICE.to_json(snapshot, ipu, _PARTITION_DOCUMENT) for ipu in snapshot.devices_of(each)
        ],
        "holders": lambda snapshot, each: [
            _attachment_json(attachment)
            for attachment in snapshot.attachments
            if attachment.partition == each.name
        ],
    },
    columns={
        "Partition": "name", "Cluster": "cluster", "ILDs": "num_ilds", "GW Routing": "gw_routing",
        "ILD Routing": "ild_routing", "Size": "size", "GCDs": "num_gcds", "State": "state",
    },
    facts={
        "size": "size", "state": "state", "operation": "operation", "error": "error",
        "cluster": "cluster", "allocation": "allocation", "IPU-Link domains": "num_ilds",
        "GCDs": "num_gcds", "replicas": "num_replicas", "reconfigurable": "reconfigurable",
        "sync type": "sync_text", "GW routing": "gw_routing", "ILD routing": "ild_routing",
        "owner": "owner", "created": "created_text", "resets": "generation", "hosts": "hosts",
    },
    details=lambda snapshot, each: DEVICE.table(
        snapshot, snapshot.devices_of(each), _PARTITION_COLUMNS
    ),
    document={
        "partition": {
            "id": "name",
            "spec": {
                "size": "size", "allocation_id": "allocation", "cluster_id": "cluster",
                "num_ipulink_segments": "num_ilds", "ipulink_routing_type": "ild_routing",
                "gw_routing_type": "gw_routing", "sync_type": "sync_type", "num_gcds": "num_gcds",
                "num_replicas": "num_replicas", "reconfigurable": "reconfigurable",
                "ipus": "ipus",
            },
            "status": {
                "ready_state": "ready_state", "operation_state": "operation_state",
                "error": "error", "num_resets": "generation",
            },
            "owner": "owner",
            "created": "created",
            "holders": "holders",
        }
    },
)  # fmt: skip


def _values_of_agents(kind: str) -> dict[str, Callable[[PodSnapshot, Any], Any]]:
    """Return functions that compute values of clusters and allocations from their agents."""

    def partitions(snapshot: PodSnapshot, item: Any) -> list[Partition]:
        return [each for each in snapshot.partitions if getattr(each, kind) == item.name]

    return {
        "num_ipus": lambda snapshot, item: snapshot.num_ipus(item.agents),
        "num_free_ipus": lambda snapshot, item: _num_free(
            snapshot.num_ipus(item.agents), partitions(snapshot, item)
        ),
        "partitions": lambda snapshot, item: _names(partitions(snapshot, item)),
    }


def _domains_json(snapshot: PodSnapshot, cluster: Cluster) -> list[dict[str, Any]]:
    ipus = [ipu for ipu in snapshot.pod.ipus() if ipu.cluster == cluster.name]
    return [
        {
            "ipus": [
                DEVICE.to_json(snapshot, PlacedIpu(ipu), _IPU_DOCUMENT)
                for ipu in ipus
                if ipu.domain == domain
            ]
        }
        for domain in range(cluster.num_ilds)
    ]


CLUSTER: ObjectKind[Cluster] = ObjectKind(
    name="cluster",
    find_all=lambda snapshot: snapshot.pod.clusters,
    values={
        "gw_topology": lambda _, each: "looped" if each.is_looped else "line",
        **_values_of_agents("cluster"),
        "allocations": lambda snapshot, each: _names(
            other for other in snapshot.pod.allocations if other.cluster == each.name
        ),
        "ipu_link_domains": _domains_json,
    },
    columns={
        "Cluster": "name", "ILDs": "num_ilds", "ILD Topology": "topology",
        "Cluster Topology": "gw_topology", "IPUs": "num_ipus", "Agents": "agents",
    },
    facts={
        "IPU-Link domains": "num_ilds", "topology": "topology", "cluster topology": "gw_topology",
        "agents": "agents", "IPUs": "num_ipus", "free IPUs": "num_free_ipus",
        "allocations": "allocations", "partitions": "partitions",
    },
    document={
        "id": "name",
        "spec": {
            "agents": "agents", "topology": "topology", "cluster_topology": "gw_topology",
            "ipu_link_domains": "ipu_link_domains",
        },
    },
)  # fmt: skip


ALLOCATION: ObjectKind[Allocation] = ObjectKind(
    name="allocation",
    find_all=lambda snapshot: snapshot.pod.allocations,
    values=_values_of_agents("allocation"),
    columns={"Allocation ID": "name", "Agents": "agents"},
    facts={
        "cluster": "cluster", "agents": "agents", "IPUs": "num_ipus",
        "free IPUs": "num_free_ipus", "partitions": "partitions",
    },
    document={"id": "name", "spec": {"cluster_id": "cluster", "agents": "agents"}},
)  # fmt: skip


def _cluster_of(snapshot: PodSnapshot, agent: Agent) -> str | None:
    clusters = snapshot.pod.clusters
    return next((each.name for each in clusters if agent.name in each.agents), None)


AGENT: ObjectKind[Agent] = ObjectKind(
    name="agent",
    find_all=lambda snapshot: snapshot.pod.agents,
    values={
        "cluster": _cluster_of,
        "num_free_ipus": lambda snapshot, each: (
            each.num_ipus
            - sum(ipu.agent == each.name for other in snapshot.partitions for ipu in other.ipus)
        ),
        "allocations": lambda snapshot, each: _names(
            other for other in snapshot.pod.allocations if each.name in other.agents
        ),
        "partitions": lambda snapshot, each: _names(
            other
            for other in snapshot.partitions
            if any(ipu.agent == each.name for ipu in other.ipus)
        ),
    },
    columns={"Agent": "name", "Host": "host", "IPUs": "num_ipus", "Cluster": "cluster"},
    facts={
        "host": "host", "IPUs": "num_ipus", "free IPUs": "num_free_ipus", "cluster": "cluster",
        "allocations": "allocations", "partitions": "partitions",
    },
    document={
        "id": "name",
        "spec": {"host": "host", "num_ipus": "num_ipus", "cluster_id": "cluster"},
    },
)  # fmt: skip


class IpuAttribute(NamedTuple):
    """One attribute of one IPU, as ``list ipu-attrs`` shows it."""

    agent: str
    ipu: int
    attribute: str
    value: str


def _attributes(snapshot: PodSnapshot) -> list[IpuAttribute]:
    partitions = {ipu.index: each.name for each in snapshot.partitions for ipu in each.ipus}
    return [
        IpuAttribute(ipu.agent, ipu.number, attribute, value)
        for ipu in snapshot.pod.ipus()
        for attribute, value in (
            ("cluster", ipu.cluster),
            ("ipu-link-domain", str(ipu.domain)),
            ("partition", partitions.get(ipu.index, "free")),
        )
    ]


IPU_ATTRIBUTE: ObjectKind[IpuAttribute] = ObjectKind(
    name="ipu-attr",
    find_all=_attributes,
    columns={"Agent": "agent", "IPU": "ipu", "Attribute": "attribute", "Value": "value"},
    document={name: name for name in IpuAttribute._fields},
)

POD: ObjectKind[Pod] = ObjectKind(
    name="pod",
    find_all=lambda snapshot: (snapshot.pod,),
    values={
        "where": lambda snapshot, _: snapshot.store.where,
        "hosts": lambda _, pod: tuple(dict.fromkeys(agent.host for agent in pod.agents)),
        "num_agents": lambda _, pod: len(pod.agents),
        "num_ipus": lambda _, pod: len(pod.ipus()),
        "num_free_ipus": lambda snapshot, pod: _num_free(len(pod.ipus()), snapshot.partitions),
        "num_partitions": lambda snapshot, _: len(snapshot.partitions),
        "clusters": lambda _, pod: _names(pod.clusters),
        "allocations": lambda _, pod: _names(pod.allocations),
        "partitions": lambda snapshot, _: _names(snapshot.partitions),
        "agents_json": lambda snapshot, pod: [AGENT.to_json(snapshot, each) for each in pod.agents],
        "allocations_json": lambda snapshot, pod: [
            ALLOCATION.to_json(snapshot, each) for each in pod.allocations
        ],
    },
    facts={
        "where": "where", "hosts": "hosts", "agents": "num_agents", "clusters": "clusters",
        "allocations": "allocations", "IPUs": "num_ipus", "free IPUs": "num_free_ipus",
        "partitions": "partitions", "seconds to create": "create_seconds",
        "seconds to reset": "reset_seconds",
    },
    document={
        "id": "name", "where": "where", "num_ipus": "num_ipus", "num_free_ipus": "num_free_ipus",
        "create_seconds": "create_seconds", "reset_seconds": "reset_seconds",
        "agents": "agents_json", "clusters": "clusters", "allocations": "allocations_json",
        "partitions": "partitions",
    },
)  # fmt: skip
