"""Leases of a job's cores on this machine, and the search for free cores on other hosts.

Jobs that run side by side get different cores. The share of a job is chosen and leased under one
mutex, so no other job can take the same cores between the choice and the lease. For the other
hosts, this module only finds out which cores other jobs hold. The first instance of each host
leases that host's cores when the instance starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from poprun_py.display.formatting import numbered
from poprun_py.errors import UsageError
from poprun_py.launching.wait_for_resources import BusyError, Wait
from poprun_py.machines.lease_files import LeaseFolder, problem_text
from poprun_py.machines.lease_messages import (
    ADVICE,
    job_text,
    leases_text,
    queue_text,
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
from poprun_py.planning.cpu_placement import (
    HostShare,
    Placement,
    share_beside_jobs,
    share_of_placements,
)
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.terminal import Console

# The seconds between two reads of the leases. A waiting job polls, because it cannot wait for a
# lock, a signal and a time limit together. Reading a few small files takes a fraction of a
# millisecond. Jobs further back in the queue poll less often, so that many waiting jobs do not
# disturb the running jobs.
_POLL_SECONDS, _MOST_POLL_SECONDS = 0.2, 2.0
# The seconds between two queries of the other hosts. A query opens an ssh connection to each host.
_POLL_HOSTS_SECONDS = 3.0
_FIRST_IN_QUEUE = "other jobs are first in the queue"

Machines = tuple[Machine | None, ...]


def leases_place() -> Path | None:
    """Return the folder of this machine's leases; None if POPRUN_LEASES=none turns them off.

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
    """Lease exactly the cores that a plan names, until ``held`` is closed.

    Raises:
        StartError: Other jobs hold some of the plan's cores.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    share = share_of_plan(planned)
    # A plan may be made for another machine, but only CPUs of this machine can be leased.
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
    """Lease cores of this machine that other jobs do not hold, until ``held`` is closed.

    ``alone`` is the plan of the job as if no other jobs ran. The keys of ``other_jobs`` are the
    names of the other hosts.

    Returns:
        A pair: the machines without the cores that other jobs hold, for a new plan; and the lease.

    Raises:
        StartError: Other jobs hold too many cores, or the limit of the wait is reached.
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
        if is_recent or config.share_cores or not alone.spans_hosts:
            return share.machines, lease
        # During a long wait on this machine, another job may have taken cores of the other hosts.
        other_jobs = ask()
        with contextlib.suppress(BusyError):
            if left_by_others(alone, other_jobs).machines == left:
                return share.machines, lease
        lease.close()


def share_of_plan(planned: LaunchPlan, index: int | None = None) -> HostShare:
    """Return the part of a host that a plan uses; ``index`` is None for this machine."""
    placements = tuple(each.placement for each in planned.instances)
    return share_of_placements(planned.topology, planned.machines, placements, index)


# --- leasing cores of this machine ----------------------------------------------------------------


@dataclass(slots=True)
class CoreRequest:
    """One job's request for cores of this machine.

    Attributes:
        config: The options, which say whether the job may share cores.
        whole: The job's share of a machine without other jobs.
        share_beside: Returns the job's share if other jobs hold the given CPUs; None if the job
            does not fit on the free CPUs.
        console: Prints warnings, and notes about other jobs.
        wait: The time that the job may wait for other jobs.
        held: The lease ends when this stack is closed.
        place: The job's place in the queue; None before the job waits.
        problem: The reason why the lease cannot be written; empty without a problem.
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
        """Lease the job's share; wait, share cores or refuse the job if other jobs hold too many.

        Raises:
            StartError: Other jobs hold too many cores, or the limit of the wait is reached.
            UsageError: POPRUN_LEASES does not name a folder.
        """
        path = leases_place()
        if path is None or not self.whole.cpus:
            return self.whole, Lease()
        try:
            with contextlib.closing(LeaseFolder(path)) as folder, contextlib.closing(self):
                table, share, lease = self.wait.until(partial(self._take, folder))
        except OSError as error:
            self._warn_of_no_leases(problem_text(error, path))
            return self.whole, Lease()
        self.held.enter_context(lease)
        # Messages are written after the mutex was released, because writing blocks while the reader
        # of the messages is slow.
        if self.problem:
            self._warn_of_no_leases(self.problem)
        if table.held_cpus:
            self._say_what_others_hold(table, share)
        return share, lease

    def close(self) -> None:
        """Leave the queue."""
        if self.place is not None:
            self.place.close()

    def _take(self, folder: LeaseFolder) -> tuple[LeaseTable, HostShare, Lease]:
        """Take the lease; return the table of the other leases, the job's share and its lease.

        Raises:
            BusyError: The cores are not free, or jobs ahead in the queue wait for cores. The job
                has joined the queue, unless its wait is over.
        """
        try:
            table, share, lease = decide_on_table(folder, partial(self._decide, folder))
        except TimeoutError:
            if not self.config.wait_for_resources:
                raise
            problem = f"{folder.path}: another process keeps its mutex locked"
            advice = "end that process, or name another folder"
            raise BusyError(f"{problem}; {advice}", f"for {problem}", _POLL_SECONDS) from None
        if share is None:
            raise self._busy(table)
        return table, share, lease

    def _decide(
        self, folder: LeaseFolder, table: LeaseTable
    ) -> tuple[LeaseTable, HostShare | None, Lease]:
        """Lease free cores, or all planned cores if the job may share cores; else join the queue.

        The returned share is None if the job does not get cores.
        """
        job = this_job(short_name(self.config.program))
        share = None if table.ahead_of(self.place) else self.share_beside(table.held_cpus)
        is_shared = share is None and self.config.share_cores
        if is_shared:
            share = self.whole
        if share is None:
            if self.place is None and not self.wait.is_over:
                # If joining the queue fails, the job waits behind all jobs in the queue.
                with contextlib.suppress(OSError):
                    self.place = table.join_queue(job)
            return table, None, Lease()
        try:
            cpus, nodes = tuple(share.cpus), tuple(share.numa_nodes)
            return table, share, table.take(job, cpus, nodes, is_shared=is_shared)
        except OSError as error:
            self.problem = problem_text(error, folder.path)
            return table, share, Lease()

    def _busy(self, table: LeaseTable) -> BusyError:
        """Return the error for cores that are not free, with the other jobs and advice."""
        ahead, holders = table.ahead_of(self.place), leases_text(table.leases)
        reasons = [holders] if holders else []
        if ahead:
            reasons.append(queue_text(ahead))
        reason = "; ".join(reasons) or "no other job holds CPUs now"
        place = len(ahead) + 1
        return BusyError(
            "too few CPUs of this machine are free for this job, which takes "
            f"{numbered('CPU', self.whole.cpus)} when it is alone: {reason}; {ADVICE}",
            f"for CPUs at place {place} of {max(len(table.ahead_of(None)), place)}: "
            f"{holders or _FIRST_IN_QUEUE}",
            min(_POLL_SECONDS * place, _MOST_POLL_SECONDS),
        )

    def _say_what_others_hold(self, table: LeaseTable, share: HostShare) -> None:
        """Report the cores that other jobs hold, only in the log if the placement is unaffected."""
        if not share.cpus.isdisjoint(table.held_cpus):
            self.console.warn(sharing_text("cores", table.leases))
            return
        is_moved = share.placements != self.whole.placements
        report = self.console.tell if is_moved else self.console.log
        report(
            f"other jobs hold CPUs of this machine: {leases_text(table.leases)}; this one has "
            f"{numbered('CPU', share.cpus)}"
        )
        near = [each for each in table.leases if not share.numa_nodes.isdisjoint(each.numa_nodes)]
        if near:
            names = ", ".join(map(job_text, near))
            self.console.log(f"the memory of a NUMA node is shared with {names}")

    def _warn_of_no_leases(self, problem: str) -> None:
        self.console.warn(
            f"no cores are kept from other jobs: {problem}; set {FOLDER_VARIABLE}=FOLDER to use "
            f"another folder, or {FOLDER_VARIABLE}=none to run without leases"
        )


# --- waiting for cores of other hosts -------------------------------------------------------------


class _Left(NamedTuple):
    """The machines without other jobs' cores, the placements on them, and the shared hosts.

    On a shared host, other jobs hold so many cores that the job shares cores with them.
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
    """Wait until the other hosts have enough cores that other jobs do not hold.

    ``alone`` is the plan of the job as if no other jobs ran. The keys of ``other_jobs`` are the
    names of the other hosts; ``ask`` queries these hosts again.

    Returns:
        The machines without the cores that other jobs hold.

    Raises:
        StartError: Other jobs hold too many cores, or the limit of the wait is reached.
    """
    answers = itertools.chain((other_jobs,), iter(ask, None))

    def look() -> tuple[_Left, Mapping[str, OtherJobs]]:
        answer = next(answers)
        return left_by_others(alone, answer), answer

    left, last = wait.until(look)
    for index, host in enumerate(alone.topology.hosts):
        found = last.get(host.name)
        # On a host with too few free cores, the wrapper process warns that cores are shared.
        if found is None or not found.leases or index in left.shared:
            continue
        count = alone.topology.instances_per_host
        ours = slice(index * count, (index + 1) * count)
        placements = tuple(each.placement for each in alone.instances[ours])
        report = console.log if left.placements[ours] == placements else console.tell
        report(f"other jobs hold CPUs of host {host.name}: {leases_text(found.leases)}")
    return left.machines


def left_by_others(planned: LaunchPlan, other_jobs: Mapping[str, OtherJobs]) -> _Left:
    """Return the machines of a plan without the cores that other jobs hold on the other hosts.

    Raises:
        BusyError: The other jobs of a host leave too few cores, and the job may not share cores.
    """
    machines, shared = planned.machines, set[int]()
    placements: tuple[Placement, ...] = ()
    for index, host in enumerate(planned.topology.hosts):
        found = other_jobs.get(host.name)
        if found is None or machines[index] is None:
            continue
        share = None
        if not found.queue:
            held = found.held_cpus
            share = share_beside_jobs(planned.config, planned.topology, machines, held, index)
        if share is not None:
            machines, placements = share.machines, share.placements
        elif planned.config.share_cores:
            shared.add(index)
        else:
            holders = leases_text(found.leases) or _FIRST_IN_QUEUE
            raise BusyError(
                refusal_text(host.name, found),
                f"for CPUs of host {host.name}: {holders}",
                _POLL_HOSTS_SECONDS,
            )
    return _Left(machines, placements, frozenset(shared))
