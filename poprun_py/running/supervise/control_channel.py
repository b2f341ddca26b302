"""The launcher's end of the control channel, which exchanges frames with the wrappers.

The supervisor decides what the frames mean. The channel listens on a Unix socket in the launcher's
folder. In a job of several hosts, it also listens on a network address until all instances have
connected.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.keyboard import standard_input
from poprun_py.running.screen.tagged_output import OutputStream
from poprun_py.running.supervise.inspection_answers import InspectionAnswers
from poprun_py.running.supervise.launcher_folder import SOCKET_NAME

if TYPE_CHECKING:
    from popdist_py.peers.gate import Gate

_CHUNK = 1 << 18
# The time between two checks whether the other hosts are still reachable.
_CHECK_SECONDS = 1.0


@dataclass(slots=True)
class Peer:
    """The launcher's state of one instance.

    Attributes:
        index: The index of the instance.
        channel: The connection to its wrapper.
        host: The name of the host, as the host itself reports it.
        pid: The process id of its wrapper.
        stdout: The stream that shows the instance's standard output.
        stderr: The stream that shows the instance's standard error.
        port: The port that its host offers to the programs as ``MASTER_PORT``.
        clock_offset_ns: The time to add to its host's clock to get this host's time.
        started: The wrapper's report that the program has started; empty before.
        program_end: The wrapper's report of how the program ended, sent at once; None before.
        instance_end: The same report, sent when no process of the program is left and all its
            output has arrived; None before.
        tail: The last bytes of the instance's standard error.
        unsent: The bytes that the connection could not take yet.
        parts: Further frames to send, each after all bytes of ``unsent``; None without further
            frames.
        is_open: Whether the connection is open.
    """

    index: int
    channel: socket.socket
    host: str
    pid: int
    stdout: OutputStream
    stderr: OutputStream
    port: int = 0
    clock_offset_ns: int = 0
    started: dict[str, Any] = field(default_factory=dict)
    program_end: dict[str, Any] | None = None
    instance_end: dict[str, Any] | None = None
    tail: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    parts: Iterator[bytes] | None = None
    is_open: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The content of the first frame of a wrapper.

    Attributes:
        rank: The index of its instance.
        pid: The process id of the wrapper.
        host: The name of the host, as the host itself reports it.
        token: The secret of the control channel. It is checked here only on a Unix socket.
        port: A free port on its host for the programs; 0 if it is not sent.
        time_ns: The time on the clock of its host, in nanoseconds; 0 if it is not sent.
    """

    rank: int
    pid: int
    host: str
    token: str = ""
    port: int = 0
    time_ns: int = 0


def parse_hello(kind: bytes, payload: bytes) -> Hello:
    """Return the content of a wrapper's first frame.

    Raises:
        ValueError: The frame is not a valid first frame of a wrapper.
    """
    try:
        value = json.loads(payload)
    except RecursionError:
        raise ValueError("the JSON value nests too deeply") from None
    if kind != control_protocol.HELLO or not isinstance(value, dict):
        raise ValueError("this is not the first frame of a wrapper")
    texts, numbers = ("host", "token"), ("rank", "pid", "port", "time_ns")
    is_valid = all(isinstance(value.get(name, ""), str) for name in texts) and all(
        type(value.get(name, 0)) is int for name in numbers
    )
    try:
        hello = Hello(**value)
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError("the frame has other fields than those of a wrapper")
    return hello


class ChannelEvents(Protocol):
    """The events of a control channel, as the supervisor handles them."""

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return the streams for a new instance's stdout and stderr."""

    def connected(self, peer: Peer) -> None:
        """Handle a wrapper that has connected."""

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame from a wrapper; ``value`` is its decoded JSON, or bytes for some kinds."""

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of the connection to a wrapper."""

    def accept_failed(self, error: OSError) -> None:
        """Handle a lack of file descriptors, after which no further instance can connect."""

    def stranger_refused(self, sentence: str) -> None:
        """Handle the first connection from the network that did not show the token."""

    def inspected(self, want: str, answer: Callable[[str], None]) -> None:
        """Handle a request to inspect the job; call ``answer`` with the text once, now or later."""


class ControlChannel:
    """Accepts the wrappers of one job and exchanges frames with them.

    Its sockets exist only between ``open`` and ``close``.

    Args:
        num_instances: The number of instances.
        events: Handles connections and frames.

    Attributes:
        peers: The connected instances.
        token: The secret that wrappers show when they connect.
        address: The address for the wrappers, after ``open``.
    """

    def __init__(self, num_instances: int, events: ChannelEvents) -> None:
        self.peers: dict[int, Peer] = {}
        self.token = os.urandom(16).hex()
        self.address = ""
        self._selector: selectors.BaseSelector
        self._sockets: list[socket.socket] = []
        # Connections of wrappers before their first frame, and of processes that inspect the job.
        self._others: set[socket.socket] = set()
        self._gate: Gate | None = None
        self._check_at = 0.0
        self._num_instances = num_instances
        self._events = events
        self._paused = False
        self._handlers: dict[int, Callable[[Any, int], None]] = {}
        self._answers: InspectionAnswers

    def open(self, selector: selectors.BaseSelector, folder: Path, listen: str | None) -> None:
        """Listen in the launcher's folder and, for other hosts, on an address of this machine.

        Raises:
            OSError: A socket cannot be made; ``close`` closes the sockets made before it.
            StartError: This machine does not have the address.
        """
        self._selector = selector
        self._answers = InspectionAnswers(selector)
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

    def send(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Send one frame to a wrapper, as soon as the connection takes it."""
        peer.unsent += control_protocol.pack(kind, json.dumps(value).encode())
        self._flush(peer)

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send one frame to the instance with this index."""
        self.send(self.peers[instance], kind, value)

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send one frame whose payload is not JSON."""
        peer = self.peers[instance]
        peer.unsent += control_protocol.pack(kind, payload)
        self._flush(peer)

    def send_parts_to(self, instance: int, kind: bytes, payloads: Iterator[bytes]) -> None:
        """Send frames, and read each payload only when the previous frame is sent, to save memory.

        Other frames may be sent between these frames.
        """
        peer = self.peers[instance]
        peer.parts = (control_protocol.pack(kind, payload) for payload in payloads)
        self._flush(peer)

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send one frame to every instance."""
        for peer in self.peers.values():
            self.send(peer, kind, value)

    def next_deadline(self) -> float:
        """Return the time of the next check of all connections."""
        return self._check_at

    def on_time(self, now: float) -> None:
        """Close connections without a token, slow inspections, and those of unreachable hosts."""
        if self._gate is not None and self._gate.has_strangers:
            self._serve_gate(self._gate, 0)
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_SECONDS
        self._answers.drop_unread(now)
        for peer in self.peers.values():
            if peer.is_open and peer.channel.family != socket.AF_UNIX and _is_unreachable(peer):
                self._disconnect(peer)

    def pause(self, paused: bool) -> None:
        """Pause or resume reading from wrappers; during a pause, instances wait to write output."""
        if paused != self._paused:
            self._paused = paused
            for peer in self.peers.values():
                self._watch(peer)

    def drop_unfinished(self) -> None:
        """Close connections to wrappers that have not reported the end of their programs.

        While reading is paused, the reports cannot arrive, so all connections stay open.
        """
        for peer in self.peers.values():
            if peer.is_open and peer.instance_end is None and not self._paused:
                self._disconnect(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers.values():
            peer.is_open = False
            peer.channel.close()
        self._answers.close()
        for channel in tuple(self._others):
            self._close_other(channel)
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
        # Imported while the wrappers start, because an import before that would delay mpirun.
        from popdist_py.peers.gate import Gate

        self._selector.unregister(listener)
        self._sockets.remove(listener)
        refused = self._events.stranger_refused
        self._gate = Gate(self.token.encode(), 0, self._num_instances, refused)
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
            control_protocol.keep_alive(member.connection)
            self._await_hello(member.connection)

    def _accept(self, listener: Any, _: int) -> None:
        try:
            channel, _address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The waiting connection would keep the socket readable, and the supervisor's loop
                # would spin.
                self._close_listeners()
                self._events.accept_failed(error)
            return
        channel.setblocking(False)
        self._await_hello(channel)

    def _await_hello(self, channel: socket.socket) -> None:
        self._others.add(channel)
        reader = control_protocol.Reader()
        self._selector.register(
            channel, selectors.EVENT_READ, lambda sock, _: self._read_first_frame(sock, reader)
        )

    def _read_first_frame(self, channel: Any, reader: control_protocol.Reader) -> None:
        """Take the first frame of a connection; close the connection if it is not valid."""
        try:
            data = channel.recv(_CHUNK)
            messages = reader.feed(data)
            if not messages and data:
                return
            kind, payload = messages[0]
            if kind == control_protocol.INSPECT and channel.family == socket.AF_UNIX:
                # No token is needed, because only this user can enter the folder of the socket.
                self._selector.unregister(channel)
                want = _value(kind, payload)
                self._events.inspected(want, lambda text: self._answer(channel, text))
                return
            if kind == control_protocol.STDIN and channel.family == socket.AF_UNIX:
                self._selector.unregister(channel)
                standard_input.pass_on(channel)
                self._close_other(channel)
                return
            peer = self._peer(channel, parse_hello(kind, payload))
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError, RecursionError):
            self._close_other(channel)
            return
        self._others.remove(channel)
        self.peers[peer.index] = peer
        self._handlers[peer.index] = lambda _, events: self._exchange(peer, reader, events)
        self._selector.unregister(channel)
        self._watch(peer)
        if self.is_complete:
            self._close_gate()
        self._events.connected(peer)

    def _answer(self, channel: socket.socket, text: str) -> None:
        """Answer an inspection, unless the job has ended meanwhile."""
        if channel in self._others:
            self._others.remove(channel)
            self._answers.send(channel, text)

    def _close_other(self, channel: socket.socket) -> None:
        self._others.remove(channel)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def _peer(self, channel: Any, hello: Hello) -> Peer:
        """Return the instance whose wrapper has sent ``hello``.

        Raises:
            ValueError: The token is wrong, or no instance with this index is missing.
        """
        # Imported while other wrappers start, because an import before that would delay mpirun.
        import hmac

        is_remote = channel.family != socket.AF_UNIX  # the gate has checked the token
        index = hello.rank
        if (
            not (is_remote or hmac.compare_digest(hello.token.encode(), self.token.encode()))
            or not 0 <= index < self._num_instances
            or index in self.peers
        ):
            raise ValueError("not one of this job's instances")
        stdout, stderr = self._events.make_streams(index)
        offset_ns = time.time_ns() - hello.time_ns if is_remote and hello.time_ns else 0
        return Peer(
            index=index,
            channel=channel,
            host=hello.host,
            pid=hello.pid,
            port=hello.port,
            clock_offset_ns=offset_ns,
            stdout=stdout,
            stderr=stderr,
        )

    def _exchange(self, peer: Peer, reader: control_protocol.Reader, events: int) -> None:
        """Move bytes between the launcher and one wrapper."""
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ or not peer.is_open:
            return
        try:
            data = peer.channel.recv(_CHUNK)
            messages = [(kind, _value(kind, payload)) for kind, payload in reader.feed(data)]
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            data, messages = b"", []
        for kind, value in messages:
            self._events.received(peer, kind, value)
        if not data:
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        peer.is_open = False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.channel)
        peer.channel.close()
        self._events.disconnected(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            if peer.parts is not None and not peer.unsent:
                # Only one part is added at a time, so that other frames can be sent between the
                # parts.
                peer.unsent += (part := next(peer.parts, b""))
                peer.parts = peer.parts if part else None
            while peer.unsent and peer.is_open:
                del peer.unsent[: peer.channel.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()
            peer.parts = None
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Register a connection for reading unless paused, and for writing if bytes are unsent."""
        if not peer.is_open:
            return
        wanted = 0 if self._paused else selectors.EVENT_READ
        wanted |= selectors.EVENT_WRITE if peer.unsent or peer.parts is not None else 0
        registered = self._selector.get_map().get(peer.channel)
        handler = self._handlers[peer.index]
        if registered is None:
            if wanted:
                self._selector.register(peer.channel, wanted, handler)
        elif not wanted:
            self._selector.unregister(peer.channel)
        elif registered.events != wanted:
            self._selector.modify(peer.channel, wanted, handler)


def _is_unreachable(peer: Peer) -> bool:
    """Tell whether the host of an instance has not answered for too long."""
    from popdist_py.peers.silence import is_silent  # jobs on one host do not need it

    return is_silent(peer.channel, control_protocol.LOST_AFTER_SECONDS)


def _value(kind: bytes, payload: bytes) -> Any:
    return payload if kind in control_protocol.RAW else json.loads(payload)


def _listen(address: str) -> socket.socket:
    """Return a socket that listens on an address of this machine, on any port.

    Raises:
        StartError: This machine does not have the address.
    """
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
            f"cannot listen on {address} for the other hosts ({os.strerror(error.errno or 0)}): "
            "check this machine's addresses, or choose the network: --host-subnet"
        ) from None
