"""The process that serves --metrics-port: documents on standard input, scrapes on a socket.

It is given a socket that listens, and ends with its standard input. Nothing here gathers numbers:
endpoint_recorder.py does, in the launcher.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from poprun_py.running.metrics.exposition import families

# A scraper that has not asked after so long, or takes nothing for so long, is let go.
_SECONDS: Final = 5.0
# So many are served at a time, and so much is read of each.
_MOST_SCRAPERS: Final = 256
_MOST_BYTES: Final = 16 << 10
_HEAD_END: Final = b"\r\n\r\n"
_PATH: Final = "/metrics"


class _Collector(Collector):
    """The numbers of the last document."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = first
        # Replaced as a whole, and read by who asks: nobody may.
        self.last = b"{}"

    def collect(self) -> Iterator[Metric]:
        return families(self._first, json.loads(self.last))


def _head(connection: socket.socket, seconds: float) -> bytes:
    """Return the head of a request; nothing if it is too long, or not there in time."""
    head, deadline = b"", time.monotonic() + seconds
    while _HEAD_END not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) >= _MOST_BYTES:
            return b""
        connection.settimeout(left)
        part = connection.recv(_MOST_BYTES - len(head))
        if not part:
            return b""
        head += part
    return head


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    registry: CollectorRegistry

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        try:
            self.rfile = io.BytesIO(_head(self.request, self.timeout))
        except TimeoutError:
            self.rfile = io.BytesIO()
        self.request.settimeout(self.timeout)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != _PATH:
            self.send_error(404, "the metrics are at /metrics")
            return
        request = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": self.headers.get("Accept", ""),
            "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding", ""),
        }
        body = b"".join(make_wsgi_app(self.registry)(request, self._send_status))
        # The server ends with the job, in the middle of an answer if need be. Without the length, a
        # scraper would take the beginning of an answer for all of it, and 12 for 123.
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_status(self, status: str, headers: list[tuple[str, str]]) -> None:
        """Send the status line and all headers but the length, as a WSGI server does."""
        self.send_response(int(status.partition(" ")[0]))
        for name, value in headers:
            self.send_header(name, value)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: standard error is the job's."""


class _Server(ThreadingHTTPServer):
    """Serves each scraper in a thread of its own, and is silent about those that go away."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        handler = type("Handler", (_Handler,), {"registry": registry})
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._room = threading.BoundedSemaphore(_MOST_SCRAPERS)
        # In the order in which they have come.
        self._served: dict[socket.socket, None] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._cut_off_first()
            if not self._room.acquire(timeout=_SECONDS):
                self.shutdown_request(request)
                return
        self._served[request] = None
        super().process_request(request, client_address)

    def _cut_off_first(self) -> None:
        """Make room: who asks at once has its answer long before it is the first."""
        for first in list(self._served)[:1]:
            with suppress(OSError):
                first.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._served.pop(request, None)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nobody is there to be told."""


def main() -> None:
    """Serve until standard input ends; its first document names the descriptor of the socket."""
    first = json.loads(sys.stdin.buffer.readline())
    collector = _Collector(first)
    registry = CollectorRegistry()
    registry.register(collector)
    server = _Server(socket.socket(fileno=first["descriptor"]), registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):  # a launcher that is killed may leave half a line
            collector.last = line
    # No scraper is waited for.
    os._exit(0)
