"""The loop that sends and receives the data of all channels of one rank.

A thread that waits for a message sends and receives for all channels while it waits. So the wait
does not depend on another thread. While no thread waits, a background thread sends and receives.
When a rank ends, the kernel closes its connections. When a host goes down, the connections to its
ranks stay open, but data no longer arrives over them.
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

# The background thread sends and receives only if the last wait ended at least this long ago. So
# the background thread does not compete with a new wait that begins shortly after the last wait.
_LINGER_SECONDS = 0.002
# _LOOK_SECONDS is the interval between two searches for ranks that have not joined yet.
# _SLEEP_SECONDS is the longest time for which a thread waits for events.
_LOOK_SECONDS, _SLEEP_SECONDS = 0.02, 1.0
# The interval, in seconds, between two checks whether the other hosts still answer.
_SILENCE_CHECK_SECONDS = 1.0
# When this rank leaves the group, it sends its last messages for at most this number of seconds.
# Afterwards, threads that wait for messages have the same number of seconds to end their waits.
_FLUSH_SECONDS = 5.0


class Post(Receiver, Protocol):
    """The object that handles arriving data and the loss of ranks."""

    def on_lost(self, rank: int) -> None:
        """Handle the loss of a rank."""

    def tell(self) -> None:
        """Complete the futures of complete sends and receives.

        The caller must not hold the lock of ``Traffic``.
        """


class Traffic:
    """Exchanges headers and bytes between this rank and the other ranks.

    Args:
        endpoint: The endpoint that makes connections with other ranks.
        post: The object that handles arriving data. The lock is held during calls of its methods,
            except ``tell``.
        memory: The object that reads the memory of other processes; None if such reads are
            disabled.

    Attributes:
        lock: Protects the state of this object and of ``post``.
        gone: The ranks that cannot be reached any more.
        leaving: The ranks that have left the group normally.
        silent: The ranks that cannot be reached because their host does not answer.
        is_closed: Whether this rank has left the group.
    """

    def __init__(self, endpoint: Endpoint, post: Post, memory: PeerMemory | None) -> None:
        self.lock = threading.RLock()
        self.gone: set[int] = set()
        self.leaving: set[int] = set()
        self.silent: set[int] = set()
        self.is_closed = False
        self._endpoint, self._post, self._memory = endpoint, post, memory
        # This lock ensures that only one thread at a time reads the memory of other processes.
        self.reading = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._outward: dict[int, Channel] = {}
        self._inward: dict[int, Channel] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiters, self._waited_at, self._one_moves = 0, 0.0, False
        self._looked_at = self._heard_at = 0.0
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
        """Start the background thread. ``post`` must be fully initialised before this call."""
        self._thread.start()

    # --- Sending ------------------------------------------------------------------------------

    def channel_to(self, rank: int) -> Channel:
        """Return the channel to a rank. The channel queues data until the rank is connected."""
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
        """Call ``Channel.send``, unless the rank of the channel cannot be reached any more."""
        if channel.rank not in self.gone:
            try:
                channel.send(header, data, on_sent)
                self._watch(channel)
            except ConnectionLostError as error:
                self._lose(channel.rank, is_silent=error.is_silent)

    def later(self, job: Callable[[], None]) -> None:
        """Let the thread that handles the traffic call ``job`` later, without holding the lock."""
        self._jobs.append(job)
        os.eventfd_write(self._wake, 1)

    def stir(self) -> None:
        """Wake the thread that handles the traffic; the thread checks whether its wait is over."""
        if self._one_moves:
            os.eventfd_write(self._wake, 1)

    # --- Handling traffic ---------------------------------------------------------------------

    def wait(
        self, is_done: Callable[[], bool], limit: Callable[[], float], give_up: Callable[[], None]
    ) -> None:
        """Send and receive for all channels until ``is_done`` returns True.

        Args:
            is_done: A function that tells whether the wait is over.
            limit: A function that returns the time limit of the wait in seconds. The limit may
                change during the wait.
            give_up: A function to call at the time limit. Afterwards, ``is_done`` must return True.
        """
        wait = WaitTime()
        with self.lock:
            self._waiters += 1
            try:
                while not is_done():
                    left = limit() - wait.seconds()
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
        """Send and receive for all channels, without waiting for events."""
        with self.lock:
            if self.is_closed or self._one_moves:
                return
            self._waiters += 1
            try:
                self._move_for_all(0.0)
            finally:
                self._waiters -= 1

    def _move_for_all(self, seconds: float) -> None:
        """Handle traffic for all waiting threads, and then wake them to check their messages."""
        self._one_moves = True
        self.lock.release()
        try:
            self._move(seconds)
        finally:
            self.lock.acquire()
            self._one_moves = False
            if self._waiters > 1:
                self._changed.notify_all()
        # The lock is released before jobs and callbacks run, because a callback may itself wait for
        # a message.
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
        """Wait at most ``seconds`` for events, and then receive and send data."""
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
            if time.monotonic() - self._heard_at > _SILENCE_CHECK_SECONDS:
                self._check_silence()

    def _do_jobs(self) -> None:
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread has removed the last job
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
            except ConnectionLostError as error:
                self._lose(channel.rank, is_silent=error.is_silent)

    def _check_silence(self) -> None:
        """Treat ranks as lost if their hosts do not answer."""
        self._heard_at = time.monotonic()
        for channel in list(self._channels.values()):
            if channel.rank in self.gone:  # the rank's other channel failed the check
                continue
            try:
                channel.check_silence()
            except ConnectionLostError:
                self._lose(channel.rank, is_silent=True)

    def _watch(self, channel: Channel) -> None:
        """Register the channel's connection for the epoll events that the channel needs."""
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
        """Listen over TCP if necessary, and connect to ranks that have joined."""
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
        """Record that a rank cannot be reached."""
        # The other rank may have left the group normally, or its process may have ended. This rank
        # cannot distinguish the two cases, and records that the other rank has left.
        if rank not in self.gone:
            self.leaving.add(rank)
        self._lose(rank)

    def _take_answers(self) -> None:
        """Open the channels to the ranks on other hosts that have accepted a connection."""
        for rank, connection in self._endpoint.answers():
            channel = self._outward.get(rank)
            if connection is None:
                self._miss(rank)
            elif channel is None:  # the rank was lost while the connection was being opened
                connection.close()
            else:
                self._open(channel, connection)

    def _welcome(self) -> None:
        """Open a channel for each rank that has connected to this rank."""
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

    def _lose(self, rank: int, *, is_silent: bool = False) -> None:
        """Handle the last data that a lost rank has sent, and add the rank to ``gone``."""
        channels = [known[rank] for known in (self._outward, self._inward) if rank in known]
        if rank in self.gone and not channels:
            return
        self.gone.add(rank)
        if is_silent:
            self.silent.add(rank)
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
        """Tell all ranks that this rank leaves, and wait until the last messages are sent.

        Args:
            seconds: The time limit of the wait; -1 for the default.
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
        """Close the connections. ``wait`` must not be called afterwards."""
        end = time.monotonic() + _FLUSH_SECONDS
        with self.lock:
            self.is_closed = True
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            # The connections are closed only after all waits have ended, because the waiting
            # threads use the connections.
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
        """Close all connections and stop listening."""
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
    """Close the connections in a forked child.

    Otherwise the child would keep the connections open after its parent process has ended.
    """
    traffic = reference()
    if traffic is not None:
        traffic.close_sockets()
