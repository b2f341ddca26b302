"""Leases of CPU cores of this machine for a job, and the search for free cores of other hosts.

Leases give different cores to jobs that run at the same time. A job chooses and leases its cores
while it holds a mutex, so that no other job can lease the same cores in between. On other hosts,
this module only queries which cores are held by other jobs. The first instance on each of these
hosts leases the host's cores when the instance starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from poprun_py.display.formatting import numbered
from poprun_py.errors import UsageError
from poprun_py.launching.run_names import chosen_by_user
from poprun_py.launching.wait_for_resources import BusyError, Wait
from poprun_py.machines.lease_files import LeaseFolder, problem_text
from poprun_py.machines.lease_messages import (
    job_text,
    leases_text,
    refusal_text,
    sharing_text,
)
from poprun_py.machines.leases import (
    FOLDER_VARIABLE,
    Lease,
    LeaseTable,
    QueuePlace,
    decide_on_table,
    leases_folder,
    this_job,
)
from poprun_py.machines.machine import Machine
from poprun_py.machines.remote_leases import OtherJobs
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.core_sharing import (
    ChosenShare,
    OtherLeases,
    choose_share,
    has_advice,
    sharing_rule,
)
from poprun_py.planning.cpu_placement import (
    HostShare,
    Placement,
    share_beside_jobs,
    share_of_placements,
)
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.terminal import Console

# The seconds between two reads of the lease files while a job waits for cores. A waiting job polls
# these files, because it cannot wait for a lock, a signal and a time limit together. Jobs further
# back in the queue for cores poll less often, so that many waiting jobs do not disturb the running
# jobs.
_POLL_SECONDS, _MOST_POLL_SECONDS = 0.2, 2.0
# The seconds between two queries of other hosts for their free cores. Each such query opens an ssh
# connection to every host.
_POLL_HOSTS_SECONDS = 3.0
_FIRST_IN_QUEUE = "other jobs are ahead in the queue"

Machines = tuple[Machine | None, ...]


def leases_place() -> Path | None:
    """Return the folder of this machine's lease files; None if POPRUN_LEASES=none is set.

    Raises:
        UsageError: POPRUN_LEASES does not name a folder.
    """
    try:
        return leases_folder(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None


def lease_as_planned(
    planned: LaunchPlan, console: Console, wait: Wait, held: contextlib.ExitStack
) -> Lease:
    """Lease exactly the cores that a plan names; closing ``held`` ends the lease.

    Raises:
        StartError: Other jobs hold some of the cores that the plan names.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    share = share_of_plan(planned)
    # The plan may name CPUs of another machine, but only CPUs of this machine can be leased.
    here = frozenset(os.sched_getaffinity(0)) & share.cpus
    share = share._replace(cpus=here)

    def if_free(others: frozenset[int]) -> HostShare | None:
        return share if share.cpus.isdisjoint(others) else None

    return CoreRequest(planned.config, share, if_free, console, wait, held).lease()[1]


def lease_beside_others(
    alone: LaunchPlan,
    other_jobs: Mapping[str, OtherJobs],
    console: Console,
    wait: Wait,
    held: contextlib.ExitStack,
) -> tuple[Machines, Lease]:
    """Lease cores of this machine that no other job holds; closing ``held`` ends the lease.

    ``alone`` is the plan that this job would have if no other jobs were running. ``other_jobs``
    maps the name of each other host to the jobs that hold or await its cores.

    Returns:
        The job's machines and the lease. In the machines, the CPUs of other jobs are marked as
        held, or as shared with these jobs.

    Raises:
        StartError: Other jobs hold too many cores, and this job may not wait any longer.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    config, topology, whole = alone.config, alone.topology, share_of_plan(alone)

    def ask() -> Mapping[str, OtherJobs]:
        from poprun_py.machines.host_checks import probe_other_jobs

        return probe_other_jobs(
            config, topology.hosts, mpirun=alone.command[0], environ=alone.environ
        )

    while True:
        left = wait_for_hosts(alone, other_jobs, ask, console, wait)
        asked = time.monotonic()
        whole = whole._replace(machines=left)
        share_beside = partial(share_beside_jobs, config, topology, left)
        share, lease = CoreRequest(config, whole, share_beside, console, wait, held).lease()
        is_recent = time.monotonic() - asked < _POLL_HOSTS_SECONDS
        if is_recent or sharing_rule(config).with_all or not alone.spans_hosts:
            return share.machines, lease
        # While this job waited for cores of this machine, another job may have leased cores of the
        # other hosts.
        other_jobs = ask()
        with contextlib.suppress(BusyError):
            if left_by_others(alone, other_jobs).machines == left:
                return share.machines, lease
        lease.close()


def share_of_plan(planned: LaunchPlan, index: int | None = None) -> HostShare:
    """Return the CPUs and NUMA nodes of a host that a plan uses; without index, of this machine."""
    placements = tuple(each.placement for each in planned.instances)
    return share_of_placements(
        planned.config, planned.topology, planned.machines, placements, index
    )


# --- leasing cores of this machine ----------------------------------------------------------------


@dataclass(slots=True)
class CoreRequest:
    """A job's request to lease cores of this machine.

    Attributes:
        config: The options of the launch, such as whether the job may share cores.
        whole: The cores that this job would lease if no other jobs were running.
        share_beside: A function that returns the cores for this job if other jobs hold the given
            CPUs; None if the job does not fit on the free CPUs.
        console: The console that prints warnings and messages about other jobs.
        wait: The object that limits how long this job waits for cores.
        held: The exit stack that ends the lease of cores when the stack is closed.
        place: The job's place in the queue for cores; None if the job has not joined the queue.
        problem: The reason why the lease file cannot be written; else an empty string.
    """

    config: LaunchConfig
    whole: HostShare
    share_beside: Callable[[frozenset[int]], HostShare | None]
    console: Console
    wait: Wait
    held: contextlib.ExitStack
    place: QueuePlace | None = None
    problem: str = ""

    def lease(self) -> tuple[HostShare, Lease]:
        """Lease the job's cores. If other jobs hold too many cores, wait, share cores or fail.

        Raises:
            StartError: Other jobs hold too many cores, and this job may not wait any longer.
            UsageError: POPRUN_LEASES does not name a folder.
        """
        path = leases_place()
        if path is None or not self.whole.cpus:
            return self.whole, Lease()
        try:
            with contextlib.closing(LeaseFolder(path)) as folder, contextlib.closing(self):
                table, chosen, lease = self.wait.until(partial(self._take, folder))
        except OSError as error:
            self._warn_of_no_leases(problem_text(error, path))
            return self.whole, Lease()
        self.held.enter_context(lease)
        # Printing can block on a slow terminal or pipe. Messages are therefore printed only after
        # the mutex of the lease folder was released.
        if self.problem:
            self._warn_of_no_leases(self.problem)
        if chosen.shared_with:
            cpus, advice = chosen.share.cpus, has_advice(self.config)
            self.console.warn(sharing_text(chosen.shared_with, cpus, has_advice=advice))
        elif table.held_cpus:
            self._say_what_others_hold(table, chosen.share)
        return chosen.share, lease

    def close(self) -> None:
        """Leave the queue for cores."""
        if self.place is not None:
            self.place.close()

    def _take(self, folder: LeaseFolder) -> tuple[LeaseTable, ChosenShare, Lease]:
        """Lease the job's cores; return the table of other jobs' leases, the cores and the lease.

        Raises:
            BusyError: Too few cores are free, or other jobs are ahead in the queue for cores. If
                this job may wait, it has joined the queue.
        """
        try:
            table, chosen, lease = decide_on_table(folder, partial(self._decide, folder))
        except TimeoutError:
            if not self.config.wait_for_resources:
                raise
            problem = f"{folder.path}: another process keeps this folder of leases locked"
            advice = f"end that process, or set {FOLDER_VARIABLE} to another folder"
            raise BusyError(
                f"{problem}; {advice}",
                f"for the lock of the folder of leases {folder.path}",
                _POLL_SECONDS,
            ) from None
        if chosen is None:
            raise self._busy(table)
        return table, chosen, lease

    def _decide(
        self, folder: LeaseFolder, table: LeaseTable
    ) -> tuple[LeaseTable, ChosenShare | None, Lease]:
        """Lease free cores. If too few are free, share cores with other jobs, or join the queue.

        If the job does not get cores, the returned share of cores is None.
        """
        job = this_job(short_name(self.config.program))
        others = OtherLeases(
            table.leases,
            is_last=bool(table.ahead_of(self.place)),
            queued_since=math.inf if self.place is None else self.place.record.since,
        )
        chosen = choose_share(self.whole, self.share_beside, others, sharing_rule(self.config))
        if chosen is None:
            if self.place is None and not self.wait.is_over:
                # If joining the queue for cores fails, this job waits behind all jobs in the queue.
                with contextlib.suppress(OSError):
                    name = chosen_by_user(self.config, os.environ)
                    self.place = table.join_queue(job._replace(run_id=name))
            return table, None, Lease()
        try:
            share = chosen.share
            lease = table.take(
                job,
                tuple(share.cpus),
                tuple(share.numa_nodes),
                is_shared=chosen.is_shared,
                is_shareable=share.is_shareable,
            )
        except OSError as error:
            self.problem, lease = problem_text(error, folder.path), Lease()
        return table, chosen, lease

    def _busy(self, table: LeaseTable) -> BusyError:
        """Return an error that names the jobs that hold or await CPUs of this machine."""
        ahead, holders = table.ahead_of(self.place), leases_text(table.leases)
        place = len(ahead) + 1
        return BusyError(
            refusal_text(
                table.leases,
                ahead,
                free=os.sched_getaffinity(0).difference(table.held_cpus),
                has_waited=self.config.wait_for_resources is not None,
            ),
            f"for CPUs (place {place} of {max(len(table.ahead_of(None)), place)} in the queue): "
            f"{holders or _FIRST_IN_QUEUE}",
            min(_POLL_SECONDS * place, _MOST_POLL_SECONDS),
        )

    def _say_what_others_hold(self, table: LeaseTable, share: HostShare) -> None:
        """Tell the user which cores other jobs hold; only log this if the placement is the same."""
        is_moved = share.placements != self.whole.placements
        report = self.console.tell if is_moved else self.console.log
        report(
            f"other jobs hold CPUs of this machine: {leases_text(table.leases)}; this job has "
            f"{numbered('CPU', share.cpus)}"
        )
        near = [each for each in table.leases if not share.numa_nodes.isdisjoint(each.numa_nodes)]
        if near:
            names = ", ".join(map(job_text, near))
            self.console.log(f"this job shares the memory of a NUMA node with {names}")

    def _warn_of_no_leases(self, problem: str) -> None:
        self.console.warn(
            "the cores of this job are not leased, so other jobs may use the same cores: "
            f"{problem}; set {FOLDER_VARIABLE}=FOLDER to keep leases in another folder, or "
            f"{FOLDER_VARIABLE}=none to run without leases"
        )


# --- waiting for cores of other hosts -------------------------------------------------------------


class _Left(NamedTuple):
    """The cores that other jobs leave free, the placements on these cores, and shared hosts.

    On a shared host, too few cores are free, so this job shares cores with other jobs.
    """

    machines: Machines
    placements: tuple[Placement, ...]
    shared: frozenset[int]


def wait_for_hosts(
    alone: LaunchPlan,
    other_jobs: Mapping[str, OtherJobs],
    ask: Callable[[], Mapping[str, OtherJobs]],
    console: Console,
    wait: Wait,
) -> Machines:
    """Wait until the other hosts of the job have enough free cores.

    ``alone`` is the plan that this job would have if no other jobs were running. ``other_jobs``
    maps the name of each other host to the jobs that hold or await its cores. ``ask`` queries the
    hosts again and returns a new version of ``other_jobs``.

    Returns:
        The job's machines, in which the CPUs of other jobs are marked as held.

    Raises:
        StartError: Other jobs hold too many cores, and this job may not wait any longer.
    """
    answers = itertools.chain((other_jobs,), iter(ask, None))

    def look() -> tuple[_Left, Mapping[str, OtherJobs]]:
        answer = next(answers)
        return left_by_others(alone, answer), answer

    left, last = wait.until(look)
    for index, host in enumerate(alone.topology.hosts):
        found = last.get(host.name)
        # If cores are shared on a host, a warning follows when the host's first instance starts.
        if found is None or not found.leases or index in left.shared:
            continue
        count = alone.topology.instances_per_host
        ours = slice(index * count, (index + 1) * count)
        placements = tuple(each.placement for each in alone.instances[ours])
        report = console.log if left.placements[ours] == placements else console.tell
        report(f"other jobs hold CPUs of host {host.name}: {leases_text(found.leases)}")
    return left.machines


def left_by_others(planned: LaunchPlan, other_jobs: Mapping[str, OtherJobs]) -> _Left:
    """Return a plan's machines, in which other jobs' CPUs on other hosts are marked as held.

    Raises:
        BusyError: Other jobs leave too few cores of a host free, and this job may not share cores.
    """
    config, machines, shared = planned.config, planned.machines, set[int]()
    rule = sharing_rule(config)
    placements: tuple[Placement, ...] = ()
    for index, host in enumerate(planned.topology.hosts):
        found = other_jobs.get(host.name)
        if found is None or machines[index] is None:
            continue
        share_beside = partial(share_beside_jobs, config, planned.topology, machines, index=index)
        whole = share_of_plan(planned, index)._replace(machines=machines)
        others = OtherLeases(found.leases, is_last=bool(found.queue))
        chosen = choose_share(whole, share_beside, others, rule)
        if chosen is None:
            holders = leases_text(found.leases) or _FIRST_IN_QUEUE
            has_waited = config.wait_for_resources is not None
            raise BusyError(
                refusal_text(found.leases, found.queue, host=host.name, has_waited=has_waited),
                f"for CPUs of host {host.name}: {holders}",
                _POLL_HOSTS_SECONDS,
            )
        machines = chosen.share.machines
        if chosen.shared_with:
            shared.add(index)
        else:
            placements = chosen.share.placements
    return _Left(machines, placements, frozenset(shared))
