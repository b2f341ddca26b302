"""Texts about leases and waiting jobs, for messages and for ``--print-leases``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from poprun_py.display.formatting import numbered, ranges_text
from poprun_py.display.tables import aligned_rows
from poprun_py.machines.lease_files import LeaseRecord, QueueRecord, Record
from poprun_py.machines.leases import user_name
from poprun_py.machines.remote_leases import OtherJobs

ADVICE = (
    "take fewer with --cores-per-instance, wait with --wait-for-resources, or share them with "
    "--share-cores yes"
)

_MAX_LISTED = 4
_DAY_SECONDS = 86_400
_COLUMNS = ("job", "user", "pid", "program", "CPUs", "NUMA nodes", "since")


def job_text(record: Record) -> str:
    """Return the description of a job, such as ``ann's train.py (run R, pid 7)``."""
    job = record.job
    run = f"run {job.run_id}, " if job.run_id else ""
    return f"{user_name(record.user)}'s {job.program or 'program'} ({run}pid {job.pid})"


def leases_text(leases: Sequence[LeaseRecord]) -> str:
    """Return one line that tells which jobs hold which CPUs, and since when."""
    jobs = [
        f"{job_text(each)} has {numbered('CPU', each.cpus)} since {_clock(each.since)}"
        for each in leases[:_MAX_LISTED]
    ]
    more = len(leases) - _MAX_LISTED
    return ", ".join(jobs) + (f", and {more} more (--print-leases)" if more > 0 else "")


def queue_text(queue: Sequence[QueueRecord]) -> str:
    """Return a text about the jobs in front of this job; ``queue`` must not be empty."""
    more = f" with {len(queue) - 1} more" if len(queue) > 1 else ""
    return f"{job_text(queue[0])} waits for CPUs{more} in front of this job"


def sharing_text(cores: str, leases: Sequence[LeaseRecord]) -> str:
    """Return the warning about shared cores; ``cores`` is a text such as ``cores of host n``."""
    return f"{cores} are shared with other jobs, which slows all of them: {leases_text(leases)}"


def refusal_text(host: str, others: OtherJobs) -> str:
    """Return the error text for a job whose CPUs on another host are not free."""
    reasons = [leases_text(others.leases)] if others.leases else []
    if others.queue:
        reasons.append(queue_text(others.queue))
    return f"too few CPUs of host {host} are free: {'; '.join(reasons)}; {ADVICE}"


def _clock(since: float) -> str:
    form = "%H:%M:%S" if 0 <= time.time() - since < _DAY_SECONDS else "%Y-%m-%d %H:%M"
    try:
        return time.strftime(form, time.localtime(since))
    except (ValueError, OverflowError, OSError):
        return "?"


def leases_table(leases: Sequence[LeaseRecord], queue: Sequence[QueueRecord]) -> str:
    """Return the table that ``--print-leases`` prints, with a row per lease and per waiting job."""
    rows = [_COLUMNS]
    for lease in leases:
        shared = " (shared)" if lease.is_shared else ""
        lists = (ranges_text(lease.cpus) + shared, ranges_text(lease.numa_nodes))
        rows.append((*_row(lease), *lists, _clock(lease.since)))
    for place, waiting in enumerate(queue, 1):
        rows.append((*_row(waiting), f"waits ({place})", "-", _clock(waiting.since)))
    if len(rows) == 1:
        return "no job holds CPUs of this machine"
    return "\n".join(line.rstrip() for line in aligned_rows(rows))


def _row(record: Record) -> tuple[str, str, str, str]:
    job = record.job
    return job.run_id or "-", user_name(record.user), str(job.pid), job.program or "-"


def leases_json(leases: Sequence[LeaseRecord], queue: Sequence[QueueRecord]) -> dict[str, Any]:
    """Return the JSON values that ``--print-leases=json`` prints, with Unix times in seconds."""
    return {
        "jobs": [
            {
                **_job_json(each),
                "cpus": list(each.cpus),
                "numa_nodes": list(each.numa_nodes),
                "shared": each.is_shared,
            }
            for each in leases
        ],
        "waiting": [_job_json(each) for each in queue],
    }


def _job_json(record: Record) -> dict[str, Any]:
    return {
        "run_id": record.job.run_id,
        "user": user_name(record.user),
        "pid": record.job.pid,
        "program": record.job.program,
        "since": record.since,
    }
