"""Conversion of partitions and attachments to rows of a pod's database, and back."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from popdist_py.pods.folder.file_names import DATABASE, MOVE_AWAY
from popdist_py.pods.folder.pod_file import pod_of
from popdist_py.pods.model.pod_errors import DamagedError
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Holder,
    Ipu,
    OperationState,
    Partition,
    PartitionState,
    Pod,
    SyncType,
)


def write_pod_text(pod: Pod) -> str:
    """Return a pod as JSON text for the database.

    The JSON text contains 0 for ``create_seconds`` and ``reset_seconds``. The values of these
    fields are always taken from ``pod.toml``, so that changes there take effect immediately.
    """
    return json.dumps(asdict(replace(pod, create_seconds=0, reset_seconds=0)), sort_keys=True)


@functools.lru_cache(maxsize=8)
def read_pod_text(text: str) -> Pod:
    """Return the pod that a JSON text from the database describes.

    Raises:
        DamagedError: The text does not describe a pod.
    """
    try:
        return pod_of(json.loads(text), "the pod's database")
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DamagedError(
            f"the pod's database {DATABASE} contains an invalid description of the pod: {MOVE_AWAY}"
        ) from None


@functools.lru_cache(maxsize=8)
def _ipus_by_place(pod: Pod) -> Mapping[tuple[str, int], Ipu]:
    return {(ipu.agent, ipu.number): ipu for ipu in pod.ipus()}


def read_partitions(
    connection: sqlite3.Connection, pod: Pod, now: float, name: str | None = None
) -> tuple[Partition, ...]:
    """Return the partitions, sorted by name. With ``name``, return only the partition of this name.

    Raises:
        DamagedError: A partition in the database has unknown IPUs or values.
    """
    where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
    rows = connection.execute(f"SELECT * FROM partitions{where} ORDER BY name", values).fetchall()
    places: dict[str, list[tuple[str, int]]] = {row["name"]: [] for row in rows}
    where = where.replace("name", "partition")
    order = "ORDER BY partition, position"
    for row in connection.execute(f"SELECT * FROM partition_ipus{where} {order}", values):
        places.setdefault(row["partition"], []).append((row["agent"], row["number"]))
    known = _ipus_by_place(pod)
    try:
        return tuple(
            _partition(row, tuple(known[place] for place in places[row["name"]]), now)
            for row in rows
        )
    except (KeyError, ValueError) as error:
        raise DamagedError(
            f"the pod's database {DATABASE} contains a partition with an unknown IPU or value "
            f"({error}): {MOVE_AWAY}"
        ) from None


def _partition(row: sqlite3.Row, ipus: tuple[Ipu, ...], now: float) -> Partition:
    # If the clock was set back to a time before ``began``, the partition is ACTIVE. Without this
    # rule, the partition could stay PENDING for hours.
    pending = row["began"] <= now < row["ready_at"]
    if row["error"]:
        state, operation = PartitionState.ERROR, OperationState.FAILED
    elif pending:
        state, operation = PartitionState.PENDING, OperationState(row["operation"])
    else:
        state, operation = PartitionState.ACTIVE, OperationState.IDLE
    return Partition(
        name=row["name"],
        cluster=row["cluster"],
        allocation=row["allocation"],
        ipus=ipus,
        num_gcds=row["num_gcds"],
        num_ilds=row["num_ilds"],
        num_replicas=row["num_replicas"],
        reconfigurable=bool(row["reconfigurable"]),
        sync_type=SyncType(row["sync_type"]),
        owner=row["owner"],
        created=row["created"],
        state=state,
        operation=operation,
        error=row["error"],
        generation=row["generation"],
    )


def add_partition(connection: sqlite3.Connection, partition: Partition, ready_at: float) -> None:
    """Write a new partition with its IPUs.

    The partition is PENDING from ``created`` to ``ready_at``.
    """
    connection.execute(
        f"INSERT INTO partitions VALUES ({_marks(15)})",
        (
            partition.name,
            partition.cluster,
            partition.allocation,
            partition.num_gcds,
            partition.num_ilds,
            partition.num_replicas,
            partition.reconfigurable,
            str(partition.sync_type),
            partition.owner,
            partition.created,
            str(OperationState.CREATING),
            partition.created,
            ready_at,
            "",
            partition.generation,
        ),
    )
    connection.executemany(
        "INSERT INTO partition_ipus VALUES (?, ?, ?, ?)",
        [(ipu.agent, ipu.number, partition.name, i) for i, ipu in enumerate(partition.ipus)],
    )


def add_attachment(
    connection: sqlite3.Connection,
    attachment: Attachment,
    *,
    lock: str | None,
    renewed_until: float | None,
) -> None:
    """Write an attachment to the database.

    Give either ``lock``, the name of the store's lock file, or ``renewed_until``, the end of the
    lease.
    """
    holder = attachment.holder
    connection.execute(
        f"INSERT INTO attachments VALUES ({_marks(10)})",
        (
            attachment.id,
            attachment.partition,
            holder.host,
            holder.pid,
            holder.user,
            holder.program,
            holder.run_id,
            attachment.since,
            lock,
            renewed_until,
        ),
    )
    connection.executemany(
        "INSERT INTO attached_ipus VALUES (?, ?, ?)",
        [(attachment.partition, ipu, attachment.id) for ipu in attachment.ipus],
    )


def read_attachments(
    connection: sqlite3.Connection, partition: str | None = None
) -> tuple[Attachment, ...]:
    """Return the attachments of one partition or of all partitions, oldest first.

    The returned attachments have empty ids.
    """
    where, values = ("", ()) if partition is None else (" WHERE partition = ?", (partition,))
    ipus: dict[str, list[int]] = {}
    for row in connection.execute(f"SELECT * FROM attached_ipus{where} ORDER BY ipu", values):
        ipus.setdefault(row["attachment"], []).append(row["ipu"])
    rows = connection.execute(f"SELECT * FROM attachments{where} ORDER BY since, id", values)
    return tuple(
        Attachment(
            id="",
            partition=row["partition"],
            ipus=tuple(ipus.get(row["id"], ())),
            holder=Holder(
                host=row["host"],
                pid=row["pid"],
                user=row["user"],
                program=row["program"],
                run_id=row["run_id"],
            ),
            since=row["since"],
        )
        for row in rows
    )


def taken_ipus(attachments: Sequence[Attachment]) -> frozenset[int]:
    """Return the numbers of all IPUs in the attachments of one partition."""
    return frozenset(ipu for attachment in attachments for ipu in attachment.ipus)


def _marks(number: int) -> str:
    return ", ".join("?" * number)
