"""The process of a pod's server: listens, serves, and ends when it is told to.

Nothing here knows the calls (application).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer

from popdist_py.pods import wire
from popdist_py.pods.database import FolderStore
from popdist_py.pods.errors import InUseError, PodError
from popdist_py.pods.finding import DEFAULT_PORT, TOKEN
from popdist_py.pods.holders import HOLDERS
from poprun_py.pod_tools.lease_extension import LeaseClock
from poprun_py.pod_tools.server_api import make_application
from poprun_py.pod_tools.server_token import own_token
from poprun_py.terminal import print_error, print_problem

HOST: Final = "127.0.0.1"
# How long a holder lives that does not renew its attachments; it does so six times in it.
SECONDS: Final = 30.0

NETWORK_ADVICE: Final = (
    "The server speaks plain HTTP: whoever reads the network reads the token. Let it listen on "
    "another address than 127.0.0.1 only in a network that you trust; else reach it from other "
    "hosts through a tunnel (ssh -N -L 8090:127.0.0.1:8090 HOST)."
)

_COULD_NOT_START: Final = 3
_THREADS: Final = 4
_MOST_CONNECTIONS: Final = 512
# So many may come before those leave who are cut off.
_ROOM: Final = 64
_MOST_HEADER_BYTES: Final = 16 << 10
# A request has to be there within it, and a connection may lie idle for so long. Clients that
# renew speak more often, so that their connections stay open while strangers are cut off.
_PATIENCE: Final = 20.0


def serve(
    folder: Path,
    *,
    host: str = HOST,
    port: int = DEFAULT_PORT,
    verbose: bool | int = False,
    seconds: float = SECONDS,
) -> int:
    """Serve the pod of a folder until SIGTERM or SIGINT; return the exit code.

    Must run in the main thread. One line on standard error says where it listens.

    Args:
        folder: the pod's; the server's token lies in it.
        host: the address to listen on.
        port: its port; 0 lets the system choose one.
        verbose: whether every request is logged on standard error.
        seconds: how long attachments live without being renewed.

    Returns:
        0 when it was told to end; 3 where it could not start, after one line that says why.
    """
    try:
        with contextlib.closing(FolderStore(folder)) as store, _only_server(folder):
            return _serve(store, folder, listen(host, port), bool(verbose), seconds)
    except (PodError, OSError) as error:
        print_problem(str(error))
        return _COULD_NOT_START


def _serve(
    store: FolderStore, folder: Path, listener: socket.socket, verbose: bool, seconds: float
) -> int:
    with listener:
        token = own_token(folder)
        _quieten_waitress()
        clock = LeaseClock(store.renew_all, seconds)
        application = make_application(
            store,
            token,
            seconds=seconds,
            log=print_error,
            access_log=_log_access if verbose else None,
            clock=clock,
        )
        # Nobody could renew while there was no server.
        store.renew_all(seconds)
        name = store.pod().name
        server = PodServer(application, listener)
        # Until here a signal ends the process as it ends any other. An exception in place of a
        # handler that only takes note would be lost where something catches everything.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.end())
        _announce(name, folder, listener)
        with clock.running():
            server.run()
    return 0


@contextlib.contextmanager
def _only_server(folder: Path) -> Iterator[None]:
    """Be the only server of a pod: each would free what is renewed at the other, or repeat it.

    Raises:
        InUseError: there is one.
    """
    # Lock the inner folder, which only its owner can open. Every user could lock the outer one.
    descriptor = os.open(folder / HOLDERS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"{folder} has a server already: use that one, or end it first"
            ) from None
        yield
    finally:
        os.close(descriptor)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: it is taken, or not one of this machine; the message says what to do.
    """
    try:
        if not 0 <= port < 65536:
            raise OSError("0 to 65535 is accepted")
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (while")[0]
        raise OSError(
            f"cannot listen on {host}:{port} ({reason}): choose another address with --host and "
            "--port, or end what listens there"
        ) from None


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that knows since when its present request is coming in."""

    begun = 0.0

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self.begun = time.time()
        done: bool = super().received(data)
        return done


class PodServer(TcpWSGIServer):  # type: ignore[misc]
    """Serves an application on a socket until it is told to end, with limits.

    Args:
        application: what answers (WSGI).
        listener: a bound socket.
        patience: seconds for a request to come in whole, and for an idle connection.
    """

    channel_class = _Channel

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self._patience = patience
        self._is_ending = False
        limits = Adjustments(
            threads=_THREADS,
            connection_limit=_MOST_CONNECTIONS,
            max_request_header_size=_MOST_HEADER_BYTES,
            max_request_body_size=wire.MOST_REQUEST_BYTES,
            asyncore_use_poll=True,
            log_socket_errors=False,
            ident=None,
            cleanup_interval=1,
            sockets=[listener],
        )
        super().__init__(
            application,
            {},
            True,
            listener,
            adj=limits,
            bind_socket=False,
            sockinfo=(listener.family, listener.type, listener.proto, listener.getsockname()),
        )

    def readable(self) -> bool:
        """Tell whether connections are accepted; a crowd makes room for others first."""
        self._make_room()
        accepts: bool = super().readable()
        return accepts

    def _make_room(self) -> None:
        """Cut off the first of those who have the most connections: others keep theirs."""
        over = len(self._map) + _ROOM - self.adj.connection_limit
        if over <= 0:
            return
        waiting = [each for each in self.active_channels.values() if not each.requests]
        counts = Counter(each.addr[0] for each in waiting)
        for each in waiting[: len(waiting) - _ROOM]:  # the last have come only now
            if over > 0 and counts[each.addr[0]] == max(counts.values()):
                each.will_close = True
                counts[each.addr[0]] -= 1
                over -= 1

    def maintenance(self, now: float) -> None:
        """Cut off who is idle, and who sends a request drop by drop."""
        oldest = now - self._patience
        for channel in self.active_channels.values():
            is_slow = channel.request is not None and channel.begun < oldest
            if not channel.requests and (is_slow or channel.last_activity < oldest):
                channel.will_close = True

    def run(self) -> None:
        """Serve until ``end`` is called; then end all threads and connections."""
        limits = self.adj
        while not self._is_ending:
            # Returns after every event, so that the end is seen.
            self.asyncore.loop(
                timeout=limits.asyncore_loop_timeout,
                use_poll=limits.asyncore_use_poll,
                map=self._map,
                count=1,
            )
        self.task_dispatcher.shutdown()
        self.asyncore.close_all(self._map, ignore_all=True)

    def end(self) -> None:
        """Let ``run`` return; once more does nothing.

        Only in the thread of ``run``: in a signal's handler, or by its trigger.
        """
        if not self._is_ending:
            self._is_ending = True
            self.pull_trigger()


def _announce(name: str, folder: Path, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    is_here = host in ("127.0.0.1", "::1")
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    way = (
        f"on other hosts the same after ssh -N -L {port}:{shown}:{port} {socket.gethostname()}, "
        if is_here
        else "on other hosts the same, "
    )
    print_error(
        f"serving the pod {name} at http://{shown}:{port}; clients say "
        f"--pod http://{shown}:{port}, {way}with a copy of {folder / TOKEN} as "
        "~/.config/poprun-py/pod-token"
    )
    if not is_here:
        print_error(f"warning: {NETWORK_ADVICE}")


def _log_access(line: str) -> None:
    print_error(f"{time.strftime('%H:%M:%S')} {line}")


def _quieten_waitress() -> None:
    # It warns of every request that waits for a thread.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    logging.getLogger("waitress").setLevel(logging.ERROR)
