"""The CPUs on which a launch runs beside other jobs, and the jobs with which it shares CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from poprun_py.machines.lease_files import LeaseRecord
from poprun_py.machines.lease_sharing import SharingRule, blocking, cpus_of, overlapping
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import HostShare, is_unplaced


def sharing_rule(config: LaunchConfig) -> SharingRule:
    """Return the jobs with which a launch may share CPUs, as --share-cores and other options say.

    With --share-cores auto, a launch that waits for cores or asks for cores does not share CPUs
    with all jobs. If the launch binds no instances, its request for cores only sets its threads.
    """
    if config.share_cores != "auto":
        may_share = config.share_cores == "yes"
        return SharingRule(with_all=may_share, with_shareable=may_share)
    is_strict = asks_for_cores(config) and not is_unplaced(config)
    return SharingRule(
        with_all=config.wait_for_resources is None and not is_strict, with_shareable=True
    )


def asks_for_cores(config: LaunchConfig) -> bool:
    """Return whether the options ask for a number of cores.

    The number of instances is not such a request: instances can share cores.
    """
    return config.cores_per_instance is not None or config.reserve_cores > 0


def has_advice(config: LaunchConfig) -> bool:
    """Return whether a warning about shared CPUs names the options that avoid sharing."""
    return config.share_cores == "auto" and sharing_rule(config).with_all


class OtherLeases(NamedTuple):
    """The leases of other jobs on a host, as a launch sees them.

    Attributes:
        leases: The leases of the other jobs.
        is_last: Whether other jobs are ahead of the launch in the queue for CPUs.
        queued_since: The time at which the launch joined the queue.
    """

    leases: Sequence[LeaseRecord]
    is_last: bool = False
    queued_since: float = math.inf


class ChosenShare(NamedTuple):
    """The CPUs of a host on which a launch runs.

    Attributes:
        share: The CPUs of the launch; in its machines, the jobs that share the CPUs are noted.
        shared_with: The leases of the jobs that use some of these CPUs.
        is_shared: Whether the lease of the launch is a shared one.
    """

    share: HostShare
    shared_with: tuple[LeaseRecord, ...] = ()
    is_shared: bool = False


def choose_share(
    whole: HostShare,
    share_beside: Callable[[frozenset[int]], HostShare | None],
    others: OtherLeases,
    rule: SharingRule,
) -> ChosenShare | None:
    """Return the CPUs of a launch beside other jobs; None if the launch must not start now.

    Free CPUs come first, then CPUs of jobs with shareable leases. If both are too few, a launch
    that may share runs on the same CPUs as if it were alone.

    Args:
        whole: The CPUs of the launch if no other jobs were running.
        share_beside: A function that returns the CPUs for the launch beside jobs that hold the
            given CPUs; None if too few CPUs are left.
        others: The leases of the other jobs.
        rule: The jobs with which the launch may share CPUs.
    """
    if others.is_last and not rule.with_all:
        return None
    held = cpus_of(others.leases)
    share = share_beside(held)
    if share is None:
        exclusive = cpus_of(blocking(others.leases, rule, others.queued_since))
        share = share_beside(exclusive) if exclusive != held else None
    if share is None and rule.with_all:
        share = whole
    if share is None:
        return None
    shared_with = overlapping(others.leases, share.cpus)
    # Jobs ahead in the queue wait for some of these CPUs. The lease is marked as shared, so that
    # this launch does not delay them.
    return ChosenShare(
        _noting(share, shared_with), shared_with, is_shared=bool(shared_with) or others.is_last
    )


def _noting(share: HostShare, leases: Sequence[LeaseRecord]) -> HostShare:
    """Note in the machine of a share which jobs use its CPUs; its threads are planned fewer."""
    index = share.host_index
    machine = None if index is None else share.machines[index]
    if index is None or machine is None or not leases:
        return share
    jobs = tuple(frozenset(each.cpus) for each in leases)
    noted = replace(machine, sharing_jobs=jobs)
    return share._replace(machines=(*share.machines[:index], noted, *share.machines[index + 1 :]))
