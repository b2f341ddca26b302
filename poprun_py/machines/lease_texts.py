"""Who holds what and who waits, in words: sentences, a table, JSON. Only text is made here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from popdist_py.errors import plural
from poprun_py.machines.lease_book import user_name
from poprun_py.machines.lease_values import Holding, Waiter
from poprun_py.machines.leases_elsewhere import Rivals
from poprun_py.machines.sysfs import format_cpu_list

WAYS_OUT = (
    "take fewer with --cores-per-instance, wait with --wait-for-resources, or share them with "
    "--share-cores yes"
)

_MOST_NAMED = 4
_DAY_SECONDS = 86_400
_COLUMNS = ("job", "user", "pid", "program", "CPUs", "NUMA nodes", "since")
_WAITS = "waits"


def who(entry: Holding | Waiter) -> str:
    """Return the name of a job: ``ann's train.py (run R, pid 7)``."""
    holder = entry.holder
    run = f"run {holder.run_id}, " if holder.run_id else ""
    return f"{user_name(entry.user)}'s {holder.program or 'program'} ({run}pid {holder.pid})"


def cpus_text(cpus: Sequence[int]) -> str:
    """Return CPUs with their noun: ``CPU 3`` or ``CPUs 0-2``."""
    return f"{plural('CPU', len(cpus))} {format_cpu_list(cpus)}"


def holders_text(holdings: Sequence[Holding]) -> str:
    """Return who holds which CPUs since when, in one line."""
    said = [
        f"{who(each)} has {cpus_text(each.cpus)} since {_clock(each.since)}"
        for each in holdings[:_MOST_NAMED]
    ]
    more = len(holdings) - _MOST_NAMED
    return ", ".join(said) + (f", and {more} more (--print-leases)" if more > 0 else "")


def sharing_text(cores: str, holdings: Sequence[Holding]) -> str:
    """Return the warning of a job that runs on cores of others, such as ``cores of host n``."""
    return f"{cores} are shared with other jobs, which slows all of them: {holders_text(holdings)}"


def refusal_on(host: str, rivals: Rivals) -> str:
    """Return why a job cannot have its CPUs of another host, and the ways out."""
    reasons = [holders_text(rivals.holdings)] if rivals.holdings else []
    if rivals.waiters:
        more = f" with {len(rivals.waiters) - 1} more" if len(rivals.waiters) > 1 else ""
        reasons.append(f"{who(rivals.waiters[0])} waits for CPUs{more} in front of this job")
    return f"too few CPUs of host {host} are free: {'; '.join(reasons)}; {WAYS_OUT}"


def _clock(since: float) -> str:
    form = "%H:%M:%S" if 0 <= time.time() - since < _DAY_SECONDS else "%Y-%m-%d %H:%M"
    try:
        return time.strftime(form, time.localtime(since))
    except (ValueError, OverflowError, OSError):
        return "?"


def table(holdings: Sequence[Holding], waiters: Sequence[Waiter]) -> str:
    """Return a row for each job that holds or waits, those that wait in their order."""
    rows = [_COLUMNS]
    for holding in holdings:
        shared = " (shared)" if holding.is_shared else ""
        lists = (format_cpu_list(holding.cpus) + shared, format_cpu_list(holding.numa_nodes))
        rows.append((*_row(holding), *lists, _clock(holding.since)))
    for place, waiter in enumerate(waiters, 1):
        rows.append((*_row(waiter), f"{_WAITS} ({place})", "-", _clock(waiter.since)))
    if len(rows) == 1:
        return "no job holds CPUs of this machine"
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(entry: Holding | Waiter) -> tuple[str, str, str, str]:
    holder = entry.holder
    return holder.run_id or "-", user_name(entry.user), str(holder.pid), holder.program or "-"


def document(holdings: Sequence[Holding], waiters: Sequence[Waiter]) -> dict[str, Any]:
    """Return the same as JSON values; times are in seconds since the epoch."""
    return {
        "jobs": [
            {
                **_described(each),
                "cpus": list(each.cpus),
                "numa_nodes": list(each.numa_nodes),
                "shared": each.is_shared,
            }
            for each in holdings
        ],
        "waiting": [_described(each) for each in waiters],
    }


def _described(entry: Holding | Waiter) -> dict[str, Any]:
    return {
        "run_id": entry.holder.run_id,
        "user": user_name(entry.user),
        "pid": entry.holder.pid,
        "program": entry.holder.program,
        "since": entry.since,
    }
