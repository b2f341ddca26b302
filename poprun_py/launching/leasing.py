"""Leasing what a job takes of this machine, so that jobs side by side have cores of their own.

A job's share is chosen and leased under one mutex: nobody comes between. Nothing here keeps a
lease (machines/leases.py) or decides what a job takes (planning/job_placement.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from poprun_py.console import Console, Log
from poprun_py.errors import StartError, UsageError
from poprun_py.machines.lease_files import JobProcess, LeaseFolder, problem_text
from poprun_py.machines.lease_messages import ADVICE, job_text, leases_text, sharing_text
from poprun_py.machines.leases import (
    FOLDER_VARIABLE,
    Lease,
    LeaseTable,
    QueuePlace,
    decide_on_table,
    leases_folder,
    this_job,
)
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FOREVER
from poprun_py.planning.job_placement import HostShare
from poprun_py.planning.user_program import short_name
from poprun_py.texts import numbered

# Any of several jobs may end, of any user, and no lock can be waited for beside a signal and a
# limit: looking into a handful of small files takes a fraction of a millisecond. Those further back
# in the queue look less often: many that wait must not take what the running jobs need.
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.2, 2.0
_KEPT = "another process keeps its mutex locked"

Leased = tuple[HostShare, Lease]


def lease_share(
    config: LaunchConfig,
    whole: HostShare,
    beside: Callable[[frozenset[int]], HostShare | None],
    console: Console,
    progress: Log | None = None,
    *,
    began: float | None = None,
) -> Leased:
    """Lease what a job takes of this machine, as its options say where others hold too much.

    Returns what it takes, and the lease.

    Args:
        config: how to go on where the job does not fit: wait, share, or neither.
        whole: what the job takes of the machine if it is alone.
        beside: returns what it takes beside jobs that hold CPUs; None if it does not fit.
        console: takes what others hold, and what is questionable.
        progress: takes, again and again, whom a job waits for, and at last an empty line; by
            default the console is told once.
        began: when the job began to wait, by the monotonic clock; now by default.

    Raises:
        StartError: others hold too much, or the time for waiting is over.
        UsageError: POPRUN_LEASES names no folder.
    """
    place = leases_place()
    if place is None or not whole.cpus:
        return whole, Lease.nothing()
    try:
        folder = LeaseFolder(place)
    except OSError as error:
        return _without(whole, problem_text(error, place), console)
    try:
        return _Leasing(config, whole, beside, console, progress, folder, began).leased()
    except OSError as error:
        return _without(whole, problem_text(error, place), console)
    finally:
        folder.close()


def limit_of(config: LaunchConfig) -> float:
    """Return for how many seconds a job may wait for others; infinity for any."""
    wait = config.wait_for_resources
    return math.inf if wait == FOREVER else float(wait or 0)


def leases_place() -> Path | None:
    """Return the folder of this machine's leases; None if there are none to be.

    Raises:
        UsageError: POPRUN_LEASES names no folder.
    """
    try:
        return leases_folder(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _without(whole: HostShare, problem: str, console: Console) -> Leased:
    console.warn(
        f"no cores are kept from other jobs: {problem}; {FOLDER_VARIABLE}=FOLDER names another "
        "folder, none says that it is meant"
    )
    return whole, Lease.nothing()


class _Leasing:
    """One job on its way to a lease."""

    def __init__(
        self,
        config: LaunchConfig,
        whole: HostShare,
        beside: Callable[[frozenset[int]], HostShare | None],
        console: Console,
        progress: Log | None,
        folder: LeaseFolder,
        began: float | None,
    ) -> None:
        self._began = time.monotonic() if began is None else began
        self._config, self._whole, self._beside = config, whole, beside
        self._console, self._progress, self._folder = console, progress, folder
        self._job: JobProcess = this_job(short_name(config.program) if config.program else "")
        self._limit = limit_of(config)
        self._told = ""
        self._place: QueuePlace | None = None
        self._problem = ""  # why no lease can be kept

    def leased(self) -> Leased:
        """Lease now, or as soon as those in front of this job have theirs."""
        try:
            while True:
                waited = time.monotonic() - self._began
                is_over = waited >= self._limit
                table, leased = self._look(is_over)
                # Outside of the mutex: whoever reads what is said may be slow.
                if table is not None and leased is not None:
                    break
                if is_over:
                    raise StartError(self._refusal(table))
                self._tell(table, waited)
                ahead = 0 if table is None else len(table.ahead_of(self._place))
                pause = min(_LOOK_SECONDS * (1 + ahead), _MOST_LOOK_SECONDS)
                time.sleep(min(pause, self._limit - waited))
        finally:
            if self._place is not None:
                self._place.close()
            if self._told and self._progress is not None:
                self._progress("")
        leased[1].waited_seconds = waited
        try:
            self._say(table, leased)
        except BaseException:
            leased[1].close()
            raise
        return leased

    def _look(self, is_over: bool) -> tuple[LeaseTable | None, Leased | None]:
        """Lease, or queue if there is time left; no table if the mutex cannot be had meanwhile."""

        def decide(table: LeaseTable) -> tuple[LeaseTable, Leased | None]:
            leased = self._taken_from(table)
            if leased is None and not is_over and self._place is None:
                # A job that cannot get a ticket still waits, but behind all jobs that have one.
                with contextlib.suppress(OSError):
                    self._place = table.join_queue(self._job)
            return table, leased

        try:
            return decide_on_table(self._folder, decide)
        except TimeoutError:
            # Who waits does not want what others hold, whoever was stopped at the wrong moment.
            if not self._limit:
                raise
            return None, None

    def _taken_from(self, table: LeaseTable) -> Leased | None:
        """Lease what the job takes beside the others, or of the whole machine if it may."""
        share = None if table.ahead_of(self._place) else self._beside(table.held_cpus)
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

    # --- what is said -------------------------------------------------------------------------

    def _say(self, table: LeaseTable, leased: Leased) -> None:
        """Say what others hold: at any verbosity only where it made a difference."""
        share = leased[0]
        if self._problem:
            _without(share, self._problem, self._console)
        if not table.held_cpus:
            return
        holders = leases_text(table.leases)
        if not share.cpus.isdisjoint(table.held_cpus):
            self._console.warn(sharing_text("cores", table.leases))
            return
        changed = share.placements != self._whole.placements
        say = self._console.tell if changed else self._console.log
        say(f"other jobs hold CPUs of this machine: {holders}; this one has {_taken(share)}")
        near = [each for each in table.leases if not share.numa_nodes.isdisjoint(each.numa_nodes)]
        if near:
            self._console.log(
                "the memory of a NUMA node is shared with "
                + ", ".join(job_text(each) for each in near)
            )

    def _refusal(self, table: LeaseTable | None) -> str:
        """Return why the job cannot have what it takes, and the ways out."""
        config = self._config
        over = ""
        if config.wait_for_resources is not None:
            over = f"{config.shown('wait_for_resources')}: the time is over; "
        if table is None:
            return f"{over}{self._folder.path}: {_KEPT}; end who keeps it, or name another folder"
        reasons = []
        if table.leases:
            reasons.append(leases_text(table.leases))
        if ahead := table.ahead_of(self._place):
            first = f"{job_text(ahead[0])} waits for CPUs"
            more = f" with {len(ahead) - 1} more" if len(ahead) > 1 else ""
            reasons.append(f"{first}{more} in front of this job")
        elif not reasons:
            reasons.append("they were given to no job")
        return (
            f"{over}too few CPUs of this machine are free for this job, which takes "
            f"{_taken(self._whole)} when it is alone: {'; '.join(reasons)}; {ADVICE}"
        )

    def _tell(self, table: LeaseTable | None, waited: float) -> None:
        """Say whom the job waits for, and its place; without a terminal only what is new."""
        if table is None:
            text = f"for {self._folder.path}: {_KEPT}"
        else:
            place = len(table.ahead_of(self._place)) + 1
            text = (
                f"for CPUs at place {place} of {max(len(table.ahead_of(None)), place)}: "
                f"{leases_text(table.leases) or 'others come first'}"
            )
        # Before it is told: who is interrupted meanwhile clears the line.
        is_new, self._told = text != self._told, text
        if self._progress is not None:
            self._progress(f"waiting {waited:.0f} s {text}")
        elif is_new:
            self._console.tell(f"waiting {text}")


def _taken(share: HostShare) -> str:
    return numbered("CPU", share.cpus)
