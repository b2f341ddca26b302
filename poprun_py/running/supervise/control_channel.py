"""The launcher's end of the control channel: who is connected, what goes out, what comes in.

It moves frames; the supervisor decides what they mean. A private folder holds the socket. A job of
several hosts listens on an address as well, until all instances have connected.
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
from poprun_py.running.screen.screen import OutputStream
from poprun_py.running.supervise.private_folder import SOCKET_NAME

if TYPE_CHECKING:
    from popdist_py.peers.gate import Gate

_CHUNK = 1 << 18
# How often to look which hosts still answer.
_LOOK_SECONDS = 1.0
# A process that inspects the job gets no more of its answer after reading nothing for this long.
_READER_SECONDS = 5.0
# When the job has ended, the launcher waits this long at most until a reader takes its answer.
_LAST_ANSWER_SECONDS = 1.0


@dataclass(slots=True)
class Peer:
    """The launcher's view of one instance.

    ``died`` is how its program ended, reported at once. ``outcome`` is the same, reported when no
    process of the program is left and all its output is here. ``clock_offset_ns`` is added to its
    clock to get ours.
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
    died: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    tail: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    parts: Iterator[bytes] | None = None  # frames that follow when all before is out
    is_open: bool = True


@dataclass(slots=True)
class _Answer:
    """The answer to an inspection: its unsent bytes, and when the reader last took some."""

    unsent: memoryview
    moved_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a wrapper says first."""

    rank: int
    pid: int
    host: str
    token: str = ""
    port: int = 0
    time_ns: int = 0


def hello_of(kind: bytes, payload: bytes) -> Hello:
    """Return what a wrapper says first.

    Raises:
        ValueError: This is something else.
    """
    try:
        value = json.loads(payload)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if kind != control_protocol.HELLO or not isinstance(value, dict):
        raise ValueError("no wrapper speaks so")
    texts, numbers = ("host", "token"), ("rank", "pid", "port", "time_ns")
    is_right = all(isinstance(value.get(name, ""), str) for name in texts) and all(
        type(value.get(name, 0)) is int for name in numbers
    )
    try:
        hello = Hello(**value)
    except TypeError:
        is_right = False
    if not is_right:
        raise ValueError("a wrapper says other things")
    return hello


class Listener(Protocol):
    """What the supervisor does with what arrives."""

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return stdout and stderr of a new instance."""

    def joined(self, peer: Peer) -> None:
        """A wrapper has connected."""

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """A frame has come: bytes, or what its JSON says."""

    def lost(self, peer: Peer) -> None:
        """The connection has ended."""

    def closed(self, error: OSError) -> None:
        """No further instance can connect: the launcher has no descriptor left."""

    def refused(self, sentence: str) -> None:
        """Somebody who is not of this job has connected; told once."""

    def inspected(self, want: str, answer: Callable[[str], None]) -> None:
        """A process of this host inspects the job; ``answer`` takes the text, once, maybe later."""


class ControlChannel:
    """Accepts the wrappers of one job and exchanges frames with them.

    Holds nothing of the system before ``open`` and after ``close``.
    """

    def __init__(self, num_instances: int, listener: Listener) -> None:
        self.peers: dict[int, Peer] = {}
        self.token = os.urandom(16).hex()
        self.address = ""
        self._selector: selectors.BaseSelector
        self._sockets: list[socket.socket] = []
        # Connections of no instance: they have not said who they are, or wait for an answer.
        self._guests: set[socket.socket] = set()
        self._gate: Gate | None = None
        self._look_at = 0.0
        self._num_instances = num_instances
        self._listener = listener
        self._paused = False
        self._handlers: dict[int, Callable[[Any, int], None]] = {}
        self._answers: dict[socket.socket, _Answer] = {}  # not sent completely yet

    def open(self, selector: selectors.BaseSelector, folder: Path, listen: str | None) -> None:
        """Listen in a private folder and, for other hosts, on an address of this machine.

        Raises:
            OSError: The kernel gives no socket; ``close`` closes what there is.
            StartError: The address is none of this machine.
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

    def send(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Send one frame; what does not go out now goes when it can."""
        peer.unsent += control_protocol.pack(kind, json.dumps(value).encode())
        self._flush(peer)

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send one frame to an instance by its index."""
        self.send(self.peers[instance], kind, value)

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send one frame whose payload is no value."""
        peer = self.peers[instance]
        peer.unsent += control_protocol.pack(kind, payload)
        self._flush(peer)

    def send_parts_to(self, instance: int, kind: bytes, payloads: Iterator[bytes]) -> None:
        """Send frames, each taken when the one before is out: the rest is not in memory.

        What is sent meanwhile goes between them.
        """
        peer = self.peers[instance]
        peer.parts = (control_protocol.pack(kind, payload) for payload in payloads)
        self._flush(peer)

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send one frame to every instance."""
        for peer in self.peers.values():
            self.send(peer, kind, value)

    def on_time(self, now: float) -> None:
        """Turn away who shows no secret of the job, and leave hosts that answer no more."""
        if self._gate is not None and self._gate.has_strangers:
            self._let_in(self._gate, 0)
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            for channel, answer in tuple(self._answers.items()):
                if now > answer.moved_at + _READER_SECONDS:
                    self._end_answer(channel)
            for peer in self.peers.values():
                if peer.is_open and peer.channel.family != socket.AF_UNIX and _is_silent(peer):
                    self._lose(peer)

    def pause(self, paused: bool) -> None:
        """Read nothing for a while: the instances' output has to wait."""
        if paused != self._paused:
            self._paused = paused
            for peer in self.peers.values():
                self._watch(peer)

    def leave_unanswered(self) -> None:
        """Lose the wrappers that have not told how their programs ended, if they could have."""
        for peer in self.peers.values():
            if peer.is_open and peer.outcome is None and not self._paused:
                self._lose(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers.values():
            peer.is_open = False
            peer.channel.close()
        for channel, answer in tuple(self._answers.items()):
            with contextlib.suppress(OSError):
                channel.settimeout(_LAST_ANSWER_SECONDS)
                channel.sendall(answer.unsent)
            self._end_answer(channel)
        for guest in tuple(self._guests):
            self._close_guest(guest)
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

    # --- events ---------------------------------------------------------------------------

    def _open_gate(self, listener: Any, _: int) -> None:
        """Somebody has connected from a network: hear who is of the job."""
        from popdist_py.peers.gate import Gate  # while wrappers start: at the top it delays mpirun

        self._selector.unregister(listener)
        self._sockets.remove(listener)
        self._gate = Gate(self.token.encode(), 0, self._num_instances, self._listener.refused)
        self._gate.listen(listener)
        self._selector.register(self._gate, selectors.EVENT_READ, self._let_in)

    def _let_in(self, gate: Any, _: int) -> None:
        try:
            guests = gate.serve()
        except OSError as error:
            self._close_listeners()
            self._listener.closed(error)
            return
        for guest in guests:
            control_protocol.keep_alive(guest.connection)
            self._await_hello(guest.connection)

    def _accept(self, listener: Any, _: int) -> None:
        try:
            channel, _address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # A waiting connection keeps an open listener readable: the loop would spin.
                self._close_listeners()
                self._listener.closed(error)
            return
        channel.setblocking(False)
        self._await_hello(channel)

    def _await_hello(self, channel: socket.socket) -> None:
        self._guests.add(channel)
        reader = control_protocol.Reader()
        self._selector.register(
            channel, selectors.EVENT_READ, lambda sock, _: self._greet(sock, reader)
        )

    def _greet(self, channel: Any, reader: control_protocol.Reader) -> None:
        """Take the first frame of a connection; one without the token is dropped."""
        try:
            data = channel.recv(_CHUNK)
            messages = reader.feed(data)
            if not messages and data:
                return
            kind, payload = messages[0]
            if kind == control_protocol.INSPECT and channel.family == socket.AF_UNIX:
                # Only this user reaches the folder that the socket is in.
                self._selector.unregister(channel)
                want = _value(kind, payload)
                self._listener.inspected(want, lambda text: self._begin_answer(channel, text))
                return
            if kind == control_protocol.STDIN and channel.family == socket.AF_UNIX:
                self._selector.unregister(channel)
                standard_input.pass_on(channel)
                self._close_guest(channel)
                return
            peer = self._peer(channel, hello_of(kind, payload))
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError, RecursionError):
            self._close_guest(channel)
            return
        self._guests.remove(channel)
        self.peers[peer.index] = peer
        self._handlers[peer.index] = lambda _, events: self._serve(peer, reader, events)
        self._selector.unregister(channel)
        self._watch(peer)
        if self.is_complete:
            self._close_gate()
        self._listener.joined(peer)

    def _begin_answer(self, channel: socket.socket, text: str) -> None:
        """Send the answer to an inspection in one or more frames, as its reader takes them."""
        if channel not in self._guests:
            return  # the job is over
        data = text.encode()
        size = control_protocol.MAX_PAYLOAD
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        frames = b"".join(control_protocol.pack(control_protocol.STACKS, part) for part in parts)
        self._answers[channel] = _Answer(memoryview(frames), time.monotonic())
        self._selector.register(channel, selectors.EVENT_WRITE, self._go_on_answering)
        self._go_on_answering(channel, selectors.EVENT_WRITE)

    def _go_on_answering(self, channel: Any, _: int) -> None:
        answer = self._answers[channel]
        try:
            while answer.unsent:
                answer.unsent = answer.unsent[channel.send(answer.unsent) :]
                answer.moved_at = time.monotonic()
        except BlockingIOError:
            return
        except OSError:  # the reader is gone
            pass
        self._end_answer(channel)

    def _end_answer(self, channel: socket.socket) -> None:
        del self._answers[channel]
        self._close_guest(channel)

    def _close_guest(self, channel: socket.socket) -> None:
        self._guests.remove(channel)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def _peer(self, channel: Any, hello: Hello) -> Peer:
        """Return the instance that says hello.

        Raises:
            ValueError: It is none of this job, or one that is there already.
        """
        import hmac  # here, while other wrappers start: at the top it would delay mpirun

        is_remote = channel.family != socket.AF_UNIX  # it has shown the token at the gate
        index = hello.rank
        if (
            not (is_remote or hmac.compare_digest(hello.token.encode(), self.token.encode()))
            or not 0 <= index < self._num_instances
            or index in self.peers
        ):
            raise ValueError("not one of this job's instances")
        stdout, stderr = self._listener.make_streams(index)
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

    def _serve(self, peer: Peer, reader: control_protocol.Reader, events: int) -> None:
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
            self._listener.received(peer, kind, value)
        if not data:
            self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        """Close a connection that has ended."""
        peer.is_open = False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.channel)
        peer.channel.close()
        self._listener.lost(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            if peer.parts is not None and not peer.unsent:
                # One at a time: the others have their turn.
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
        """Register a connection for the events that matter now."""
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


def _is_silent(peer: Peer) -> bool:
    """Whether the host of an instance answers no more."""
    from popdist_py.peers.silence import is_silent  # jobs of one host do without

    return is_silent(peer.channel, control_protocol.LOST_AFTER_SECONDS)


def _value(kind: bytes, payload: bytes) -> Any:
    return payload if kind in control_protocol.RAW else json.loads(payload)


def _listen(address: str) -> socket.socket:
    """Return a socket that listens on an address of this machine, on any port.

    Raises:
        StartError: It is none of this machine.
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
