"""The traffic of one rank: its channels to and from the others, and who moves what they carry.

Who waits moves everything meanwhile, so that what it waits for needs no other thread; one thread
does so while nobody waits. A rank that ends is seen by the end of its connections.

Nothing here knows what a message is, or what matches what.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from popdist_py.collectives.between_hosts.mesh import ConnectionLostError
from popdist_py.collectives.waiting import WaitTime
from popdist_py.collectives.within_host.peer_memory import PeerMemory
from popdist_py.torch_backend.messages.channels import Channel, Header, Kind, Receiver
from popdist_py.torch_backend.messages.endpoint import Endpoint, Guest

__all__ = ["Post", "Traffic"]

# The thread takes over when nobody has waited for so long: a wait that soon follows another one
# finds nobody to compete with.
_LINGER_SECONDS = 0.002
# How often ranks are looked for that have not joined yet; how long to sleep at most.
_LOOK_SECONDS, _SLEEP_SECONDS = 0.02, 1.0
# So long may those take who must do something before this rank has left.
_FLUSH_SECONDS = 5.0


class Post(Receiver, Protocol):
    """Who takes what arrives."""

    def on_lost(self, rank: int) -> None:
        """Take note that nothing more comes from a rank."""

    def tell(self) -> None:
        """Do what must be done without the lock, after anything has moved."""


class Traffic:
    """Moves headers and bytes between this rank and others.

    Args:
        endpoint: where others connect to, and this rank connects.
        post: who takes what arrives; it is called with the lock held.
        memory: reads that of others, if that is permitted.

    Attributes:
        lock: protects everything that is changed here and by the post.
        gone: ranks that are reached no longer.
        leaving: ranks that have said goodbye.
        is_closed: whether this rank has left.
    """

    def __init__(self, endpoint: Endpoint, post: Post, memory: PeerMemory | None) -> None:
        self.lock = threading.RLock()
        self.gone: set[int] = set()
        self.leaving: set[int] = set()
        self.is_closed = False
        self._endpoint, self._post, self._memory = endpoint, post, memory
        # One reads the memory of others at a time.
        self.reading = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._outward: dict[int, Channel] = {}
        self._inward: dict[int, Channel] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiters, self._waited_at, self._one_moves = 0, 0.0, False
        self._looked_at = 0.0
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._channels: dict[int, Channel] = {}
        endpoint.use_store_beside_others()
        for descriptor in endpoint.descriptors:
            self._poll.register(descriptor, select.EPOLLIN)
        self._look_around()
        self._thread = threading.Thread(
            target=self._move_while_nobody_waits, name="popdist-messages", daemon=True
        )
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_sockets(reference))

    def start(self) -> None:
        """Start the thread, once the post is ready."""
        self._thread.start()

    # --- Sending ------------------------------------------------------------------------------

    def channel_to(self, rank: int) -> Channel:
        """Return the channel to a rank, connected as soon as the rank is known."""
        channel = self._outward.get(rank)
        if channel is None:
            channel = self._outward[rank] = Channel(rank, self._post)
            self._connect(channel)
        return channel

    def send(
        self,
        channel: Channel,
        header: Header,
        data: memoryview | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send over a channel as ``Channel.send`` does; to a rank that is gone nothing."""
        if channel.rank not in self.gone:
            try:
                channel.send(header, data, on_sent)
                self._watch(channel)
            except ConnectionLostError:
                self._lose(channel.rank)

    def later(self, job: Callable[[], None]) -> None:
        """Let whoever moves next call a function, without the lock."""
        self._jobs.append(job)
        os.eventfd_write(self._wake, 1)

    def stir(self) -> None:
        """Wake the thread that moves for all: what it waits for may be complete."""
        if self._one_moves:
            os.eventfd_write(self._wake, 1)

    # --- Moving -------------------------------------------------------------------------------

    def wait(
        self, is_done: Callable[[], bool], seconds: float, give_up: Callable[[], None]
    ) -> None:
        """Move messages until ``is_done``; ``give_up``, called after ``seconds``, makes it so."""
        wait = WaitTime()
        with self.lock:
            self._waiters += 1
            try:
                while not is_done():
                    left = seconds - wait.seconds()
                    if left <= 0:
                        give_up()
                    elif self._one_moves:
                        self._changed.wait(min(left, _SLEEP_SECONDS))
                    else:
                        self._move_for_all(min(left, _SLEEP_SECONDS))
            finally:
                self._waiters -= 1
                self._waited_at = time.monotonic()

    def look(self) -> None:
        """Move what can be moved at once."""
        with self.lock:
            if self.is_closed or self._one_moves:
                return
            self._waiters += 1
            try:
                self._move_for_all(0.0)
            finally:
                self._waiters -= 1

    def _move_for_all(self, seconds: float) -> None:
        """Move messages for all that wait; one of them goes on afterwards."""
        self._one_moves = True
        self.lock.release()
        try:
            self._move(seconds)
        finally:
            self.lock.acquire()
            self._one_moves = False
            if self._waiters > 1:
                self._changed.notify_all()
        # A callback may wait for a message itself.
        self.lock.release()
        try:
            self._do_jobs()
        finally:
            self.lock.acquire()

    def _move_while_nobody_waits(self) -> None:
        while not self.is_closed:
            if self._waiters or time.monotonic() - self._waited_at < _LINGER_SECONDS:
                time.sleep(_LINGER_SECONDS)
            else:
                self._move(_SLEEP_SECONDS)
                self._do_jobs()

    def _move(self, seconds: float) -> None:
        """Handle what has arrived and can be sent, after a wait of at most ``seconds``."""
        is_searching = self._is_searching()
        events = self._poll.poll(min(seconds, _LOOK_SECONDS) if is_searching else seconds)
        with self.lock:
            if self.is_closed:
                return
            for descriptor, event in events:
                self._handle(descriptor, event)
            if is_searching and time.monotonic() - self._looked_at > _LOOK_SECONDS:
                self._look_around()
            if self._endpoint.has_pending:
                self._welcome()

    def _do_jobs(self) -> None:
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread was quicker
                break
            job()
        self._post.tell()

    def _handle(self, descriptor: int, event: int) -> None:
        channel = self._channels.get(descriptor)
        if descriptor == self._wake:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif channel is None:
            self._take_answers()
            self._welcome()
        else:
            try:
                if event & select.EPOLLOUT:
                    channel.send_queued()
                if event & ~select.EPOLLOUT:
                    channel.receive()
                self._watch(channel)
            except ConnectionLostError:
                self._lose(channel.rank)

    def _watch(self, channel: Channel) -> None:
        """Be told of what the channel waits for."""
        events = select.EPOLLIN | (select.EPOLLOUT if channel.is_sending else 0)
        if channel.connection is not None and events != channel.events:
            descriptor = channel.connection.fileno()
            if channel.events:
                self._poll.modify(descriptor, events)
            else:
                self._channels[descriptor] = channel
                self._poll.register(descriptor, events)
            channel.events = events

    # --- Connections --------------------------------------------------------------------------

    def _is_searching(self) -> bool:
        return not self._endpoint.is_settled or any(
            channel.connection is None for channel in tuple(self._outward.values())
        )

    def _look_around(self) -> None:
        """Listen where it has turned out to be necessary, and connect to ranks that have joined."""
        self._looked_at = time.monotonic()
        self._endpoint.settle()
        self._take_answers()
        for channel in list(self._outward.values()):
            if channel.connection is None and channel.rank not in self.gone:
                self._connect(channel)

    def _connect(self, channel: Channel) -> None:
        probe = self._memory.probe_address if self._memory is not None else 0
        try:
            found = self._endpoint.connect(channel.rank, probe)
        except OSError:
            self._miss(channel.rank)
        else:
            if found is not None:
                self._open(channel, *found)

    def _open(self, channel: Channel, connection: socket.socket, claim: bytes = b"") -> None:
        try:
            channel.open(connection, claim)
            self._watch(channel)
        except ConnectionLostError:
            self._miss(channel.rank)

    def _miss(self, rank: int) -> None:
        """Take note that a rank cannot be reached."""
        # Whether it has left before anybody asked, or ended, can no longer be told.
        if rank not in self.gone:
            self.leaving.add(rank)
        self._lose(rank)

    def _take_answers(self) -> None:
        """Use the connections to ranks of other hosts that have answered."""
        for rank, connection in self._endpoint.answers():
            channel = self._outward.get(rank)
            if connection is None:
                self._miss(rank)
            elif channel is None:  # it was lost meanwhile
                connection.close()
            else:
                self._open(channel, connection)

    def _welcome(self) -> None:
        """Take in those who connect and are of the group."""
        for guest in self._endpoint.welcome():
            if guest.rank in self._inward:
                guest.connection.close()
                continue
            channel = self._inward[guest.rank] = Channel(guest.rank, self._post)
            channel.peer_pid = guest.pid if self._can_read(guest) else 0
            channel.open(guest.connection)
            self._watch(channel)

    def _can_read(self, guest: Guest) -> bool:
        if self._memory is None or not guest.pid or not guest.probe:
            return False
        with self.reading:
            return self._memory.works_with(guest.pid, guest.probe)

    def _lose(self, rank: int) -> None:
        """Take what a rank has sent before its end, and note that nothing more comes."""
        channels = [known[rank] for known in (self._outward, self._inward) if rank in known]
        if rank in self.gone and not channels:
            return
        self.gone.add(rank)
        self._welcome()
        channels = [known.pop(rank) for known in (self._outward, self._inward) if rank in known]
        for channel in channels:
            if channel.connection is not None:
                self._channels.pop(channel.connection.fileno(), None)
                try:
                    while channel.receive():
                        pass
                except ConnectionLostError:
                    pass
        for channel in channels:
            channel.close()
        self._post.on_lost(rank)

    # --- Leaving ------------------------------------------------------------------------------

    def say_goodbye(self, seconds: float = -1) -> None:
        """Tell all that this rank leaves, and give what was sent last some time.

        Args:
            seconds: at most so long; -1: until a rank that does not take it seems to have ended.
        """
        with self.lock:
            self._welcome()
            for channel in [*self._outward.values(), *self._inward.values()]:
                self.send(channel, Header(Kind.LEAVING))
        end = time.monotonic() + (_FLUSH_SECONDS if seconds < 0 else seconds)
        while self._is_flushing() and time.monotonic() < end:
            self._move(_LOOK_SECONDS)
            self._do_jobs()

    def close(self) -> None:
        """Close the connections; nobody may wait for anything any more."""
        end = time.monotonic() + _FLUSH_SECONDS
        with self.lock:
            self.is_closed = True
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            # Who has waited touches nothing afterwards.
            while self._waiters and time.monotonic() < end:
                self._changed.wait(_LOOK_SECONDS)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.close_sockets()
        self._poll.close()
        os.close(self._wake)
        if self._memory is not None:
            self._memory.close()

    def close_sockets(self) -> None:
        """Close all connections, and listen no longer."""
        for channel in [*self._outward.values(), *self._inward.values()]:
            channel.close()
        self._endpoint.close()

    def _is_flushing(self) -> bool:
        with self.lock:
            return self._endpoint.is_calling or any(
                channel.is_sending and channel.connection is not None
                for channel in [*self._outward.values(), *self._inward.values()]
            )


def _close_sockets(reference: weakref.ref[Traffic]) -> None:
    """Close the connections in a forked child: it would keep them open after its parent's end."""
    traffic = reference()
    if traffic is not None:
        traffic.close_sockets()
