"""Leases of a job's cores on this machine, and the search for free cores on other hosts.

Jobs that run side by side get different cores. The share of a job is chosen and leased under one
mutex, so no other job can take the same cores between the choice and the lease. For the other
hosts, this module only finds out which cores other jobs hold. The first instance of each host
leases that host's cores when the instance starts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from poprun_py.display.formatting import numbered
from poprun_py.errors import StartError, UsageError
from poprun_py.launching.wait_for_resources import Wait
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
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.job_placement import (
    HostShare,
    local_host_index,
    share_beside_jobs,
    share_of_placements,
)
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_inputs import PlanInputs
from poprun_py.planning.topology import Topology
from poprun_py.planning.user_program import short_name
from poprun_py.terminal import Console

# A job that runs only on this machine does not import the code that queries other hosts.
if TYPE_CHECKING:
    from poprun_py.machines.leases import OtherJobs

# The seconds between two reads of the leases. A waiting job polls, because it cannot wait for a
# lock, a signal and a time limit together. Reading a few small files takes a fraction of a
# millisecond. Jobs further back in the queue poll less often, so that many waiting jobs do not
# disturb the running jobs.
_POLL_SECONDS, _MOST_POLL_SECONDS = 0.2, 2.0
# The seconds between two queries of the other hosts. A query opens an ssh connection to each host.
_POLL_HOSTS_SECONDS = 3.0
_MUTEX_HELD = "another process keeps its mutex locked"

Machines = tuple[Machine | None, ...]
Leased = tuple[HostShare, Lease]


def leases_place() -> Path | None:
    """Return the folder of this machine's leases; None if POPRUN_LEASES=none turns them off.

    Raises:
        UsageError: POPRUN_LEASES does not name a folder.
    """
    try:
        return leases_folder(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None


def share_of_plan(planned: LaunchPlan) -> HostShare:
    """Return the share of this machine that a plan uses."""
    placements = tuple(each.placement for each in planned.instances)
    return share_of_placements(planned.topology, planned.machines, placements)


def lease_as_planned(planned: LaunchPlan, console: Console, wait: Wait) -> Lease:
    """Lease exactly the cores that a plan names; if the job may wait, wait until they are free.

    Raises:
        StartError: Other jobs hold some of the plan's cores.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    share = share_of_plan(planned)
    # A plan may be made for another machine, but only CPUs of this machine can be leased.
    here = frozenset(os.sched_getaffinity(0)) & share.cpus
    share = share._replace(cpus=here)

    def if_free(held: frozenset[int]) -> HostShare | None:
        return share if share.cpus.isdisjoint(held) else None

    return lease_share(planned.config, share, if_free, console, wait)[1]


def lease_beside_others(
    alone: LaunchPlan, inputs: PlanInputs, console: Console, wait: Wait
) -> tuple[Machines, Lease]:
    """Lease cores of this machine that other jobs do not hold.

    Args:
        alone: The plan of the job as if no other jobs ran.
        inputs: The machines and hosts of the plan ``alone``.
        console: The console that prints warnings, and notes about other jobs.
        wait: The limit of the time that the job may wait for other jobs.

    Returns:
        A pair: the machines without the cores that other jobs hold, for a new plan; and the lease.

    Raises:
        StartError: Other jobs hold too many cores, or the limit of the wait is reached.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    config, topology, machines = alone.config, alone.topology, inputs.machines
    whole = share_of_plan(alone)
    if inputs.probed is None or leases_place() is None:
        share_beside = partial(share_beside_jobs, config, topology, machines)
        share, lease = lease_share(config, whole, share_beside, console, wait)
        return share.machines, lease
    from poprun_py.machines.probe import probe_other_jobs

    ask = partial(
        probe_other_jobs,
        config,
        topology.hosts,
        mpirun=inputs.installed_mpi.path,
        environ=inputs.environ,
    )
    other_jobs: Mapping[str, OtherJobs] = inputs.probed.other_jobs
    while True:
        left = wait_for_hosts(
            config, topology, machines, whole.placements, other_jobs, ask, console, wait
        )
        if local_host_index(topology) is None:
            return left, Lease.nothing()
        asked = time.monotonic()
        share_beside = partial(share_beside_jobs, config, topology, left)
        share, lease = lease_share(
            config, whole._replace(machines=left), share_beside, console, wait
        )
        # During a long wait on this machine, another job may have taken cores of the other hosts.
        if config.share_cores or time.monotonic() - asked < _POLL_HOSTS_SECONDS:
            return share.machines, lease
        with contextlib.ExitStack() as undo:
            undo.callback(lease.close)
            other_jobs = ask()
            with contextlib.suppress(StartError):
                if left_by_others(config, topology, machines, other_jobs) == left:
                    undo.pop_all()
                    return share.machines, lease


# --- leasing cores of this machine ----------------------------------------------------------------


def lease_share(
    config: LaunchConfig,
    whole: HostShare,
    share_beside: Callable[[frozenset[int]], HostShare | None],
    console: Console,
    wait: Wait,
) -> Leased:
    """Lease a job's share of this machine.

    If other jobs hold too many cores, the job waits, shares cores or is refused, as its options
    say.

    Args:
        config: The options, which say whether the job may share cores.
        whole: The job's share of a machine without other jobs.
        share_beside: A function that returns the job's share if other jobs hold the given CPUs;
            None if the job does not fit on the free CPUs.
        console: The console that prints warnings, and notes about other jobs.
        wait: The limit of the time that the job may wait for other jobs.

    Raises:
        StartError: Other jobs hold too many cores, or the limit of the wait is reached.
        UsageError: POPRUN_LEASES does not name a folder.
    """
    place = leases_place()
    if place is None or not whole.cpus:
        return whole, Lease.nothing()
    try:
        with contextlib.closing(LeaseFolder(place)) as folder:
            return _ShareLease(config, whole, share_beside, console, wait, folder).take()
    except OSError as error:
        _warn_of_no_leases(problem_text(error, place), console)
        return whole, Lease.nothing()


def _warn_of_no_leases(problem: str, console: Console) -> None:
    console.warn(
        f"no cores are kept from other jobs: {problem}; set {FOLDER_VARIABLE}=FOLDER to use "
        f"another folder, or {FOLDER_VARIABLE}=none to run without leases"
    )


class _ShareLease:
    """One job's request for a lease, from joining the queue until the lease is taken or refused."""

    def __init__(
        self,
        config: LaunchConfig,
        whole: HostShare,
        share_beside: Callable[[frozenset[int]], HostShare | None],
        console: Console,
        wait: Wait,
        folder: LeaseFolder,
    ) -> None:
        self._config, self._whole, self._share_beside = config, whole, share_beside
        self._console, self._wait, self._folder = console, wait, folder
        self._job = this_job(short_name(config.program) if config.program else "")
        self._place: QueuePlace | None = None
        self._problem = ""  # the reason why a lease cannot be written

    def take(self) -> Leased:
        """Wait until the cores are free and the jobs ahead in the queue have cores; then lease."""
        try:
            while True:
                is_over = self._wait.is_over
                table, leased = self._try(is_last=is_over)
                # Messages are written after the mutex was released, because writing blocks while
                # the reader of the messages is slow.
                if table is not None and leased is not None:
                    break
                if is_over:
                    raise StartError(self._wait.refusal(self._refusal(table)))
                ahead = 0 if table is None else len(table.ahead_of(self._place))
                pause = min(_POLL_SECONDS * (1 + ahead), _MOST_POLL_SECONDS)
                self._wait.sleep(pause, self._waiting_text(table))
        finally:
            if self._place is not None:
                self._place.close()
            self._wait.end()
        with contextlib.ExitStack() as undo:
            undo.callback(leased[1].close)
            self._say_what_others_hold(table, leased[0])
            undo.pop_all()
        return leased

    def _try(self, *, is_last: bool) -> tuple[LeaseTable | None, Leased | None]:
        """Try once to take the lease; if the cores are not free, join the queue.

        Return a pair: the table of leases, which is None if the mutex was not free in time; and
        the leased share, which is None if the cores are not free.
        """

        def decide(table: LeaseTable) -> tuple[LeaseTable, Leased | None]:
            leased = self._take_from(table)
            if leased is None and not is_last and self._place is None:
                # If joining the queue fails, the job waits behind all jobs in the queue.
                with contextlib.suppress(OSError):
                    self._place = table.join_queue(self._job)
            return table, leased

        try:
            return decide_on_table(self._folder, decide)
        except TimeoutError:
            if not self._wait.is_allowed:
                raise
            return None, None

    def _take_from(self, table: LeaseTable) -> Leased | None:
        """Lease free cores, or all planned cores if the job may share cores; else return None."""
        share = None if table.ahead_of(self._place) else self._share_beside(table.held_cpus)
        is_shared = share is None and self._config.share_cores
        if is_shared:
            share = self._whole
        if share is None:
            return None
        try:
            lease = table.take(
                self._job, tuple(share.cpus), tuple(share.numa_nodes), is_shared=is_shared
            )
        except OSError as error:
            self._problem = problem_text(error, self._folder.path)
            lease = Lease.nothing()
        return share, lease

    def _say_what_others_hold(self, table: LeaseTable, share: HostShare) -> None:
        """Report the cores that other jobs hold, only in the log if the placement is unaffected."""
        if self._problem:
            _warn_of_no_leases(self._problem, self._console)
        if not table.held_cpus:
            return
        if not share.cpus.isdisjoint(table.held_cpus):
            self._console.warn(sharing_text("cores", table.leases))
            return
        text = (
            f"other jobs hold CPUs of this machine: {leases_text(table.leases)}; this one has "
            f"{numbered('CPU', share.cpus)}"
        )
        if share.placements == self._whole.placements:
            self._console.log(text)
        else:
            self._console.tell(text)
        near = [each for each in table.leases if not share.numa_nodes.isdisjoint(each.numa_nodes)]
        if near:
            self._console.log(
                "the memory of a NUMA node is shared with "
                + ", ".join(job_text(each) for each in near)
            )

    def _refusal(self, table: LeaseTable | None) -> str:
        """Return the error text for a job that does not get cores, with the reason and advice."""
        if table is None:
            place = self._folder.path
            return f"{place}: {_MUTEX_HELD}; end that process, or name another folder"
        reasons = []
        if table.leases:
            reasons.append(leases_text(table.leases))
        if ahead := table.ahead_of(self._place):
            reasons.append(queue_text(ahead))
        elif not reasons:
            reasons.append("no other job holds CPUs now")
        return (
            "too few CPUs of this machine are free for this job, which takes "
            f"{numbered('CPU', self._whole.cpus)} when it is alone: {'; '.join(reasons)}; "
            f"{ADVICE}"
        )

    def _waiting_text(self, table: LeaseTable | None) -> str:
        """Return the text shown during a wait, with the place in the queue and the other jobs."""
        if table is None:
            return f"for {self._folder.path}: {_MUTEX_HELD}"
        place = len(table.ahead_of(self._place)) + 1
        return (
            f"for CPUs at place {place} of {max(len(table.ahead_of(None)), place)}: "
            f"{leases_text(table.leases) or 'other jobs are first in the queue'}"
        )


# --- waiting for cores of other hosts -------------------------------------------------------------


class _Left(NamedTuple):
    """The machines without other jobs' cores, and the hosts that have too few cores left."""

    machines: Machines
    placements: tuple[Placement, ...]
    crowded: tuple[int, ...]


def wait_for_hosts(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    placements: tuple[Placement, ...],
    other_jobs: Mapping[str, OtherJobs],
    ask: Callable[[], Mapping[str, OtherJobs]],
    console: Console,
    wait: Wait,
) -> Machines:
    """Wait until the other hosts have enough free cores.

    Args:
        config: The options, which say whether the job may share cores.
        topology: The instances of each host.
        machines: The machine of each host.
        placements: The placements of the instances as if no other jobs ran.
        other_jobs: The other jobs of each host, keyed by the host's name.
        ask: A function that queries the hosts again and returns their other jobs.
        console: The console that prints notes about other jobs.
        wait: The limit of the time that the job may wait for other jobs.

    Returns:
        The machines without the cores that other jobs hold.

    Raises:
        StartError: Other jobs hold too many cores, or the limit of the wait is reached.
    """
    left = _left(config, topology, machines, other_jobs)
    try:
        while left.crowded and not config.share_cores:
            name = topology.hosts[left.crowded[0]].name
            if wait.is_over:
                raise StartError(wait.refusal(refusal_text(name, other_jobs[name])))
            holders = leases_text(other_jobs[name].leases) or "other jobs are first in the queue"
            wait.sleep(_POLL_HOSTS_SECONDS, f"for CPUs of host {name}: {holders}")
            other_jobs = ask()
            left = _left(config, topology, machines, other_jobs)
    finally:
        wait.end()
    for index, host in enumerate(topology.hosts):
        found = other_jobs.get(host.name)
        # On a host with too few free cores, the wrapper process warns that cores are shared.
        if found is None or not found.leases or index in left.crowded:
            continue
        count = topology.instances_per_host
        ours = slice(index * count, (index + 1) * count)
        text = f"other jobs hold CPUs of host {host.name}: {leases_text(found.leases)}"
        if left.placements[ours] == placements[ours]:
            console.log(text)
        else:
            console.tell(text)
    return left.machines


def left_by_others(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    other_jobs: Mapping[str, OtherJobs],
) -> Machines:
    """Return the machines without the cores that other jobs hold on the other hosts.

    Raises:
        StartError: The other jobs of a host leave too few of the host's cores.
    """
    left = _left(config, topology, machines, other_jobs)
    if left.crowded and not config.share_cores:
        name = topology.hosts[left.crowded[0]].name
        raise StartError(refusal_text(name, other_jobs[name]))
    return left.machines


def _left(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    other_jobs: Mapping[str, OtherJobs],
) -> _Left:
    placements: tuple[Placement, ...] = ()
    crowded = []
    for index, host in enumerate(topology.hosts):
        found = other_jobs.get(host.name)
        if found is None or machines[index] is None:
            continue
        share = None
        if not found.queue:
            share = share_beside_jobs(config, topology, machines, found.held_cpus, index)
        if share is None:
            crowded.append(index)
        else:
            machines, placements = share.machines, share.placements
    return _Left(machines, placements, tuple(crowded))
