"""The wrapper's connection to the launcher; both sides prove that they know the job's secret."""

import os
import select
import sys
import time

from poprun_py.instance import control_protocol, program_environment
from poprun_py.instance.quick_imports import dumps, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from typing import Any

_CONNECT_SECONDS = 20
_RETRY_SECONDS = 0.05
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_CHUNK = 1 << 16
# While 1 MiB of messages to the launcher is unsent, the wrapper does not read the program's output
# from its pipe.
_MAX_UNSENT = 1 << 20


def connect(address: str, token: str) -> socket.socket:
    """Connect to the launcher at ``unix:PATH``, or at ``tcp:HOST:PORT`` with the secret ``token``.

    Raises:
        OSError: The launcher cannot be reached.
        SystemExit: The process that listens at the address is not the launcher of this job.
    """
    kind, _, where = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(where)
        return local
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        remote = socket.socket(family, socket.SOCK_STREAM)
        remote.settimeout(_CONNECT_SECONDS)
        remote.connect((host.strip("[]"), int(port)))
        control_protocol.keep_alive(remote)
        try:
            if _authenticate(remote, token.encode()):
                remote.settimeout(None)
                return remote
            sys.exit(f"poprun-py: the process at {where} is not the launcher of this job")
        except ConnectionError:
            # If a launcher has too many open connections, it closes some of them, before it knows
            # which connections are from its own wrappers.
            remote.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _authenticate(connection: socket.socket, secret: bytes) -> bool:
    """Prove that this wrapper knows the job's secret; return whether the launcher knows it, too.

    The code repeats a part of ``popdist_py/peers/greeting.py``, whose import takes long.

    Raises:
        ConnectionError: The launcher closed the connection.
    """
    own_nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(own_nonce)
    # hmac is imported here, so that its import overlaps with the wait for the launcher's answer.
    from hmac import compare_digest, digest

    answer = _receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not compare_digest(proof, digest(secret, b"listener %b %b" % (own_nonce, nonce), "sha256")):
        return False
    # A client may add a text about itself at the end. The wrapper adds no text.
    connection.sendall(digest(secret, b"caller %b %b " % (own_nonce, nonce), "sha256"))
    _receive_exactly(connection, 1)
    return True


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def free_port() -> int:
    """Return a TCP port that is free on this host."""
    probe = socket.socket()
    probe.bind(("", 0))
    port: int = probe.getsockname()[1]
    probe.close()
    return port


def ports() -> dict[str, int]:
    """Return the ports that instance 0 offers to the programs of all instances.

    In a job with several hosts, ``meeting_port`` is for programs that connect without MPI. With
    checkpoints in memory, the program of any wrapper may be instance 0 in the next attempt.
    """
    if program_environment.rank() != 0 and "POPDIST_MEMORY_CHECKPOINTS" not in os.environ:
        return {}
    has_hosts = os.environ.get("POPRUN_CONTROL", "").startswith("tcp:")
    names = ("port", "meeting_port") if has_hosts else ("port",)
    return {name: free_port() for name in names}


class LauncherChannel:
    """The wrapper's side of the control connection to the launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = control_protocol.Reader()
        self._unsent = bytearray()
        self.is_connected = True
        is_local = connection.family == socket.AF_UNIX
        # Whether the launcher is on another host.
        self.is_remote = not is_local and connection.getsockname()[0] != connection.getpeername()[0]

    def send_hello(self, token: str, rank: int, *, again: bool = False) -> None:
        """Send the first message; ``again`` tells that this process replaces a killed wrapper."""
        hello = {
            "token": token,
            "rank": rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time_ns": time.time_ns(),
            "again": again,
        }
        self.send_now(control_protocol.HELLO, hello | ports())

    def send(self, kind: bytes, value: "Any") -> None:
        """Queue a message to the launcher with a JSON payload."""
        self.send_bytes(kind, dumps(value).encode())

    def send_bytes(self, kind: bytes, payload: bytes) -> None:
        """Queue a message with a payload of bytes; drop the message if the launcher is gone."""
        if self.is_connected:
            self._unsent += control_protocol.pack(kind, payload)

    def send_now(self, kind: bytes, value: "Any") -> None:
        """Send a message with a JSON payload at once. The queue of messages must be empty."""
        self._connection.sendall(control_protocol.pack(kind, dumps(value).encode()))

    def wait_for_messages(self) -> list[tuple[bytes, bytes]]:
        """Wait for data from the launcher, and return the messages that are complete.

        Raises:
            SystemExit: The launcher is gone.
        """
        data = self._connection.recv(_CHUNK)
        if not data:
            sys.exit(1)
        return self._reader.feed(data)

    @property
    def descriptor(self) -> int:
        """The file descriptor of the connection to the launcher."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether some queued messages are still unsent."""
        return bool(self._unsent)

    @property
    def is_full(self) -> bool:
        """Whether so many bytes are unsent that no more output of the program should be read."""
        return len(self._unsent) >= _MAX_UNSENT

    def register(self, poll: "select.poll") -> None:
        """Register the connection with ``poll`` to receive and, if data is unsent, to send."""
        if self.is_connected:
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def exchange(self, event: int) -> "list[tuple[bytes, bytes]] | None":
        """Send unsent messages, and return the received ones; None if the launcher has ended.

        ``event`` is the result of ``poll``, which says whether the connection can send or receive.
        """
        try:
            if event & select.POLLOUT and self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self._connection.recv(_CHUNK, socket.MSG_DONTWAIT)
                return self._reader.feed(data) if data else None
        except BlockingIOError:
            pass
        except OSError:
            return None
        return []

    def disconnect(self) -> None:
        """Drop all unsent messages and all messages queued later, because the launcher is gone."""
        self.is_connected = False
        self._unsent.clear()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
