"""Leasing what a job takes of this machine, so that jobs side by side have cores of their own.

A job's share is chosen and leased under one mutex: nobody comes between. Nothing here keeps a
lease (leases/) or decides what a job takes (planning/shared_machine.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from poprun_py.config.launch_config import LaunchConfig
from poprun_py.config.option_kinds import FOREVER
from poprun_py.console import Console, Log
from poprun_py.errors import StartError, UsageError
from poprun_py.leases.book import (
    PLACE_VARIABLE,
    Book,
    Lease,
    Ticket,
    leases_folder,
    opened,
    this_process,
)
from poprun_py.leases.locked_files import LockedFolder
from poprun_py.leases.texts import WAYS_OUT, cpus_text, holders_text, who
from poprun_py.leases.values import Holder
from poprun_py.planning.shared_machine import Share
from poprun_py.planning.user_program import short_name

__all__ = ["Leased", "lease_share", "leases_place", "limit_of"]

# Any of several jobs may end, of any user, and no lock can be waited for beside a signal and a
# limit: looking into a handful of small files takes a fraction of a millisecond.
_LOOK_SECONDS = 0.2


Leased = tuple[Share, Lease]


def lease_share(
    config: LaunchConfig,
    whole: Share,
    beside: Callable[[frozenset[int]], Share | None],
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
        folder = LockedFolder(place)
    except OSError as error:
        return _without(whole, error, console)
    try:
        return _Leasing(config, whole, beside, console, progress, folder, began).leased()
    except OSError as error:
        return _without(whole, error, console)
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


def _without(whole: Share, error: OSError, console: Console) -> Leased:
    console.warn(
        f"no cores are kept from other jobs: {error.filename or 'leases'}: {error.strerror}; "
        f"{PLACE_VARIABLE}=FOLDER names another folder, none says that it is meant"
    )
    return whole, Lease.nothing()


class _Leasing:
    """One job on its way to a lease."""

    def __init__(
        self,
        config: LaunchConfig,
        whole: Share,
        beside: Callable[[frozenset[int]], Share | None],
        console: Console,
        progress: Log | None,
        folder: LockedFolder,
        began: float | None,
    ) -> None:
        self._began = time.monotonic() if began is None else began
        self._config, self._whole, self._beside = config, whole, beside
        self._console, self._progress, self._folder = console, progress, folder
        self._holder: Holder = this_process(short_name(config.program) if config.program else "")
        self._limit = limit_of(config)
        self._told = ""

    def leased(self) -> Leased:
        """Lease now, or as soon as those in front of this job have theirs."""
        ticket: Ticket | None = None
        try:
            while True:
                waited = time.monotonic() - self._began
                with opened(self._folder) as book:
                    leased = self._taken_from(book, ticket)
                    if leased is None and waited < self._limit and ticket is None:
                        ticket = book.queue(self._holder)
                # Outside: whoever reads what is said may be slow.
                if leased is not None:
                    break
                if waited >= self._limit:
                    raise StartError(self._refusal(book, ticket))
                assert ticket is not None
                self._tell(book, ticket, waited)
                time.sleep(min(_LOOK_SECONDS, self._limit - waited))
        finally:
            if ticket is not None:
                ticket.close()
                if self._progress is not None:
                    self._progress("")
        try:
            self._say(book, leased)
        except BaseException:
            leased[1].close()
            raise
        return leased

    def _taken_from(self, book: Book, ticket: Ticket | None) -> Leased | None:
        """Lease what the job takes beside the others, or of the whole machine if it may."""
        share = None if book.ahead_of(ticket) else self._beside(book.held)
        is_shared = share is None and self._config.share_cores
        if is_shared:
            share = self._whole
        if share is None:
            return None
        try:
            lease = book.take(
                self._holder, tuple(share.cpus), tuple(share.numa_nodes), is_shared=is_shared
            )
        except OSError as error:
            return _without(share, error, self._console)
        return share, lease

    # --- what is said -------------------------------------------------------------------------

    def _say(self, book: Book, leased: Leased) -> None:
        """Say what others hold: at any verbosity only where it made a difference."""
        share = leased[0]
        if not book.held:
            return
        holders = holders_text(book.holdings)
        if not share.cpus.isdisjoint(book.held):
            self._console.warn(
                f"cores are shared with other jobs, which slows all of them: {holders}"
            )
            return
        changed = share.placements != self._whole.placements
        say = self._console.tell if changed else self._console.log
        say(f"other jobs hold CPUs of this machine: {holders}; this one has {_taken(share)}")
        near = [each for each in book.holdings if not share.numa_nodes.isdisjoint(each.numa_nodes)]
        if near:
            self._console.log(
                "the memory of a NUMA node is shared with " + ", ".join(who(each) for each in near)
            )

    def _refusal(self, book: Book, ticket: Ticket | None) -> str:
        """Return why the job cannot have what it takes, and the ways out."""
        config = self._config
        free = len(self._whole.cpus - book.held)
        over = ""
        if config.wait_for_resources is not None:
            over = f"{config.shown('wait_for_resources')}: the time is over; "
        reasons = []
        if book.holdings:
            reasons.append(holders_text(book.holdings))
        if ahead := book.ahead_of(ticket):
            first = f"{who(ahead[0])} waits for CPUs"
            more = f" with {len(ahead) - 1} more" if len(ahead) > 1 else ""
            reasons.append(f"{first}{more} in front of this job")
        elif not reasons:
            reasons.append("they were given to no job")
        return (
            f"{over}of the CPUs {_list(self._whole)} that this job can take {free} are free: "
            f"{'; '.join(reasons)}; {WAYS_OUT}"
        )

    def _tell(self, book: Book, ticket: Ticket, waited: float) -> None:
        """Say whom the job waits for, and its place; without a terminal only what is new."""
        ahead = len(book.ahead_of(ticket))
        text = (
            f"for CPUs at place {ahead + 1} of {max(len(book.ahead_of(None)), ahead + 1)}: "
            f"{holders_text(book.holdings) or 'others come first'}"
        )
        if self._progress is not None:
            self._progress(f"waiting {waited:.0f} s {text}")
        elif text != self._told:
            self._console.tell(f"waiting {text}")
        self._told = text


def _list(share: Share) -> str:
    return cpus_text(tuple(share.cpus)).partition(" ")[2]


def _taken(share: Share) -> str:
    return cpus_text(tuple(share.cpus))
