"""The leases of a host for a launcher on another one: asked for and taken there, told as JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from poprun_py.machines.lease_book import (
    Book,
    Lease,
    decided,
    entry_of,
    leases_folder,
    opened,
    parent_process,
    user_name,
)
from poprun_py.machines.lease_values import Holding, Waiter, printable, text_of
from poprun_py.machines.locked_files import LockedFolder, problem_text


class Rivals(NamedTuple):
    """The other jobs on a host: who holds CPUs, and who waits for some."""

    holdings: tuple[Holding, ...] = ()
    waiters: tuple[Waiter, ...] = ()

    @property
    def held(self) -> frozenset[int]:
        """The CPUs that they hold."""
        return frozenset(cpu for each in self.holdings for cpu in each.cpus)


def ask(environ: Mapping[str, str]) -> list[list[str]]:
    """Return who holds CPUs of this host, and who waits for some, as ``rivals_of`` reads it.

    Raises:
        OSError: the leases cannot be read.
        ValueError: POPRUN_LEASES names no folder.
    """
    place = leases_folder(environ)
    if place is None or not place.exists():
        return []
    with contextlib.closing(LockedFolder(place)) as folder, opened(folder) as book:
        found: tuple[Holding | Waiter, ...] = (*book.outer, *book.holdings, *book.ahead_of(None))
    return _told(found)


def take(request: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], Lease]:
    """Lease CPUs of this host for all instances of a job here; returns the answer, and the lease.

    The answer has ``rivals`` if others hold some of them, or wait, and the job may not share;
    ``shared_with``, those who hold some, if it may. It has ``problem`` if no lease can be kept:
    then the job runs without.

    Args:
        request: ``cpus``, ``numa_nodes``, ``program`` and ``run_id`` of the job; ``may_share``; and
            ``within``, as ``rivals_of`` takes it.
        environ: the variables of this process.
    """
    try:
        place = leases_folder(environ)
    except ValueError as error:
        return {"problem": str(error)}, Lease.nothing()
    if place is None:
        return {}, Lease.nothing()
    try:
        return _taken(request, place)
    except OSError as error:
        return {"problem": problem_text(error, place)}, Lease.nothing()


def _taken(request: Mapping[str, Any], place: Path) -> tuple[dict[str, Any], Lease]:
    cpus = os.sched_getaffinity(0).intersection(request["cpus"])
    if not cpus:
        return {}, Lease.nothing()

    def decide(book: Book) -> tuple[Lease | None, Rivals]:
        found: tuple[Holding | Waiter, ...] = (*book.holdings, *book.ahead_of(None))
        # This host may be the launcher's own by another name.
        holdings, waiters = _without(found, {request["run_id"], request["within"]})
        holdings = tuple(each for each in holdings if not cpus.isdisjoint(each.cpus))
        lease = None
        if request["may_share"] or not (holdings or waiters):
            lease = book.take(
                parent_process(request["program"], request["run_id"]),
                tuple(cpus),
                request["numa_nodes"],
                is_shared=bool(holdings),
            )
        return lease, Rivals(holdings, waiters)

    with contextlib.closing(LockedFolder(place)) as folder:
        lease, rivals = decided(folder, decide)
    if lease is None:
        return {"rivals": _told((*rivals.holdings, *rivals.waiters))}, Lease.nothing()
    return ({"shared_with": _told(rivals.holdings)} if rivals.holdings else {}), lease


def rivals_of(told: Any, within: str) -> Rivals:
    """Return the other jobs on a host that told of its leases.

    Args:
        told: what it told; what cannot be understood is left out.
        within: the run of the job in one of whose instances this job is launched, if any: its CPUs
            are this job's own to use.
    """
    found = []
    for each in told if isinstance(told, list) else ():
        with contextlib.suppress(TypeError, ValueError):
            name, user, text = each
            found.append(entry_of(printable(name), printable(user), str(text).encode()))
    return _without((each for each in found if each is not None), {within})


def _without(found: Iterable[Holding | Waiter], runs: Collection[str]) -> Rivals:
    others = [e for e in found if e.holder.run_id not in runs or not e.holder.run_id]
    return Rivals(
        tuple(each for each in others if isinstance(each, Holding)),
        # Who waits within a job waits for the CPUs of that job.
        tuple(each for each in others if isinstance(each, Waiter) and not each.outer),
    )


def _told(entries: Iterable[Holding | Waiter]) -> list[list[str]]:
    # By name: numbers may be another user's on another host.
    return [[each.name, user_name(each.user), text_of(each)] for each in entries]
