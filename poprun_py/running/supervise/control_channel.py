"""The launcher's end of the control channel, over which launcher and wrappers exchange frames.

The control channel listens on a Unix socket in the launcher's folder. In a job of several hosts,
the control channel also listens on a network address until all instances have connected. Other
processes of this user may connect to the Unix socket as well, to inspect the job or to take over
the standard input of the launcher.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time

# The module hmac offers this function, too, but loads OpenSSL, which takes 3 ms of every launch.
from _operator import _compare_digest as compare_digest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.keyboard.keyboard_input import pass_on_stdin
from poprun_py.running.supervise.connection import Connection, Hello, Peer, parse_hello
from poprun_py.running.supervise.job_description import Hosts
from poprun_py.running.supervise.launcher_folder import SOCKET_NAME

if TYPE_CHECKING:
    from popdist_py.peers.gate import Gate

# The launcher checks at these intervals, in seconds, whether the other hosts of the job are still
# reachable: usually, and if a silent host counts as lost early.
_CHECK_SECONDS, _SHORT_CHECK_SECONDS = 1.0, 0.25
_ONE_HOST = Hosts()


class WrapperEvents(Protocol):
    """The events of connections to wrappers."""

    def connected(self, peer: Peer) -> None:
        """Handle a wrapper that has connected."""

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame from a wrapper; ``value`` is the payload as bytes or decoded JSON."""

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of the connection to a wrapper."""


class ChannelEvents(WrapperEvents, Protocol):
    """The events of a control channel, as the supervisor handles them."""

    def accept_failed(self, error: OSError) -> None:
        """Handle a lack of file descriptors, which prevents further instances from connecting."""

    def stranger_refused(self, sentence: str) -> None:
        """Handle the first refusal of a network connection that lacks the token."""

    def inspected(self, want: Any, answer: Callable[[str], None]) -> None:
        """Handle a request to inspect the job; call ``answer`` once, now or later, with a text."""


class ControlChannel:
    """Accepts the wrappers of one job and exchanges frames with them.

    The sockets of the channel exist only between ``open`` and ``close``.

    Args:
        num_instances: The number of instances.
        events: The object that handles the events of the channel.
        hosts: The hosts of the job, some of which may be lost and replaced.

    Attributes:
        peers: The connected instances.
        next_peers: The wrappers that have connected ahead for the next attempt, with indices from
            the number of instances on.
        token: The secret that a wrapper sends when the wrapper connects.
        address: The address to which the wrappers connect; empty before ``open``.
    """

    def __init__(self, num_instances: int, events: ChannelEvents, hosts: Hosts = _ONE_HOST) -> None:
        self.peers: dict[int, Peer] = {}
        self.next_peers: dict[int, Peer] = {}
        # The ranks of the wrappers that connect ahead, in the order of their indices.
        self._next_ranks: Sequence[int] = ()
        self._next_events: WrapperEvents
        self.token = os.urandom(16).hex()
        self.address = ""
        self._selector: selectors.BaseSelector
        self._sockets: list[socket.socket] = []
        # Connections of processes that inspect the job, and of wrappers without a first frame.
        self._others: set[Connection] = set()
        self._gate: Gate | None = None
        self._check_at = 0.0
        self._num_instances = num_instances
        self._lost_after = hosts.lost_after
        self._is_early = hosts.lost_after < control_protocol.LOST_AFTER_SECONDS
        # Whether wrappers may also connect after the programs have started.
        self._stays_open = hosts.keeps_state
        self._events = events
        self._paused = False
        self._farewell = b""

    def begin_next(
        self, events: ChannelEvents, kept: Mapping[int, int], num_instances: int
    ) -> None:
        """Ask wrappers for the programs of the next attempt, and let all other wrappers end.

        Args:
            events: The object that handles the events from now on.
            kept: Maps the index of an instance to the index that its wrapper had before, in
                ``peers`` or in ``next_peers``.
            num_instances: The number of instances. Wrappers that ``kept`` lacks connect later.
        """
        self._events, self._paused, self._num_instances = events, False, num_instances
        before = self.all_peers
        self.peers.clear()
        self.next_peers.clear()
        self._next_ranks = ()
        for index, old in kept.items():
            peer = before.pop(old)
            ports = peer.instance_end or {}
            self.peers[index] = Peer(
                index=index,
                connection=peer.connection,
                host=peer.host,
                pid=peer.pid,
                port=ports.get("port", peer.port),
                meeting_port=ports.get("meeting_port", peer.meeting_port),
                clock_offset_ns=peer.clock_offset_ns,
                leased=peer.leased,
            )
            self._watch(self.peers[index])
        self.broadcast(control_protocol.NEXT, None)
        for peer in before.values():
            self._dismiss(peer.connection)

    def await_next(self, ranks: Sequence[int], events: WrapperEvents) -> None:
        """Let wrappers with these ranks connect for the next attempt; ``events`` handles them."""
        self._next_ranks, self._next_events = ranks, events

    def dismiss_next(self) -> None:
        """Let the wrappers for the next attempt end."""
        for peer in self.next_peers.values():
            self._dismiss(peer.connection)
        self.next_peers.clear()

    @property
    def all_peers(self) -> dict[int, Peer]:
        """The connected instances, and the wrappers for the next attempt."""
        return self.peers | self.next_peers

    def say_bye(self, *, is_restarted: bool) -> None:
        """Let all wrappers end; ``is_restarted`` tells whether the launcher restarts the job."""
        frame = control_protocol.pack(control_protocol.BYE, json.dumps(is_restarted).encode())
        self._farewell = frame  # for wrappers that connect from now on
        for peer in self.all_peers.values():
            peer.connection.send(frame)

    def _dismiss(self, connection: Connection) -> None:
        """Let a wrapper end that the next attempt does not need."""
        if connection.is_open:
            connection.watch(lambda each, _: each.flush(), is_read=False)
            self._others.add(connection)
            # No wrapper of the next attempt would remove states on a host that it does not use.
            connection.send_last(control_protocol.pack(control_protocol.BYE, b"false"))

    def open(self, selector: selectors.BaseSelector, folder: Path, listen: str | None) -> None:
        """Listen on a Unix socket and, if ``listen`` is given, on that address of this machine.

        Raises:
            OSError: A socket cannot be made. The caller has to call ``close`` in this case as well.
            StartError: This machine does not have the address ``listen``.
        """
        self._selector = selector
        path = folder / SOCKET_NAME
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(local)
        local.bind(str(path))
        local.listen(1024)
        self.address = f"unix:{path}"
        if listen is not None:
            remote = _listen(listen)
            self._sockets.append(remote)
            self.address = f"tcp:{listen}:{remote.getsockname()[1]}"
            remote.setblocking(False)
            selector.register(remote, selectors.EVENT_READ, self._open_gate)
        local.setblocking(False)
        selector.register(local, selectors.EVENT_READ, self._accept)

    @property
    def is_complete(self) -> bool:
        """Whether every instance has connected."""
        return len(self.peers) == self._num_instances

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send one frame with a JSON payload to the wrapper of an instance."""
        self.send_bytes_to(instance, kind, json.dumps(value).encode())

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send one frame with a payload of bytes to the wrapper of an instance."""
        self.peers[instance].connection.send(control_protocol.pack(kind, payload))

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send one frame with a JSON payload to the wrapper of every instance."""
        frame = control_protocol.pack(kind, json.dumps(value).encode())
        for peer in self.peers.values():
            peer.connection.send(frame)

    def next_deadline(self) -> float:
        """Return the time of the next check of all connections."""
        return self._check_at

    def on_time(self, now: float) -> None:
        """Close a connection if its client sends no token or reads nothing, or its host is down."""
        if self._gate is not None and self._gate.has_pending:
            self._serve_gate(self._gate, 0)
        if now < self._check_at:
            return
        self._check_at = now + (_SHORT_CHECK_SECONDS if self._is_early else _CHECK_SECONDS)
        for connection in self._others:
            connection.drop_unread(now)
        self._others = {each for each in self._others if each.is_open}
        for peer in self.all_peers.values():
            if peer.connection.is_open and self._is_unreachable(peer.connection.channel):
                self._disconnect(peer)

    def _is_unreachable(self, channel: socket.socket) -> bool:
        if channel.family == socket.AF_UNIX:
            return False
        from popdist_py.peers.silence import is_silent  # only jobs on several hosts need this

        return is_silent(channel, self._lost_after)

    def pause(self, paused: bool) -> None:
        """Pause or resume the reading from wrappers; in a pause, instances cannot write output."""
        if paused != self._paused:
            self._paused = paused
            for peer in self.peers.values():
                self._watch(peer)

    def drop_unfinished(self) -> None:
        """Close connections to wrappers that have not reported the end of their programs.

        While the reading from wrappers is paused, no reports can arrive, so all connections stay
        open.
        """
        for peer in self.peers.values():
            if peer.connection.is_open and peer.instance_end is None and not self._paused:
                self._disconnect(peer)

    @property
    def is_any_open(self) -> bool:
        """Whether any wrapper still has its connection, which a wrapper closes when it ends."""
        return any(peer.connection.is_open for peer in self.all_peers.values())

    def wait_for_ends(self, seconds: float) -> None:
        """Wait until all wrappers have closed their connections, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.is_any_open and (left := deadline - time.monotonic()) > 0:
            for key, events in self._selector.select(left):
                key.data(key.fileobj, events)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.all_peers.values():
            peer.connection.close()
        for connection in self._others:
            connection.finish()
        self._close_listeners()

    def _close_listeners(self) -> None:
        self._close_gate()
        for sock in self._sockets:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
        self._sockets.clear()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._selector.unregister(self._gate)
            self._gate.close()
            self._gate = None

    def _open_gate(self, listener: Any, _: int) -> None:
        """After the first connection from the network, begin to check tokens."""
        # This module is imported while the wrappers start, because an earlier import would delay
        # mpirun.
        from popdist_py.peers.gate import Gate

        self._selector.unregister(listener)
        self._sockets.remove(listener)
        self._gate = Gate(
            self.token.encode(),
            0,
            self._num_instances,
            lambda sentence: self._events.stranger_refused(sentence),  # of the current attempt
        )
        self._gate.listen(listener)
        self._selector.register(self._gate, selectors.EVENT_READ, self._serve_gate)

    def _serve_gate(self, gate: Any, _: int) -> None:
        try:
            admitted = gate.serve()
        except OSError as error:
            self._close_listeners()
            self._events.accept_failed(error)
            return
        for member in admitted:
            if self._is_early:
                control_protocol.keep_alive(member.connection, idle_seconds=1, interval_seconds=1)
            else:
                control_protocol.keep_alive(member.connection)
            self._await_hello(member.connection)

    def _accept(self, listener: Any, _: int) -> None:
        try:
            channel, _address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection that cannot be accepted would keep the socket readable, so the
                # supervisor's loop would spin.
                self._close_listeners()
                self._events.accept_failed(error)
            return
        self._await_hello(channel)

    def _await_hello(self, channel: socket.socket) -> None:
        self._others.add(Connection(channel, self._selector, self._read_first_frame))

    def _read_first_frame(self, connection: Connection, _: int) -> None:
        """Handle the first frame of a connection; close the connection if the frame is invalid."""
        frames = connection.receive()
        if frames == []:
            return
        try:
            peer = self._admit(connection, *(frames or [(b"", b"")])[0])
        except (OSError, ValueError, RecursionError):
            connection.close()
            return
        if peer is None:
            return
        self._others.remove(connection)
        if peer.index in self.peers:
            self._replace(self.peers[peer.index], peer)
            return
        (self.next_peers if peer.is_for_next else self.peers)[peer.index] = peer
        self._watch(peer)
        self._say_farewell(peer)
        if self.is_complete and not self._stays_open:
            self._close_gate()
        self._events_of(peer).connected(peer)

    def _admit(self, connection: Connection, kind: bytes, payload: bytes) -> Peer | None:
        """Return the instance of a wrapper; None after serving a process that is not a wrapper.

        Raises:
            ValueError: The frame does not come from a wrapper of this job.
        """
        # A process on this host needs no token to inspect the job, because only this user can enter
        # the folder of the socket.
        is_local = connection.channel.family == socket.AF_UNIX
        if is_local and kind == control_protocol.INSPECT:
            connection.watch(lambda each, _: each.flush(), is_read=False)
            self._events.inspected(json.loads(payload), partial(_answer, connection))
            return None
        if is_local and kind == control_protocol.STDIN:
            pass_on_stdin(connection.channel)
            connection.close()
            return None
        hello = parse_hello(kind, payload)
        is_for_next, index = not hello.again and hello.rank in self._next_ranks, hello.rank
        if is_for_next:
            index = self._num_instances + self._next_ranks.index(hello.rank)
        # For a wrapper on another host, the ``Gate`` has already checked the token.
        if (
            (is_local and not compare_digest(hello.token.encode(), self.token.encode()))
            or not (is_for_next or 0 <= index < self._num_instances)
            or not self._may_fill(index, hello)
        ):
            raise ValueError("the caller is not one of the instances of this job")
        return Peer(
            index=index,
            is_for_next=is_for_next,
            connection=connection,
            host=hello.host,
            pid=hello.pid,
            port=hello.port,
            meeting_port=hello.meeting_port,
            clock_offset_ns=time.time_ns() - hello.time_ns if not is_local and hello.time_ns else 0,
        )

    def _may_fill(self, index: int, hello: Hello) -> bool:
        """Return whether an instance has no wrapper, or this wrapper replaces a killed one."""
        before = self.peers.get(index) or self.next_peers.get(index)
        return before is None or (hello.again and hello.host == before.host)

    def _replace(self, killed: Peer, wrapper: Peer) -> None:
        """Let a wrapper replace a killed one, whose program and lease have ended with it."""
        if killed.connection.is_open:
            self._disconnect(killed)
        ports = {"port": wrapper.port, "meeting_port": wrapper.meeting_port}
        end = {**(killed.instance_end or {}), **ports, "lost": False}
        new = replace(
            killed, connection=wrapper.connection, pid=wrapper.pid, instance_end=end, leased=()
        )
        self.peers[new.index] = new
        self._watch(new)
        self._say_farewell(new)

    def _say_farewell(self, peer: Peer) -> None:
        """Let a wrapper end that has connected after the others were told to end."""
        if self._farewell:
            peer.connection.send(self._farewell)

    def _watch(self, peer: Peer) -> None:
        peer.connection.watch(partial(self._exchange, peer), is_read=not self._paused)

    def _exchange(self, peer: Peer, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not events & selectors.EVENT_READ or not connection.is_open:
            return
        frames = connection.receive()
        try:
            values = [(kind, _value(kind, payload)) for kind, payload in frames or ()]
        except (ValueError, RecursionError):
            frames, values = None, []
        for kind, value in values:
            self._events_of(peer).received(peer, kind, value)
        if frames is None:
            peer.lost_at = time.monotonic()
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        peer.connection.close()
        self._events_of(peer).disconnected(peer)

    def _events_of(self, peer: Peer) -> WrapperEvents:
        return self._next_events if peer.is_for_next else self._events


def _value(kind: bytes, payload: bytes) -> Any:
    return payload if kind in control_protocol.RAW else json.loads(payload)


def _answer(connection: Connection, text: str) -> None:
    """Send ``text`` to a process that inspects the job, unless the connection is closed."""
    if connection.is_open:
        data, size = text.encode(), control_protocol.MAX_PAYLOAD
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        connection.send_last(
            b"".join(control_protocol.pack(control_protocol.STACKS, part) for part in parts)
        )


def _listen(address: str) -> socket.socket:
    try:
        return socket.create_server(
            (address, 0),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=1024,
        )
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise StartError(
            f"cannot listen on {address} for connections of the other hosts "
            f"({os.strerror(error.errno or 0)}): check the addresses of this machine, or choose "
            "the network with --host-subnet"
        ) from None
