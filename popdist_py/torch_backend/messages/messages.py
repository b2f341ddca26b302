"""Send and receive between any two ranks of a group, independent of its collectives.

A small message is an inline message: its bytes are sent right after its header. The receiver stores
the bytes until a receive matches the message. A large message is announced: only its header is
sent, and its bytes stay in the sender's memory. If the kernel permits it, the receiver reads the
bytes directly from the sender's memory. Otherwise the receiver asks the sender to send the bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch

from popdist_py import activities
from popdist_py.collectives.between_hosts.mesh import ConnectionLostError
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.collectives.within_host.peer_memory import PeerMemory
from popdist_py.environment import CollectiveSettings
from popdist_py.errors import PopdistError
from popdist_py.torch_backend.messages.channels import INLINE_BYTES, Channel, Header, Kind
from popdist_py.torch_backend.messages.endpoint import Endpoint
from popdist_py.torch_backend.messages.mailbox import Mailbox
from popdist_py.torch_backend.messages.message_errors import MessageErrors, contents
from popdist_py.torch_backend.messages.message_work import MessageWork
from popdist_py.torch_backend.messages.traffic import Traffic

__all__ = ["Messages"]

Key = TypeVar("Key")

# The bytes of a small message wait at the receiver until a receive matches the message. At most
# this number of bytes from one sender may wait at a receiver. If a message would exceed this limit,
# the sender sends only the header of the message, and the receiver fetches the bytes later.
_MOST_UNCONSUMED_BYTES = 16 * 1024 * 1024
# A receiver sends a report to a sender each time that receives have consumed this number of bytes.
_CONSUMED_BYTES = 1024 * 1024


@dataclass(frozen=True, eq=False)
class _Message:
    """The header of an arrived message, with its bytes or with the channel to fetch them from."""

    source: int
    header: Header
    data: bytes
    channel: Channel | None


class Messages:
    """The sends and receives of one rank in one group.

    Args:
        store: The store that torch made for this group.
        rank: The rank of this process.
        size: The number of ranks.
        settings: The settings of the group.
        limits: The time limits for all waits of the group, and the names of its ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        settings: CollectiveSettings,
        limits: WaitLimits,
    ) -> None:
        self._errors = MessageErrors(rank, limits)
        self._rank, self._size, self._settings = rank, size, settings
        self._limits = limits
        self._endpoint = Endpoint(store, rank, size, settings.network)
        self._memory: PeerMemory | None = None
        self._traffic: Traffic | None = None
        self._starting = threading.Lock()
        self._is_closed = False
        self._mailbox: Mailbox[_Message, MessageWork] = Mailbox()
        # The keys of ``_works`` are the sends and receives that are not complete. ``_complete``
        # contains the complete sends and receives whose futures are not complete yet.
        self._works: dict[MessageWork, None] = {}
        self._complete: deque[MessageWork] = deque()
        self._numbers = count(1)
        self._announced: dict[int, MessageWork] = {}
        self._requested: dict[tuple[int, int], MessageWork] = {}

    # --- Calls --------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> MessageWork:
        """Start sending a tensor.

        Args:
            tensor: The tensor, which must not change before the work is complete.
            to: The rank of the receiver, which may be this rank.
            tag: The tag of the message, which must not be negative.

        Raises:
            ValueError: The rank or the tag is out of range.
            GroupClosedError: This rank has left the group.
        """
        self._check(to, tag)
        work = MessageWork(self, "send", tensor, to, tag)
        size = work.data.nbytes
        dtype = work.dtype.encode()
        header = Header(Kind.INLINE, tag, next(self._numbers), work.count, size, dtype=dtype)
        with self._using_traffic() as traffic:
            self._works[work] = None
            if to == self._rank:
                self._deliver(_Message(to, header, bytes(work.data), None))
                self._finish(work)
                return work
            if to in traffic.gone:
                self._finish(work, self._lost(work, to))
                return work
            channel = traffic.channel_to(to)
            if size <= INLINE_BYTES and channel.unconsumed + size <= _MOST_UNCONSUMED_BYTES:
                channel.unconsumed += size
                traffic.send(channel, header, work.data, lambda: self._finish(work))
            else:
                self._announced[header.number] = work
                traffic.send(channel, header._replace(kind=Kind.ANNOUNCED, address=work.address))
        return work

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Start receiving a message into a tensor.

        Args:
            tensor: A tensor with the number of elements and the dtype of the message.
            source: The rank of the sender; None for any rank.
            tag: The tag of the message.

        Raises:
            ValueError: The rank or the tag is out of range.
            GroupClosedError: This rank has left the group.
        """
        self._check(source, tag)
        work = MessageWork(self, "receive", tensor, source, tag)
        with self._using_traffic() as traffic:
            self._works[work] = None
            message = self._mailbox.post(work, source, tag)
            if message is not None:
                self._match(work, message)
                return work
            # Open a channel to each rank that may send the message. When one of these ranks ends,
            # its channel closes, and the receive then fails instead of waiting for ever.
            for rank in range(self._size) if source is None else [source]:
                if rank != self._rank and rank not in traffic.gone:
                    traffic.channel_to(rank)
            if source is not None and source in traffic.gone:
                self._finish(work, self._lost(work, source))
            elif source is None:
                self._fail_if_nobody_can_send(work)
        return work

    def close(self, reason: str = "", seconds: float = -1) -> None:
        """Leave the group. Incomplete sends and receives fail.

        Args:
            reason: Why this rank leaves, for error messages; empty if the program destroys the
                group.
            seconds: The time limit for sending the last messages; -1 for the default.
        """
        with self._starting:
            traffic, was_closed, self._is_closed = self._traffic, self._is_closed, True
        if was_closed:  # another thread may still be leaving the group
            return
        if traffic is None:
            self._endpoint.close(farewell=Header(Kind.LEAVING).pack())
        elif not traffic.is_closed:
            traffic.say_goodbye(seconds)
            with traffic.lock:
                for work in list(self._works):
                    self._finish(work, self._errors.left(work, reason))
            self.tell()
            traffic.close()

    @contextmanager
    def _using_traffic(self) -> Iterator[Traffic]:
        with self._starting:
            if self._is_closed:
                raise self._errors.closed()
            if self._traffic is None:
                self._memory = PeerMemory() if self._settings.shared_memory else None
                self._traffic = Traffic(self._endpoint, self, self._memory)
                self._traffic.start()
        with self._traffic.lock:
            yield self._traffic
        self.tell()

    def _check(self, rank: int | None, tag: int) -> None:
        if rank is not None and not 0 <= rank < self._size:
            raise ValueError(f"invalid rank {rank}: expected a rank from 0 to {self._size - 1}")
        if not 0 <= tag < 2**63:
            raise ValueError(f"invalid tag {tag}: expected a number from 0 to 2**63 - 1")

    # --- Calls of a work ----------------------------------------------------------------------

    def wait(self, work: MessageWork, seconds: float | None) -> None:
        """Return once a send or receive is complete.

        The send or receive fails after ``seconds``; None means the time-out of the group.
        """
        assert self._traffic is not None

        def limit() -> float:
            # ``WaitLimits.seconds`` is not used, because its different limits are only for
            # collectives, in which the instances must agree on the missing instance.
            return self._limits.hang_timeout if seconds is None else seconds

        # This wait need not call ``WaitLimits.check_abort``. An abort of the group calls ``close``,
        # which makes all incomplete sends and receives fail and so ends this wait.
        with activities.awaiting_background():
            self._traffic.wait(lambda: work.is_done, limit, lambda: self._give_up(work, limit()))
        self.tell()

    def look(self) -> None:
        """Complete the sends and receives that can be completed without waiting."""
        if self._traffic is not None:
            self._traffic.look()

    def tell(self) -> None:
        """Complete the futures of complete sends and receives.

        The caller must not hold the lock of ``Traffic``.
        """
        assert self._traffic is not None
        while self._complete:
            try:
                work = self._complete.popleft()
            except IndexError:  # another thread has removed the last entry
                break
            self._traffic.stir()
            work.tell()

    def _finish(self, work: MessageWork, error: BaseException | None = None) -> None:
        if work in self._works:
            del self._works[work]
            work.finish(error)
            self._complete.append(work)

    def _give_up(self, work: MessageWork, seconds: float) -> None:
        self._mailbox.withdraw(work, work.peer, work.tag)
        self._finish(work, self._errors.late(work, seconds))

    # --- Arriving messages --------------------------------------------------------------------

    def on_header(self, channel: Channel, header: Header, data: memoryview) -> None:
        """Handle a header that has arrived. For an inline message, ``data`` contains its bytes."""
        assert self._traffic is not None
        if header.kind in (Kind.INLINE, Kind.ANNOUNCED):
            self._deliver(_Message(channel.rank, header, bytes(data), channel))
        elif header.kind == Kind.CONSUMED:
            channel.unconsumed -= header.size
        elif header.kind == Kind.LEAVING:
            self._traffic.leaving.add(channel.rank)
        elif (work := self._announced.get(header.number)) is None:
            return
        elif header.kind == Kind.REQUEST:
            answer = Header(Kind.DATA, header.tag, header.number, work.count, work.data.nbytes)
            self._traffic.send(channel, answer, work.data, lambda: self._sent(header.number))
        elif header.kind == Kind.DONE:
            self._sent(header.number)
        elif header.kind == Kind.MISMATCH:
            theirs = contents(header.elements, _name(header))
            self._sent(header.number, self._errors.mismatch(work, self._rank, channel.rank, theirs))

    def room_for(self, channel: Channel, header: Header) -> memoryview:
        """Return the buffer for the bytes of a message that this rank has requested.

        If the receive has already failed, the buffer is a temporary one, and the bytes are lost.

        Raises:
            ConnectionLostError: This rank has not requested the bytes.
        """
        work = self._requested.get((channel.rank, header.number))
        if work is None:
            raise ConnectionLostError(channel.rank)
        return memoryview(bytearray(work.data.nbytes)) if work.is_done else work.data

    def on_filled(self, channel: Channel, header: Header) -> None:
        """Complete a receive after all its bytes have arrived."""
        self._finish(self._requested.pop((channel.rank, header.number)))

    def on_lost(self, rank: int) -> None:
        """Make all sends to a lost rank and all receives from the lost rank fail."""
        for work in list(self._works):
            if work.peer == rank:
                self._mailbox.withdraw(work, rank, work.tag)
                self._finish(work, self._lost(work, rank))
            elif work.peer is None:
                self._fail_if_nobody_can_send(work)

        self._announced = _unfinished(self._announced)
        # Entries of other ranks stay even if their receives have failed, because these ranks may
        # still send the requested bytes.
        self._requested = {key: work for key, work in self._requested.items() if key[0] != rank}

    def _sent(self, number: int, error: BaseException | None = None) -> None:
        if number in self._announced:  # an invalid second answer of the receiver is ignored
            self._finish(self._announced.pop(number), error)

    def _deliver(self, message: _Message) -> None:
        work = self._mailbox.deliver(message, message.source, message.header.tag)
        if work is not None:
            self._match(work, message)

    def _match(self, work: MessageWork, message: _Message) -> None:
        """Copy a message to the tensor of its receive, or begin to read or request its bytes."""
        assert self._traffic is not None
        header, channel, work.peer = message.header, message.channel, message.source
        is_inline = header.kind == Kind.INLINE
        if is_inline and channel is not None:
            self._count_consumed(channel, header.size)
        found = header.elements, header.size, _name(header)
        if found != (work.count, work.data.nbytes, work.dtype):
            theirs = contents(header.elements, _name(header))
            self._finish(work, self._errors.mismatch(work, message.source, self._rank, theirs))
            if channel is not None and not is_inline:
                self._answer(channel, Kind.MISMATCH, header, work)
        elif is_inline or channel is None:
            work.data[:] = message.data
            self._finish(work)
        elif channel.peer_pid:
            self._traffic.later(lambda: self._read(work, channel, header))
        else:
            self._request(work, channel, header)

    def _read(self, work: MessageWork, channel: Channel, header: Header) -> None:
        """Read an announced message from its sender's memory.

        The caller must not hold the lock of ``Traffic``.
        """
        assert self._traffic is not None
        assert self._memory is not None
        if work.is_done:
            return
        is_permitted = True
        with self._traffic.reading:
            try:
                self._memory.read_bytes(channel.peer_pid, header.address, work.address, header.size)
            except ProcessLookupError:
                return  # the sender has ended; its closed channel makes the receive fail
            except OSError:
                is_permitted = False
        # If the sender has left the group, its memory at the address may contain other data.
        if channel.has_ended:
            return
        with self._traffic.lock:
            if is_permitted:
                self._finish(work)
                self._answer(channel, Kind.DONE, header, work)
            else:
                channel.peer_pid = 0
                self._request(work, channel, header)

    def _request(self, work: MessageWork, channel: Channel, header: Header) -> None:
        self._requested[channel.rank, header.number] = work
        self._answer(channel, Kind.REQUEST, header, work)

    def _answer(self, channel: Channel, kind: Kind, header: Header, work: MessageWork) -> None:
        """Send an answer to the sender of an announced message."""
        assert self._traffic is not None
        dtype = work.dtype.encode()
        self._traffic.send(
            channel, Header(kind, header.tag, header.number, work.count, dtype=dtype)
        )

    def _count_consumed(self, channel: Channel, size: int) -> None:
        assert self._traffic is not None
        channel.consumed += size
        if channel.consumed >= _CONSUMED_BYTES:
            self._traffic.send(channel, Header(Kind.CONSUMED, size=channel.consumed))
            channel.consumed = 0

    # --- Errors -------------------------------------------------------------------------------

    def _fail_if_nobody_can_send(self, work: MessageWork) -> None:
        """Make a receive from any rank fail if a rank was lost or if all other ranks have left."""
        assert self._traffic is not None
        gone = self._traffic.gone
        lost = sorted(gone - self._traffic.leaving)
        if lost or (gone and len(gone) == self._size - 1):
            self._mailbox.withdraw(work, None, work.tag)
            self._finish(work, self._lost(work, lost[0] if lost else max(gone)))

    def _lost(self, work: MessageWork, rank: int) -> PopdistError:
        assert self._traffic is not None
        if rank in self._traffic.silent:
            return self._errors.silent(work, rank)
        return self._errors.lost(work, rank, has_left=rank in self._traffic.leaving)


def _unfinished(works: dict[Key, MessageWork]) -> dict[Key, MessageWork]:
    return {key: work for key, work in works.items() if not work.is_done}


def _name(header: Header) -> str:
    """Return the name of the dtype that a header contains."""
    return header.dtype.rstrip(b"\0").decode(errors="replace")
