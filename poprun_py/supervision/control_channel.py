"""The launcher's end of the control channel: who is connected, what goes out, what comes in.

It moves frames; the supervisor decides what they mean. A private folder holds the socket. A job of
several hosts listens on an address as well.
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
from typing import Any, Protocol

from poprun_py.errors import StartError
from poprun_py.instance import protocol
from poprun_py.output.screen import OutputStream
from poprun_py.supervision.private_folder import SOCKET_NAME

__all__ = ["ControlChannel", "Listener", "Peer"]

_CHUNK = 1 << 18


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


class Listener(Protocol):
    """What the supervisor does with what arrives."""

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return stdout and stderr of a new instance."""

    def joined(self, peer: Peer) -> None:
        """A wrapper has connected."""

    def received(self, peer: Peer, kind: bytes, payload: bytes) -> None:
        """A frame has come."""

    def lost(self, peer: Peer) -> None:
        """The connection has ended."""

    def closed(self, error: OSError) -> None:
        """No further instance can connect: the launcher has no descriptor left."""

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
        self._num_instances = num_instances
        self._listener = listener
        self._paused = False
        self._handlers: dict[int, Callable[[Any, int], None]] = {}

    def open(self, selector: selectors.BaseSelector, folder: Path, listen: str | None) -> None:
        """Listen in a private folder and, for other hosts, on an address of this machine.

        Raises:
            OSError: the kernel gives no socket; ``close`` closes what there is.
            StartError: the address is none of this machine.
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
        for sock in self._sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, self._accept)

    @property
    def is_complete(self) -> bool:
        """Whether every instance has connected."""
        return len(self.peers) == self._num_instances

    def send(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Send one frame; what does not go out now goes when it can."""
        peer.unsent += protocol.pack(kind, json.dumps(value).encode())
        self._flush(peer)

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send one frame to an instance by its index."""
        self.send(self.peers[instance], kind, value)

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send one frame whose payload is no value."""
        peer = self.peers[instance]
        peer.unsent += protocol.pack(kind, payload)
        self._flush(peer)

    def send_parts_to(self, instance: int, kind: bytes, payloads: Iterator[bytes]) -> None:
        """Send frames, each taken when the one before is out: the rest is not in memory.

        What is sent meanwhile goes between them.
        """
        peer = self.peers[instance]
        peer.parts = (protocol.pack(kind, payload) for payload in payloads)
        self._flush(peer)

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send one frame to every instance."""
        for peer in self.peers.values():
            self.send(peer, kind, value)

    def pause(self, paused: bool) -> None:
        """Read nothing for a while: the instances' output has to wait."""
        if paused != self._paused:
            self._paused = paused
            for peer in self.peers.values():
                self._watch(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers.values():
            peer.is_open = False
            peer.channel.close()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
        self._sockets.clear()

    # --- events ---------------------------------------------------------------------------

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
        if channel.family != socket.AF_UNIX:
            protocol.keep_alive(channel)
        reader = protocol.Reader()
        self._selector.register(
            channel, selectors.EVENT_READ, lambda sock, _: self._greet(sock, reader)
        )

    def _greet(self, channel: Any, reader: protocol.Reader) -> None:
        """Take the first frame of a connection; one without the token is dropped."""
        try:
            data = channel.recv(_CHUNK)
            messages = reader.feed(data)
            if not messages and data:
                return
            kind, payload = messages[0]
            if kind == protocol.INSPECT and channel.family == socket.AF_UNIX:
                # Only this user reaches the folder that the socket is in.
                self._selector.unregister(channel)
                self._listener.inspected(json.loads(payload), lambda text: _reply(channel, text))
                return
            peer = self._peer(channel, kind, json.loads(payload))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            self._selector.unregister(channel)
            channel.close()
            return
        self.peers[peer.index] = peer
        self._handlers[peer.index] = lambda _, events: self._serve(peer, reader, events)
        self._selector.unregister(channel)
        self._watch(peer)
        self._listener.joined(peer)

    def _peer(self, channel: Any, kind: bytes, hello: dict[str, Any]) -> Peer:
        """Return the instance that says hello.

        Raises:
            ValueError: it is none of this job, or one that is there already.
        """
        import hmac  # here, while other wrappers start: at the top it would delay mpirun

        index = hello["rank"]
        if (
            kind != protocol.HELLO
            or not hmac.compare_digest(str(hello["token"]), self.token)
            or not 0 <= index < self._num_instances
            or index in self.peers
        ):
            raise ValueError("not one of this job's instances")
        stdout, stderr = self._listener.make_streams(index)
        is_remote = channel.family != socket.AF_UNIX
        now = time.time_ns()
        return Peer(
            index=index,
            channel=channel,
            host=str(hello["host"]),
            pid=int(hello["pid"]),
            port=int(hello.get("port", 0)),
            clock_offset_ns=now - int(hello.get("time_ns", now)) if is_remote else 0,
            stdout=stdout,
            stderr=stderr,
        )

    def _serve(self, peer: Peer, reader: protocol.Reader, events: int) -> None:
        """Move bytes between the launcher and one wrapper."""
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ or not peer.is_open:
            return
        try:
            data = peer.channel.recv(_CHUNK)
            messages = reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, messages = b"", []
        for kind, payload in messages:
            self._listener.received(peer, kind, payload)
        if not data:
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


def _listen(address: str) -> socket.socket:
    """Return a socket that listens on an address of this machine, on any port.

    Raises:
        StartError: it is none of this machine.
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


def _reply(channel: socket.socket, text: str) -> None:
    """Send the answer to an inspection and close; a client that does not read loses it."""
    with contextlib.suppress(OSError), channel:
        channel.settimeout(1.0)
        channel.sendall(protocol.pack(protocol.STACKS, text.encode()[: protocol.MAX_PAYLOAD]))
