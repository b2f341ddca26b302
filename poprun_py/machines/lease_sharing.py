"""The rule by which a job shares CPUs with the jobs that hold leases of these CPUs.

The module is part of ``machines``, because the rule of a job also travels to its other hosts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from poprun_py.machines.lease_files import LeaseRecord


class SharingRule(NamedTuple):
    """The jobs with which a launch may share CPUs.

    Attributes:
        with_all: Whether the launch may share CPUs with every job.
        with_shareable: Whether the launch may share CPUs with jobs whose leases are shareable.
    """

    with_all: bool
    with_shareable: bool


SHARES_WITH_ALL = SharingRule(with_all=True, with_shareable=True)


def cpus_of(leases: Collection[LeaseRecord]) -> frozenset[int]:
    """Return the CPUs that any of the leases names."""
    return frozenset(cpu for each in leases for cpu in each.cpus)


def overlapping(leases: Collection[LeaseRecord], cpus: Collection[int]) -> tuple[LeaseRecord, ...]:
    """Return the leases that name at least one of ``cpus``."""
    wanted = frozenset(cpus)
    return tuple(each for each in leases if not wanted.isdisjoint(each.cpus))


def blocking(
    leases: Sequence[LeaseRecord], rule: SharingRule, queued_since: float = math.inf
) -> tuple[LeaseRecord, ...]:
    """Return the leases of other jobs whose CPUs a launch may use only if it shares with all jobs.

    Args:
        leases: The leases of the other jobs.
        rule: The sharing rule of the launch.
        queued_since: The time at which the launch joined the queue for CPUs. A job that took its
            CPUs later as a sharing job does not delay the launch, because it overtook the launch.
    """
    if not rule.with_shareable:
        return tuple(leases)
    return tuple(
        each
        for each in leases
        if not each.is_shareable and not (each.is_shared and each.since > queued_since)
    )
