"""The pod server of ``poprun-py-pod serve``: its socket, token file, limits and shutdown."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer

from popdist_py.atomic_file import beside
from popdist_py.pods.folder.file_names import HOLDERS, TOKEN_FILE
from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.model.pod_errors import DamagedError, InUseError, NotAllowedError, PodError
from popdist_py.pods.server import pod_api
from popdist_py.pods.server.server_url import DEFAULT_PORT
from poprun_py.command.pods.server_api import make_application
from poprun_py.terminal import print_error, print_problem

HOST: Final = "127.0.0.1"
# The duration of a lease in seconds. An attachment ends when its lease ends. A process that holds
# IPUs renews its lease six times within this duration.
SECONDS: Final = 30.0

_NETWORK_ADVICE: Final = (
    "The server uses plain HTTP, so anyone in the network can read the token. Use --host only in a "
    "network that you trust. In other networks, omit --host, and connect clients through an SSH "
    "tunnel (ssh -N -L 8090:127.0.0.1:8090 HOST)."
)

_COULD_NOT_START: Final = 3
_THREADS: Final = 4
_MAX_CONNECTIONS: Final = 512
# If the server can accept fewer new connections than this number, it closes old connections.
_SPARE_CONNECTIONS: Final = 64
_MAX_HEADER_BYTES: Final = 16 << 10
# The time-out of idle connections and of incomplete requests. A client that renews leases sends
# requests more often, so its connection stays open.
_IDLE_SECONDS: Final = 20.0
_MAX_TOKEN_CHARACTERS: Final = 4096


def serve(
    folder: Path,
    *,
    host: str = HOST,
    port: int = DEFAULT_PORT,
    verbose: bool = False,
    seconds: float = SECONDS,
) -> int:
    """Serve the pod in ``folder`` until SIGTERM or SIGINT, and return the exit code.

    Call ``serve`` only in the main thread. Port 0 chooses a free port. A lease ends after
    ``seconds`` unless its holder renews it. If the server cannot start, print the reason and
    return 3.
    """
    try:
        with (
            contextlib.closing(FolderStore(folder)) as store,
            _only_server(folder),
            listen(host, port) as listener,
        ):
            application = make_application(
                store,
                _own_token(folder),
                seconds=seconds,
                log=print_error,
                access_log=_log_access if verbose else None,
            )
            # Clients could not renew their leases while the server was not running.
            store.renew_all(seconds)
            name = store.pod().name
            extender = LeaseExtender(store.renew_all, seconds, note_run=store.note_run)
            server = PodServer(application, listener, extender)
            # Until the signal handlers are set, a signal ends the process at once. The signal
            # handlers only set a flag, because waitress would catch their exceptions.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: server.end())
            _announce(name, folder, listener)
            server.run()
    except (PodError, OSError) as error:
        print_problem(str(error))
        return _COULD_NOT_START
    return 0


@contextlib.contextmanager
def _only_server(folder: Path) -> Iterator[None]:
    """During the ``with`` block, hold a lock that allows only one server for the pod.

    Two servers of one pod would end leases of each other's clients. A client that repeats a request
    at the second server would change the pod twice.
    """
    # Lock the folder ``holders``, which only its owner can open, because other users could lock
    # the pod's folder.
    descriptor = os.open(folder / HOLDERS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"a server already serves the pod in {folder}: use that server, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _own_token(folder: Path) -> str:
    """Return the token from the token file in the pod's folder, and make the file if needed."""
    path = folder / TOKEN_FILE
    with contextlib.suppress(FileExistsError):
        _make_token(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(
                f"the token file {path} is not a regular file: remove it, and start the server "
                "again to make a new token"
            )
        if status.st_mode & 0o077:
            raise NotAllowedError(
                f"other users can read or write the token file {path} (mode "
                f"{stat.S_IMODE(status.st_mode):04o}): remove the file, and start the server again "
                f"to make a new token; if no other user has read the file, chmod 600 {path} "
                "suffices"
            )
        token = os.read(descriptor, _MAX_TOKEN_CHARACTERS + 1).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not 16 <= len(token) <= _MAX_TOKEN_CHARACTERS or not all("!" <= one <= "~" for one in token):
        raise DamagedError(
            f"the token file {path} does not contain a valid token (at least 16 printable "
            "characters without blanks): remove the file, and start the server again to make a new "
            "token"
        )
    return token


def _make_token(path: Path) -> None:
    """Write a new token to ``path``; raise FileExistsError if the file exists."""
    if path.is_symlink() or path.exists():
        raise FileExistsError(path)
    with beside(path, private=True) as partial:
        partial.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
        # A hard link cannot replace an existing file, so two servers that start at the same time
        # use the same token.
        path.hardlink_to(partial)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``.

    Raises:
        OSError: The address is in use, or is not an address of this machine.
    """
    try:
        if not 0 <= port < 65536:
            raise OSError("a port is a number from 0 to 65535")
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (while")[0]
        raise OSError(
            f"cannot listen on {host}:{port} ({reason}): choose another address with --host and "
            "--port, or end the program that uses this address"
        ) from None


class LeaseExtender:
    """Extends all leases if the server did not run for more than a third of the lease duration.

    A client renews its lease several times per lease duration. While the server is suspended or
    gets no CPU time, it cannot receive renewals, so it must extend the leases.

    Args:
        renew_all: Renews all leases for the given number of seconds, counted from now.
        seconds: The duration of a lease.
        note_run: A function that is called with the current time at each successful ``tick``.
        now: Returns the current time in seconds.
    """

    def __init__(
        self,
        renew_all: Callable[[float], None],
        seconds: float,
        note_run: Callable[[float], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renew_all = renew_all
        self._seconds = seconds
        self._note_run = note_run
        self._now = now
        self._last = now()
        # The longest time between two calls of ``tick`` while the server runs.
        self.period = min(1.0, seconds / 12)

    def tick(self) -> None:
        """Record that the server runs now, and extend all leases if it was suspended before."""
        now = self._now()
        # After a shorter pause of the server, the next renewals of clients arrive in time.
        if now - self._last > self._seconds / 3:
            try:
                self._renew_all(self._seconds)
            except PodError:
                return  # Leases end only after a later ``tick`` succeeds.
        self._last = now
        self._note_run(now)


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that records the start time of its current request."""

    begun = 0.0

    def received(self, data: bytes) -> bool:
        # Extend leases before executing a request that could end expired leases.
        self.server.extender.tick()
        if self.request is None:
            self.begun = time.time()
        done: bool = super().received(data)
        return done


class PodServer(TcpWSGIServer):  # type: ignore[misc]
    """A WSGI server with limits for connections and requests.

    Connections that are idle, or whose request is incomplete, are closed after ``idle_seconds``.
    """

    channel_class = _Channel

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        extender: LeaseExtender,
        *,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self.extender = extender
        self._idle_seconds = idle_seconds
        self._is_ending = False
        # waitress would log a warning for each request that waits for a thread.
        for logger in ("waitress", "waitress.queue"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        limits = Adjustments(
            threads=_THREADS,
            connection_limit=_MAX_CONNECTIONS,
            max_request_header_size=_MAX_HEADER_BYTES,
            max_request_body_size=pod_api.MOST_REQUEST_BYTES,
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
        """Return whether the server accepts new connections; close old ones if too many are open.

        waitress calls this method before it waits for data.
        """
        self.extender.tick()
        self._close_excess()
        accepts: bool = super().readable()
        return accepts

    def _close_excess(self) -> None:
        """Close the oldest connections of the client addresses that have the most connections."""
        over = len(self._map) + _SPARE_CONNECTIONS - self.adj.connection_limit
        if over <= 0:
            return
        waiting = [each for each in self.active_channels.values() if not each.requests]
        counts = Counter(each.addr[0] for each in waiting)
        # The newest connections stay open.
        for each in waiting[: len(waiting) - _SPARE_CONNECTIONS]:
            if over > 0 and counts[each.addr[0]] == max(counts.values()):
                each.will_close = True
                counts[each.addr[0]] -= 1
                over -= 1

    def maintenance(self, now: float) -> None:
        """Close idle connections, and connections whose request does not arrive in time."""
        oldest = now - self._idle_seconds
        for channel in self.active_channels.values():
            is_slow = channel.request is not None and channel.begun < oldest
            if not channel.requests and (is_slow or channel.last_activity < oldest):
                channel.will_close = True

    def run(self) -> None:
        """Serve requests until ``end`` is called, then stop all threads and close connections."""
        while not self._is_ending:
            # With ``count=1``, the loop returns after one poll, so that ``_is_ending`` is checked.
            self.asyncore.loop(self.extender.period, use_poll=True, map=self._map, count=1)
        self.task_dispatcher.shutdown()
        self.asyncore.close_all(self._map, ignore_all=True)

    def end(self) -> None:
        """Make ``run`` return. A second call of ``end`` has no effect.

        Call ``end`` only in the thread of ``run``, from a signal handler or the server's trigger.
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
    tunnel = f"first run ssh -N -L {port}:{shown}:{port} {socket.gethostname()}, and "
    print_error(
        f"serving the pod {name} at http://{shown}:{port} (clients use --pod "
        f"http://{shown}:{port}). On other hosts, {tunnel if is_here else ''}copy "
        f"{folder / TOKEN_FILE} to ~/.config/poprun-py/pod-token."
    )
    if not is_here:
        print_error(f"warning: {_NETWORK_ADVICE}")


def _log_access(line: str) -> None:
    print_error(f"{time.strftime('%H:%M:%S')} {line}")
