"""The wrappers of a job, which several attempts at the job may use one after another.

A wrapper that has run a program starts the next one much faster than a new wrapper does. An attempt
therefore uses the wrappers of the attempt before, and mpirun starts only the missing wrappers.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poprun_py.instance.job_folders import JobFolder
from poprun_py.running.supervise.control_channel import ControlChannel, WrapperEvents
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launcher_folder import (
    make_launcher_folder,
    make_shared_memory_folder,
)
from poprun_py.running.supervise.mpirun_process import Mpirun

# The seconds that mpirun has to end after the last instance has ended, and fewer seconds after the
# loss of a host, because mpirun's daemon on a lost host never answers.
MPIRUN_SECONDS, MPIRUN_SECONDS_AFTER_LOSS = 10.0, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The wrappers of the instances of the next attempt.

    Attributes:
        kept: Maps the index of an instance to the index that its wrapper had before.
        missing: The instances without a wrapper.
    """

    kept: Mapping[int, int]
    missing: tuple[int, ...]


def assign(connected: Collection[int], before: Sequence[str], after: Sequence[str]) -> Assignment:
    """Assign as many wrappers as possible to the instances of the next attempt.

    A wrapper keeps its position among the wrappers of its host, if an instance has this position,
    because the host's first wrapper leases the CPUs of the host.

    Args:
        connected: The instances of the last attempt whose wrappers are connected.
        before: The host of each instance in the last attempt.
        after: The host of each instance in the next attempt.
    """
    free = {place: index for index, place in _places(before) if index in connected}
    wanted = dict(_places(after))
    kept = {index: free.pop(place) for index, place in wanted.items() if place in free}
    for index in (each for each in wanted if each not in kept):
        host = after[index]
        if place := next((each for each in free if each[0] == host), None):
            kept[index] = free.pop(place)
    return Assignment(kept=kept, missing=tuple(each for each in wanted if each not in kept))


def _places(hosts: Sequence[str]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield each instance with its host and its position among the instances of the host."""
    counts: Counter[str] = Counter()
    for index, host in enumerate(hosts):
        yield index, (host, counts[host])
        counts[host] += 1


class JobProcesses:
    """The mpirun processes, the connections to the wrappers, and their folders and selector.

    Attributes:
        control: The connections to the wrappers, if these are kept from the attempt before; else
            None until ``open_control`` is called.
        is_kept: Whether the next attempt may use the wrappers again.
        kept: Maps each instance whose wrapper is kept from the attempt before to the index that the
            wrapper had there.
        words: The command of the mpirun that starts the missing wrappers; empty if none is missing.
        is_whole: Whether one mpirun has started the wrappers of all instances, as MPI needs it.
    """

    def __init__(self) -> None:
        self.control: ControlChannel | None = None
        self.is_kept = False
        self.kept: Mapping[int, int] = {}
        self.words: tuple[str, ...] = ()
        self.is_whole = True
        self._mpirun: Mpirun | None = None
        self._earlier: list[Mpirun] = []  # the mpiruns that started other wrappers of the job
        self._folder: JobFolder | None = None
        self._selector: selectors.BaseSelector | None = None
        self._job: Job | None = None  # the attempt before, or the running attempt
        self._next_hosts: tuple[str, ...] = ()  # of the wrappers that were started ahead
        self._opened = contextlib.ExitStack()

    @property
    def folder(self) -> Path:
        """The launcher's folder; made by ``prepare``."""
        assert self._folder is not None
        return Path(self._folder.path)

    @property
    def selector(self) -> selectors.BaseSelector:
        """The selector of the supervisor's loop; made by ``open_selector``."""
        assert self._selector is not None
        return self._selector

    def open_selector(self) -> selectors.BaseSelector:
        """Return the selector of the supervisor's loop; make it, unless it is kept.

        Raises:
            OSError: The process has too many open files.
        """
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
        return self._selector

    def prepare(self, job: Job) -> None:
        """Choose the kept wrappers that an attempt uses; make the folder, unless it is kept.

        Raises:
            StartError: The folder cannot be made.
        """
        self.kept, self.words = {}, job.command.words
        if self.is_kept and not self._use_kept(job):
            self.dismiss(is_restarted=True)
        self.is_kept, self._job, self.is_whole = False, job, self._is_whole(job)
        self._next_hosts = ()
        if self._folder is None:
            self._folder = make_launcher_folder()

    def _use_kept(self, job: Job) -> bool:
        """Choose the wrappers for an attempt; tell whether the attempt can use any of them."""
        before = self._job
        assert before is not None
        for key, events in self.selector.select(0):  # a wrapper may have been killed meanwhile
            key.data(key.fileobj, events)
        for each in self._earlier:
            each.wait(0)
        found = self._assign(job)
        if not found.kept:
            return False
        if job.command.words_for is not None:
            self.kept = found.kept
            self.words = job.command.words_for(found.missing) if found.missing else ()
        elif job.command.words == before.command.words and not found.missing:
            self.kept, self.words = found.kept, ()
        return bool(self.kept)

    def _assign(self, job: Job) -> Assignment:
        """Assign the connected wrappers to the instances of the next attempt."""
        control, before = self.control, self._job
        assert control is not None
        assert before is not None
        is_unreachable = control.address.startswith("unix:") and job.hosts.listen is not None
        if is_unreachable:
            # Only a job that has had other hosts listens for wrappers of other hosts.
            return Assignment(kept={}, missing=())
        peers = control.all_peers.items()
        connected = [index for index, peer in peers if peer.connection.is_open]
        return assign(connected, (*before.hosts.given, *self._next_hosts), job.hosts.given)

    def start_next(
        self,
        start: Callable[[Job, tuple[str, ...]], Mpirun],
        job: Job,
        events: WrapperEvents,
    ) -> tuple[Mpirun, tuple[int, ...]] | None:
        """Start the missing wrappers of the next attempt while the present attempt runs.

        Args:
            start: Starts mpirun for a job, with the words of a command.
            job: The next attempt.
            events: Handles the events of the wrappers.

        Returns:
            The mpirun and the instances of the wrappers, in the order of the wrappers' indices;
            None if no wrapper is missing, if mpirun can only start all of them, or if wrappers of
            the present attempt are still to connect.
        """
        assert self.control is not None
        if not self.control.is_complete:
            # Their ranks may be those of wrappers of the next attempt.
            return None
        self.control.dismiss_next()
        self._next_hosts = ()
        missing = self._assign(job).missing
        if not missing or job.command.words_for is None:
            return None
        self._next_hosts = tuple(job.hosts.given[index] for index in missing)
        self.control.await_next(missing, events)
        mpirun = start(job, job.command.words_for(missing))
        self._earlier.append(mpirun)
        self._opened.callback(mpirun.end)
        return mpirun, missing

    def _is_whole(self, job: Job) -> bool:
        before = self._job
        if not self.kept or before is None:
            return True
        has_same = not self.words and not self._next_hosts
        return self.is_whole and has_same and job.hosts.given == before.hosts.given

    def open_control(self, control: ControlChannel, job: Job) -> None:
        """Let the wrappers that mpirun will start connect to ``control``."""
        self.control = control
        self._opened.callback(control.close)
        control.open(self.selector, self.folder, job.hosts.listen)
        token = control.token if job.hosts.listen is not None else ""
        if (memory := make_shared_memory_folder(self.folder, token)) is not None:
            self._opened.callback(memory.remove)

    @property
    def mpirun(self) -> Mpirun | None:
        """The last mpirun that was started; None before its start."""
        return self._mpirun

    @mpirun.setter
    def mpirun(self, mpirun: Mpirun) -> None:
        if self._mpirun is not None:
            self._earlier.append(self._mpirun)
        self._mpirun = mpirun
        self._opened.callback(mpirun.end)

    @property
    def end_seconds(self) -> float:
        """The seconds that mpirun has to end after the wrappers."""
        peers = self.control.peers.values() if self.control is not None else ()
        has_lost = not self.is_whole or any((each.instance_end or {}).get("lost") for each in peers)
        return MPIRUN_SECONDS_AFTER_LOSS if has_lost else MPIRUN_SECONDS

    def end(self) -> None:
        """End every mpirun and close the connections to the wrappers, unless these are kept."""
        if not self.is_kept:
            for each in self._earlier:
                # A daemon on a lost host does not answer.
                each.wait(MPIRUN_SECONDS_AFTER_LOSS)
                each.expect_end(0, time.monotonic())
            self._earlier.clear()
            self._opened.close()
            self.control = self._mpirun = None

    def close(self) -> None:
        """End every mpirun and remove the launcher's folder, unless the wrappers are kept."""
        if self.is_kept:
            return
        self.end()
        if self._selector is not None:
            self._selector.close()
        if self._folder is not None:
            self._folder.remove()
        self._folder = self._selector = None

    def dismiss(self, *, is_restarted: bool) -> None:
        """End kept wrappers; ``is_restarted`` tells them whether to keep states in memory."""
        if not self.is_kept:
            return
        if self.control is not None and self._mpirun is not None:
            self._mpirun.begin_next(lambda _: None, lambda _: None)
            self.control.say_bye(is_restarted=is_restarted)
            self._mpirun.expect_end(self.end_seconds, time.monotonic())
            self.control.wait_for_ends(MPIRUN_SECONDS)
            self._mpirun.wait(self.end_seconds)
        self.is_kept = False
        self.close()
