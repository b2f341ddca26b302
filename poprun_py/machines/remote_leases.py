"""Leases of CPUs on remote hosts, where a process lists and takes leases for the launcher.

The launcher's requests and the hosts' answers are JSON values.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from poprun_py.machines.lease_files import (
    LeaseFolder,
    LeaseRecord,
    QueueRecord,
    Record,
    parse_record,
    printable_name,
    problem_text,
    record_text,
)
from poprun_py.machines.lease_sharing import SharingRule, blocking, cpus_of, overlapping
from poprun_py.machines.leases import (
    Lease,
    LeaseTable,
    decide_on_table,
    job_of,
    leases_folder,
    open_table,
    user_name,
)


class OtherJobs(NamedTuple):
    """The leases of other jobs on a host, and the jobs that wait for CPUs of this host."""

    leases: tuple[LeaseRecord, ...] = ()
    queue: tuple[QueueRecord, ...] = ()

    @property
    def held_cpus(self) -> frozenset[int]:
        """The CPUs of the host that other jobs hold."""
        return cpus_of(self.leases)


def list_for_launcher(environ: Mapping[str, str]) -> list[list[str]]:
    """Return the leases and waiting jobs of this host as JSON values for ``parse_other_jobs``.

    Raises:
        OSError: The leases cannot be read.
        ValueError: POPRUN_LEASES is neither ``none`` nor an absolute path.
    """
    path = leases_folder(environ)
    if path is None or not path.exists():
        return []
    with contextlib.closing(LeaseFolder(path)) as folder, open_table(folder) as table:
        others = (*table.outer_leases, *table.leases)
        waiting = table.ahead_of(None)
    return _to_json(others) + _to_json(waiting)


def take_for_launcher(
    request: Mapping[str, Any], environ: Mapping[str, str], parent: int
) -> tuple[dict[str, Any], Lease]:
    """Lease CPUs of this host for all instances of a job on this host.

    Args:
        request: A mapping with the ``cpus``, ``numa_nodes``, ``program`` and ``run_id`` of the job.
            ``sharing`` has the values of the job's ``SharingRule``, and ``is_shareable`` tells
            whether the job's lease is shareable. ``within`` is the run name of the outer job;
            empty without an outer job.
        environ: The environment variables of this process.
        parent: The process of this host from which all instances on this host descend.

    Returns:
        A pair: the answer to the launcher as JSON values, and the lease. If other jobs prevent the
        lease, the lease is empty, and ``other_jobs`` in the answer lists the other jobs. If the job
        shares CPUs, ``shared_with`` in the answer lists the other jobs that hold these CPUs. If an
        error prevents the lease, ``problem`` in the answer is the reason, and the job runs without
        a lease.
    """
    try:
        path = leases_folder(environ)
    except ValueError as error:
        return {"problem": str(error)}, Lease()
    if path is None:
        return {}, Lease()
    try:
        return _take(request, path, parent)
    except OSError as error:
        return {"problem": problem_text(error, path)}, Lease()


def _take(request: Mapping[str, Any], path: Path, parent: int) -> tuple[dict[str, Any], Lease]:
    cpus = os.sched_getaffinity(0).intersection(request["cpus"])
    if not cpus:
        return {}, Lease()
    job = job_of(parent, request["program"])._replace(run_id=request["run_id"])
    rule = SharingRule(*request["sharing"])

    def decide(table: LeaseTable) -> tuple[Lease | None, OtherJobs]:
        # The job's own lease is ignored: this host may be the launcher's host under another name.
        runs = {request["run_id"], request["within"]}
        leases, queue = _other_jobs((*table.leases, *table.ahead_of(None)), runs)
        leases = overlapping(leases, cpus)
        lease = None
        if rule.with_all or not (blocking(leases, rule) or queue):
            lease = table.take(
                job,
                tuple(cpus),
                request["numa_nodes"],
                is_shared=bool(leases or queue),
                is_shareable=request["is_shareable"],
            )
        return lease, OtherJobs(leases, queue)

    with contextlib.closing(LeaseFolder(path)) as folder:
        lease, others = decide_on_table(folder, decide)
    if lease is None:
        return {"other_jobs": _to_json((*others.leases, *others.queue))}, Lease()
    return ({"shared_with": _to_json(others.leases)} if others.leases else {}), lease


def parse_other_jobs(answer: Any, within: str) -> OtherJobs:
    """Return the other jobs on a host from the answer that the host sent to this launcher.

    Args:
        answer: The list that the host sent; invalid entries are ignored.
        within: The run name of the outer job, if an instance of an outer job launches this job;
            empty without an outer job. This job may use the CPUs of the outer job.
    """
    records = []
    for each in answer if isinstance(answer, list) else ():
        with contextlib.suppress(TypeError, ValueError):
            name, user, text = each
            records.append(
                parse_record(printable_name(name), printable_name(user), str(text).encode())
            )
    return _other_jobs((each for each in records if each is not None), {within})


def _other_jobs(records: Iterable[Record], own_runs: Collection[str]) -> OtherJobs:
    others = [e for e in records if e.job.run_id not in own_runs or not e.job.run_id]
    return OtherJobs(
        tuple(each for each in others if isinstance(each, LeaseRecord)),
        # Jobs inside an outer job are left out of the queue, because these jobs wait only for the
        # outer job's CPUs.
        tuple(each for each in others if isinstance(each, QueueRecord) and not each.outer),
    )


def _to_json(records: Iterable[Record]) -> list[list[str]]:
    # The answer has user names, because user ids may belong to different users on each host.
    return [[each.name, user_name(each.user), record_text(each)] for each in records]
