"""The class FolderStore, which reads and changes a pod in a folder of this machine.

The folder contains a SQLite database in WAL mode. The folder must be on a local disk, because WAL
mode uses shared memory and file locks of the kernel.
"""

from __future__ import annotations

import contextlib
import copy
import math
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from popdist_py.errors import are, counted, plural
from popdist_py.pods.folder import database_rows
from popdist_py.pods.folder.file_names import DATABASE, POD_FILE
from popdist_py.pods.folder.holder_locks import HolderLock, is_alive, own_locks, remove_stale_files
from popdist_py.pods.folder.pod_database import (
    check_folder,
    check_integrity,
    make_database,
    transaction,
)
from popdist_py.pods.folder.pod_file import read_pod
from popdist_py.pods.model.ipu_choice import place_partition
from popdist_py.pods.model.partition_rules import check_request, free_ipus, ipu_list
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    NameTakenError,
    NotAllowedError,
    UnknownNameError,
    check_known,
)
from popdist_py.pods.model.pod_parts import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    OperationState,
    Partition,
    PartitionRequest,
    PartitionState,
    Pod,
)
from popdist_py.pods.model.pod_rules import check_allocation, check_cluster
from popdist_py.pods.model.pod_store import own_user


@dataclass(slots=True)
class _Shared:
    """The state that a store shares with its copies for other users (see ``with_user``)."""

    lock: HolderLock
    ends_leases: bool = False
    # The last time at which the server was known to be running. Leases that expire after this time
    # are kept.
    last_run: float = math.inf


class FolderStore:
    """A pod store that keeps a pod in a folder.

    Several threads may use one store. Forked children may use the store too. Every call first
    releases the IPUs of processes that have ended.
    """

    where: str
    user: str

    def __init__(
        self, folder: Path, *, user: str | None = None, busy_timeout: float = 30.0
    ) -> None:
        """Open the pod in a folder; make its database if the database does not exist.

        Args:
            folder: The folder with ``pod.toml``.
            user: The user who makes the calls; by default the user of this process.
            busy_timeout: The time to wait for other processes that write, in seconds.

        Raises:
            PodError: The folder is not a pod, or another user owns it or can change it.
            DamagedError: The description or the database of the pod cannot be read. Both remain
                unchanged.
        """
        self.where = str(folder)
        self.user = own_user() if user is None else user
        self._folder = folder.absolute()
        self._busy_timeout = busy_timeout
        check_folder(self._folder)
        self._description = read_pod(self._folder / POD_FILE)
        text = database_rows.write_pod_text(self._description)
        if not (self._folder / DATABASE).exists():
            make_database(self._folder, text)
        check_integrity(self._folder, busy_timeout)
        self._shared = _Shared(HolderLock(self._folder))
        self._apply_description(text)

    def _apply_description(self, text: str) -> None:
        """Copy changes of ``pod.toml`` to the database, unless the pod has partitions."""
        with self._transaction() as connection:
            described = connection.execute("SELECT described FROM layout").fetchone()[0]
            used = connection.execute("SELECT 1 FROM partitions LIMIT 1").fetchone()
            if described != text and used is None:
                connection.execute("UPDATE layout SET described = ?, pod = ?", (text, text))

    def with_user(self, user: str) -> FolderStore:
        """Return a store of the same pod for the calls of another user.

        The two stores share one lock, so closing either store closes both.
        """
        view = copy.copy(self)
        view.user = user
        return view

    def pod(self) -> Pod:
        """Return the pod without its partitions (see ``PodStore``)."""
        with self._transaction() as connection:
            return self._pod(connection)

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, sorted by name (see ``PodStore``)."""
        with self._transaction() as connection:
            return self._partitions(connection)

    def partition(self, name: str) -> Partition:
        """Return the current state of one partition (see ``PodStore``)."""
        with self._transaction() as connection:
            return self._partition(connection, name)

    def create_partition(self, request: PartitionRequest) -> Partition:
        """Make a partition of free IPUs (see ``PodStore``)."""
        check_request(request)
        with self._transaction() as connection:
            partitions = self._partitions(connection)
            if request.name in {each.name for each in partitions}:
                raise NameTakenError(
                    f"a partition named {request.name} already exists: choose another name, or "
                    "remove that partition first"
                )
            now = time.time()
            made = place_partition(
                self._pod(connection), partitions, request, owner=self.user, created=now
            )
            database_rows.add_partition(connection, made, now + self._description.create_seconds)
            return self._partition(connection, request.name)

    def reset_partition(self, name: str) -> Partition:
        """Reset a partition to its initial state (see ``PodStore``)."""
        with self._transaction() as connection:
            self._partition(connection, name)
            _refuse_held(name, database_rows.read_attachments(connection, name), "reset")
            now = time.time()
            connection.execute(
                "UPDATE partitions SET operation = ?, began = ?, ready_at = ?, error = '', "
                "generation = generation + 1 WHERE name = ?",
                (
                    str(OperationState.RESETTING),
                    now,
                    now + self._description.reset_seconds,
                    name,
                ),
            )
            return self._partition(connection, name)

    def fail_partition(self, name: str, reason: str) -> Partition:
        """Put a partition into the state ERROR (see ``PodStore``)."""
        line = " ".join(reason.split()) or "no reason was given"
        with self._transaction() as connection:
            self._partition(connection, name)
            connection.execute("UPDATE partitions SET error = ? WHERE name = ?", (line, name))
            return self._partition(connection, name)

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Remove a partition and free its IPUs (see ``PodStore``)."""
        with self._transaction() as connection:
            partition = self._partition(connection, name)
            if not force:
                if partition.owner != self.user:
                    raise NotAllowedError(
                        f"partition {name} belongs to user {partition.owner}, not to {self.user}: "
                        f"ask {partition.owner} to remove the partition, or remove it with --force"
                    )
                _refuse_held(name, database_rows.read_attachments(connection, name), "removed")
            connection.execute("DELETE FROM partitions WHERE name = ?", (name,))

    def create_cluster(self, cluster: Cluster) -> None:
        """Make a cluster of agents (see ``PodStore``)."""
        with self._transaction() as connection:
            pod = self._pod(connection)
            check_cluster(pod, cluster)
            _set_pod(connection, replace(pod, clusters=(*pod.clusters, cluster)))

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster (see ``PodStore``)."""
        with self._transaction() as connection:
            pod = self._pod(connection)
            check_known("cluster", name, [each.name for each in pod.clusters])
            users = [each.name for each in pod.allocations if each.cluster == name]
            if users:
                raise InUseError(
                    f"cluster {name} has the allocations {', '.join(users)}: remove these "
                    "allocations first"
                )
            left = tuple(each for each in pod.clusters if each.name != name)
            _set_pod(connection, replace(pod, clusters=left))

    def create_allocation(self, allocation: Allocation) -> None:
        """Make an allocation of agents (see ``PodStore``)."""
        with self._transaction() as connection:
            pod = self._pod(connection)
            check_allocation(pod, allocation)
            _set_pod(connection, replace(pod, allocations=(*pod.allocations, allocation)))

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation (see ``PodStore``)."""
        with self._transaction() as connection:
            pod = self._pod(connection)
            check_known("allocation", name, [each.name for each in pod.allocations])
            users = [each.name for each in self._partitions(connection) if each.allocation == name]
            if users:
                raise InUseError(
                    f"allocation {name} has the partitions {', '.join(users)}: remove these "
                    "partitions first"
                )
            left = tuple(each for each in pod.allocations if each.name != name)
            _set_pod(connection, replace(pod, allocations=left))

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        """Attach IPUs of a partition to ``holder`` (see ``PodStore``).

        The attachment lasts until ``detach`` or ``close``, or until this process ends.
        """
        with self._transaction() as connection:
            attachment = self._attachment(connection, partition, num_ipus, holder, ipus)
            lock = self._shared.lock.take()
            database_rows.add_attachment(connection, attachment, lock=lock, renewed_until=None)
            return attachment

    def attach_renewed(
        self,
        partition: str,
        num_ipus: int,
        holder: Holder,
        *,
        ipus: Sequence[int] | None = None,
        seconds: float,
    ) -> Attachment:
        """Attach IPUs to a holder on another host.

        The attachment ends unless the holder renews it within ``seconds``.
        """
        with self._transaction() as connection:
            attachment = self._attachment(connection, partition, num_ipus, holder, ipus)
            until = time.monotonic() + seconds
            database_rows.add_attachment(connection, attachment, lock=None, renewed_until=until)
            return attachment

    def renew(self, attachment_id: str, seconds: float) -> None:
        """Extend a lease until ``seconds`` from now.

        Raises:
            UnknownNameError: The lease has ended.
        """
        with self._transaction() as connection:
            done = connection.execute(
                "UPDATE attachments SET renewed_until = ? WHERE id = ? AND lock IS NULL",
                (time.monotonic() + seconds, attachment_id),
            )
            if done.rowcount == 0:
                raise UnknownNameError(
                    "the lease of these IPUs has ended, so other processes may use the IPUs: "
                    "attach the IPUs again"
                )

    def renew_all(self, seconds: float) -> None:
        """Set the end of all leases to ``seconds`` from now.

        A server calls this method when it starts. Only the store of a running server ends leases,
        so leases do not end while the server is stopped.
        """
        # This transaction must not end the leases that expired while the server was stopped,
        # because clients could not renew them.
        self._shared.ends_leases = False
        with self._transaction() as connection:
            connection.execute(
                "UPDATE attachments SET renewed_until = ? WHERE lock IS NULL",
                (time.monotonic() + seconds,),
            )
        self._shared.ends_leases = True

    def note_run(self, now: float) -> None:
        """Record that the server is running at the time ``now``.

        The store ends only leases that expired before ``now``. While the server is suspended,
        clients cannot renew their leases. A request that arrives during the suspension must not end
        leases that clients could not renew.
        """
        self._shared.last_run = now

    def detach(self, attachment: Attachment) -> None:
        """Release the IPUs of the attachment with this id (see ``PodStore``)."""
        with self._transaction() as connection:
            # The GLOB pattern matches only locks of this process, so a forked child cannot release
            # IPUs of its parent.
            connection.execute(
                "DELETE FROM attachments WHERE id = ? AND (lock IS NULL OR lock GLOB ?)",
                (attachment.id, own_locks()),
            )

    def attachments(self) -> tuple[Attachment, ...]:
        """Return all attachments, without their ids (see ``PodStore``)."""
        with self._transaction() as connection:
            return database_rows.read_attachments(connection)

    def close(self) -> None:
        """Close this store, and release the IPUs that it attached without a lease."""
        self._shared.lock.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Release the IPUs of processes that have ended, and yield a connection for writing."""
        with transaction(self._folder, self._busy_timeout) as connection:
            self._release_ended(connection)
            yield connection

    def _release_ended(self, connection: sqlite3.Connection) -> None:
        locks = connection.execute("SELECT DISTINCT lock FROM attachments WHERE lock IS NOT NULL")
        for (lock,) in locks.fetchall():
            if not is_alive(self._folder, lock):
                connection.execute("DELETE FROM attachments WHERE lock = ?", (lock,))
        remove_stale_files(self._folder)
        if self._shared.ends_leases:
            connection.execute(
                "DELETE FROM attachments WHERE renewed_until < ?",
                (min(time.monotonic(), self._shared.last_run),),
            )

    def _pod(self, connection: sqlite3.Connection) -> Pod:
        return replace(
            database_rows.read_pod_text(connection.execute("SELECT pod FROM layout").fetchone()[0]),
            create_seconds=self._description.create_seconds,
            reset_seconds=self._description.reset_seconds,
        )

    def _partitions(self, connection: sqlite3.Connection) -> tuple[Partition, ...]:
        return database_rows.read_partitions(connection, self._pod(connection), time.time())

    def _partition(self, connection: sqlite3.Connection, name: str) -> Partition:
        partitions = self._partitions(connection)
        check_known("partition", name, [each.name for each in partitions])
        return next(each for each in partitions if each.name == name)

    def _attachment(
        self,
        connection: sqlite3.Connection,
        name: str,
        num_ipus: int,
        holder: Holder,
        ipus: Sequence[int] | None,
    ) -> Attachment:
        """Choose free IPUs of an ACTIVE partition, and return an attachment of these IPUs."""
        partition = self._partition(connection, name)
        if partition.state is PartitionState.ERROR:
            raise InvalidRequestError(
                f"partition {name} is in the state ERROR ({partition.error}): reset the partition "
                f"with poprun-py-pod reset partition {name}"
            )
        held = database_rows.read_attachments(connection, name)
        chosen = free_ipus(partition, num_ipus, database_rows.taken_ipus(held), ipus)
        if partition.state is PartitionState.PENDING:
            raise InUseError(
                f"partition {name} is not ready yet (state {partition.state}, operation "
                f"{partition.operation}): try again later"
            )
        if not chosen:
            free = partition.size - len(database_rows.taken_ipus(held))
            count = num_ipus if ipus is None else len(ipus)
            names = f"{plural('IPU', count)} {ipu_list(ipus or ())}"
            fault = (
                f"partition {name} does not have a free group of {counted(count, 'IPU')}"
                if ipus is None
                else f"{names} of partition {name} {are(count)} in use"
            )
            raise InUseError(
                f"{fault} ({free} of {partition.size} IPUs {are(free)} free): wait for the "
                f"processes that hold the IPUs, or end these processes; {_holders(held)}"
            )
        return Attachment(
            id=secrets.token_hex(16),
            partition=name,
            ipus=chosen,
            holder=holder,
            since=time.time(),
        )


def _set_pod(connection: sqlite3.Connection, pod: Pod) -> None:
    connection.execute("UPDATE layout SET pod = ?", (database_rows.write_pod_text(pod),))


def _refuse_held(name: str, held: Sequence[Attachment], done: str) -> None:
    if held:
        # The message says that the removal of a partition can be forced. A process on another host
        # may have ended while the server was stopped. The IPUs of that process are still attached.
        force = ", or use --force" if done == "removed" else ""
        raise InUseError(
            f"wait until no process uses the IPUs of partition {name}, or end these processes"
            f"{force}: a partition cannot be {done} while its IPUs are in use; {_holders(held)}"
        )


def _holders(held: Sequence[Attachment]) -> str:
    """Return a text that names the first three holders of IPUs, for an error message."""
    shown = [
        f"{each.holder.program} (process {each.holder.pid} of {each.holder.user} on "
        f"{each.holder.host}) holds {counted(len(each.ipus), 'IPU')}"
        for each in held[:3]
    ]
    more = len(held) - 3
    verb = "holds" if more == 1 else "hold"
    rest = [f"{more} more {plural('process', more)} {verb} IPUs"] if more > 0 else []
    return ", ".join(shown + rest)
