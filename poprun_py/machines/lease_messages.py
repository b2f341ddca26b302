"""Texts about leases and waiting jobs, for messages and for ``--print-leases``."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from popdist_py.errors import counted
from poprun_py.display.formatting import numbered, ranges_text
from poprun_py.display.tables import aligned_rows
from poprun_py.machines.lease_files import LeaseRecord, QueueRecord, Record
from poprun_py.machines.lease_sharing import cpus_of
from poprun_py.machines.leases import user_name

_MAX_LISTED = 4
# The most characters of an error text about cores: with "poprun-py: error: ", a line has 160.
_MAX_REFUSAL = 142
# The error text of a job that has waited ends with the option that limited the wait.
_MAX_WAIT_OPTION = 54
# Longer names of runs and programs, and longer lists of CPUs, are cut in warnings and errors.
_MAX_NAME, _MAX_CPUS = 24, 20
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
        f"{job_text(each)} has held {numbered('CPU', each.cpus)} since {_clock(each.since)}"
        for each in leases[:_MAX_LISTED]
    ]
    more = len(leases) - _MAX_LISTED
    return ", ".join(jobs) + (
        f", and {counted(more, 'more job')} (--print-leases lists all)" if more > 0 else ""
    )


def sharing_text(
    leases: Sequence[LeaseRecord],
    cpus: Collection[int] | None = None,
    *,
    host: str = "",
    has_advice: bool = False,
) -> str:
    """Return the warning of a job that shares CPUs with the jobs of ``leases``.

    Args:
        leases: The leases that name CPUs of the job; at least one.
        cpus: The CPUs of the job; None if ``leases`` is all that is known.
        host: The host of the CPUs; empty for this machine.
        has_advice: Whether the warning names the options with which the job does not share CPUs.
    """
    held = cpus_of(leases)
    shared = held if cpus is None else held.intersection(cpus)
    advice = (
        "; to avoid sharing, give --share-cores no or --wait-for-resources" if has_advice else ""
    )
    return f"this job shares {_cpus_text(shared, host)} with {_first_of(leases)}{advice}"


def refusal_text(
    leases: Sequence[LeaseRecord],
    queue: Sequence[QueueRecord],
    *,
    host: str = "",
    free: Collection[int] = (),
    has_waited: bool = False,
) -> str:
    """Return the error text of a job that gets no CPUs, with the remedy first.

    Args:
        leases: The leases of the other jobs.
        queue: The jobs that are ahead of the job in the queue for CPUs.
        host: The host of the CPUs; empty for this machine.
        free: The CPUs that no job holds, if they are known.
        has_waited: Whether the job has waited for CPUs as long as it may.
    """
    text = "this job got no CPUs; add --share-cores yes or --wait-for-resources: "
    if has_waited:
        # The text must be short, because the option that limited the wait follows.
        text = "add --share-cores yes: "
    more = len(queue or leases) - 1
    if queue:
        of_host = f" of host {_cut(host)}" if host else ""
        text += f"{_holder_text(queue[0])} is ahead in the queue for CPUs{of_host}"
    elif leases:
        text += f"{_holder_text(leases[0])} holds {_cpus_text(leases[0].cpus, host)}"
    else:
        text += "no other job holds CPUs now"
    additions = (
        f"; {_cpus_text(free)} {'is' if len(free) == 1 else 'are'} free" if free else "",
        f"; {counted(more, 'more job')}: --print-leases" if more > 0 else "",
    )
    limit = _MAX_REFUSAL - _MAX_WAIT_OPTION if has_waited else _MAX_REFUSAL
    for addition in additions:
        if len(text + addition) <= limit:
            text += addition
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _first_of(jobs: Sequence[Record]) -> str:
    more = f" and {counted(len(jobs) - 1, 'more job')}" if len(jobs) > 1 else ""
    return f"{_holder_text(jobs[0])}{more}"


def _holder_text(record: Record) -> str:
    """Return a short text such as ``run R (pid 7)``, or ``ann's run R (pid 7)`` of other users."""
    own = (str(os.geteuid()), user_name(str(os.geteuid())))
    user = "" if record.user in own else f"{_cut(user_name(record.user))}'s "
    job = record.job
    name = f"run {_cut(job.run_id)}" if job.run_id else _cut(job.program or "program")
    return f"{user}{name} (pid {job.pid})"


def _cpus_text(cpus: Collection[int], host: str = "") -> str:
    of_host = f" of host {_cut(host)}" if host else ""
    text = numbered("CPU", cpus)
    return f"{text if len(text) <= _MAX_CPUS else f'{len(cpus)} CPUs'}{of_host}"


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."


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
        kinds = {"shared": lease.is_shared, "shareable": lease.is_shareable}
        shared = next((f" ({kind})" for kind, is_so in kinds.items() if is_so), "")
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
                "shareable": each.is_shareable,
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
