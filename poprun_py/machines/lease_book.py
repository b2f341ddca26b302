"""Who holds which CPUs of this machine, and who waits: looking, taking, queueing, giving back."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from poprun_py.machines.lease_values import (
    MAX_NUMBER,
    Holder,
    Holding,
    Waiter,
    holding_of,
    text_of,
    waiter_of,
)
from poprun_py.machines.locked_files import LockedFolder

PLACE_VARIABLE = "POPRUN_LEASES"
_NONE = "none"
_FOLDER_NAME = "poprun-py-leases"
# The first is in memory: it is empty after a boot, and fast. Some systems lack it.
_BASES = ("/dev/shm", "/tmp")
_LEASE, _TICKET = "lease-", "ticket-"
# How often a job tries to take CPUs if other jobs are faster, and the longest pause between tries.
_MOST_DECISIONS, _PAUSE_SECONDS = 20, 0.05

Decision = TypeVar("Decision")


def leases_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the leases; None if there are none to be.

    Raises:
        ValueError: POPRUN_LEASES is neither ``none`` nor an absolute path.
    """
    given = environ.get(PLACE_VARIABLE, "")
    if given.lower() == _NONE:
        return None
    if given:
        if not given.startswith("/") or "\0" in given:
            raise ValueError(f"{PLACE_VARIABLE} {given!r}: expected an absolute path, or none")
        return Path(given)
    base = next((base for base in _BASES if os.access(base, os.W_OK | os.X_OK)), _BASES[-1])
    return Path(base, _FOLDER_NAME)


def this_process(program: str) -> Holder:
    """Return who this process is, as the launcher of ``program``."""
    return _holder(os.getpid(), program)


def parent_process(program: str, run_id: str) -> Holder:
    """Return who started this process, as what is above all instances of ``program`` here."""
    return _holder(os.getppid(), program)._replace(run_id=run_id)


def _holder(pid: int, program: str) -> Holder:
    started = _parent_and_start(pid)
    return Holder(pid=pid, process_start=started[1] if started else 0, program=program)


def entry_of(name: str, user: str, text: bytes) -> Holding | Waiter | None:
    """Return the lease or ticket that stands in the file ``name``; None if it is neither."""
    if name.startswith(_LEASE):
        return holding_of(name, user, text)
    return waiter_of(name, user, text) if name.startswith(_TICKET) else None


class OvertakenError(Exception):
    """Another job has taken the same CPUs at the same moment, so the decision is void."""


class Lease:
    """CPUs that this process has to itself until ``close``, or until it is dead."""

    def __init__(self, folder: LockedFolder | None, entry: Holding | None, descriptor: int) -> None:
        self._folder, self._entry, self._descriptor = folder, entry, descriptor
        self.waited_seconds = 0.0  # by its job, before it got this

    @classmethod
    def nothing(cls) -> Lease:
        """Return what a job has where no leases are kept."""
        return cls(None, None, -1)

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs; none where no leases are kept."""
        return () if self._entry is None else self._entry.cpus

    def name_run(self, run_id: str) -> None:
        """Say to others which run it is."""
        if self._folder is None or self._entry is None:
            return
        holder = self._entry.holder._replace(run_id=run_id)
        self._entry = self._entry._replace(holder=holder)
        # It counts as it is, too.
        with contextlib.suppress(OSError), self._folder.alone():
            self._folder.rewrite(self._descriptor, text_of(self._entry))

    def close(self) -> None:
        """Give the CPUs back; once more does nothing."""
        if self._folder is not None and self._entry is not None:
            self._folder.remove(self._entry.name, self._descriptor)
            self._folder.close()
        self._folder = self._entry = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ticket:
    """The place of this process among those that wait, until ``close``, or until it is dead."""

    def __init__(self, folder: LockedFolder, entry: Waiter, descriptor: int) -> None:
        self.name = entry.name
        self.place = entry.place
        self._folder, self._descriptor = folder, descriptor
        self._is_open = True

    def close(self) -> None:
        """Leave the queue; once more does nothing."""
        if self._is_open:
            self._folder.remove(self.name, self._descriptor)
        self._is_open = False


class Book:
    """Who holds and who waits, as it was when the mutex was taken, and until it is given back.

    ``opened`` makes a book. If ``is_alone`` is false, other processes may
    take CPUs meanwhile. If this process runs within an instance of another job, the lease of that
    job is in ``outer`` and not in ``holdings``, because this process may use its CPUs.
    """

    def __init__(self, folder: LockedFolder, *, is_alone: bool = True) -> None:
        self._folder = folder
        # By number: asking for names may take seconds, and everybody waits for the mutex.
        living = folder.living(sweeps=is_alone)
        found = [entry_of(name, str(uid), text) for name, uid, text in living]
        holdings = [each for each in found if isinstance(each, Holding)]
        waiters = [each for each in found if isinstance(each, Waiter)]
        holdings.sort(key=lambda each: (each.since, each.name))
        above = _ancestors() if holdings else frozenset()
        is_outer = [(h.holder.pid, h.holder.process_start) in above for h in holdings]
        self.outer = tuple(h for h, is_so in zip(holdings, is_outer, strict=True) if is_so)
        self.holdings = tuple(h for h, is_so in zip(holdings, is_outer, strict=True) if not is_so)
        self._outer = self.outer[-1].name if self.outer else ""
        self.waiters = tuple(sorted(waiters, key=lambda each: each.place))

    @property
    def held(self) -> frozenset[int]:
        """The CPUs that others hold."""
        return frozenset(cpu for each in self.holdings for cpu in each.cpus)

    def ahead_of(self, ticket: Ticket | None) -> tuple[Waiter, ...]:
        """Return who came before the owner of ``ticket``; all who wait for one without.

        Jobs within another one wait for one another only: its CPUs are free for nobody else. Who
        is stopped (``Ctrl-Z``) cannot go first, and keeps nobody waiting.
        """
        rivals = (each for each in self.waiters if each.outer == self._outer)
        if ticket is not None:
            rivals = (each for each in rivals if each.place < ticket.place)
        return tuple(each for each in rivals if not _is_stopped(each.holder))

    def take(
        self,
        holder: Holder,
        cpus: Sequence[int],
        numa_nodes: Sequence[int],
        *,
        is_shared: bool = False,
    ) -> Lease:
        """Give CPUs to this process; what others hold is the caller's to look at.

        Raises:
            OvertakenError: another job has taken some of the CPUs since the book was opened.
            OSError: no lease can be kept.
        """
        entry = Holding(
            name=f"{_LEASE}{holder.pid}-{os.urandom(4).hex()}",
            user="",
            holder=holder,
            cpus=tuple(sorted(cpus)),
            numa_nodes=tuple(sorted(numa_nodes)),
            since=time.time(),
            is_shared=is_shared,
        )
        descriptor = self._folder.make(entry.name, text_of(entry))
        try:
            # Each job makes its file before it looks for others. Of two jobs that take CPUs at the
            # same time without the mutex, at least one therefore sees the other.
            if not is_shared and self._is_overtaken(entry):
                raise OvertakenError
            return Lease(LockedFolder(self._folder.path), entry, descriptor)
        except (OSError, OvertakenError):
            self._folder.remove(entry.name, descriptor)
            raise

    def _is_overtaken(self, entry: Holding) -> bool:
        """Return whether another lease of these CPUs was made since the book was opened."""
        known = {each.name for each in (*self.outer, *self.holdings, entry)}
        others = self._folder.living(sweeps=False, except_for=known)
        found = (entry_of(name, str(uid), text) for name, uid, text in others)
        return any(
            isinstance(each, Holding) and not set(each.cpus).isdisjoint(entry.cpus)
            for each in found
        )

    def queue(self, holder: Holder) -> Ticket:
        """Let this process wait behind all who wait now.

        Raises:
            OSError: no ticket can be kept.
        """
        # Tickets that all have the highest number are served in the order of their times.
        number = max((each.number for each in self.waiters), default=0) + 1
        number = min(number, MAX_NUMBER)
        entry = Waiter(
            name=f"{_TICKET}{holder.pid}-{os.urandom(4).hex()}",
            user="",
            holder=holder,
            number=number,
            since=time.time(),
            outer=self._outer,
        )
        return Ticket(self._folder, entry, self._folder.make(entry.name, text_of(entry)))


@contextlib.contextmanager
def opened(folder: LockedFolder) -> Iterator[Book]:
    """Open the book for this process alone, or shared if another user keeps the mutex locked.

    Raises:
        OSError: it cannot be read.
    """
    with folder.alone() as is_alone:
        yield Book(folder, is_alone=is_alone)


def decided(folder: LockedFolder, decide: Callable[[Book], Decision]) -> Decision:
    """Return the result of ``decide``; call it again if another job took the CPUs first.

    Raises:
        OSError: the book cannot be read, or other jobs were faster every time.
    """
    for _ in range(_MOST_DECISIONS):
        with contextlib.suppress(OvertakenError), opened(folder) as book:
            return decide(book)
        # The pause is random, so that two jobs in conflict do not retry at the same moment.
        time.sleep(_PAUSE_SECONDS * os.urandom(1)[0] / 255)
    raise OSError(errno.EBUSY, "other jobs take CPUs all the time", str(folder.path))


@functools.cache
def user_name(user: str) -> str:
    """Return the name of the user of an entry; not to be asked for under the mutex."""
    import pwd

    try:
        return pwd.getpwuid(int(user)).pw_name
    except (KeyError, ValueError, OverflowError):
        return user


def _ancestors() -> frozenset[tuple[int, int]]:
    """Return id and start of the processes above this one."""
    found: set[tuple[int, int]] = set()
    read = _parent_and_start(os.getpid())
    while read is not None and read[0] > 0:
        parent = read[0]
        read = _parent_and_start(parent)
        if read is not None:
            found.add((parent, read[1]))
    return frozenset(found)


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """Return a process's parent, and its start in clock ticks since the boot."""
    fields = _stat(pid)
    return (int(fields[1]), int(fields[19])) if fields else None


def _is_stopped(holder: Holder) -> bool:
    """Tell whether a job's process is stopped, as far as it can be seen from here."""
    fields = _stat(holder.pid)
    return bool(fields) and fields[0] in (b"T", b"t") and int(fields[19]) == holder.process_start


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process after its name (proc(5)); none if it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
