"""The process that serves --metrics-port: documents on standard input, scrapes on a socket.

It is given a socket that listens, and ends with its standard input. Nothing here gathers numbers:
endpoint_recorder.py does, in the launcher.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from poprun_py.metrics.exposition import families

__all__ = ["main"]

# A scraper that says or takes nothing for so long is let go; so many are served at a time.
_SILENCE_SECONDS: Final = 5.0
_MOST_SCRAPERS: Final = 256
_PATH: Final = "/metrics"


class _Collector(Collector):
    """The numbers of the last document."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = first
        # Replaced as a whole, and read by who asks: nobody may.
        self.last = b"{}"

    def collect(self) -> Iterator[Metric]:
        return families(self._first, json.loads(self.last))


class _Handler(MetricsHandler):
    timeout = _SILENCE_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == _PATH:
            super().do_GET()
        else:
            self.send_error(404, "the metrics are at /metrics")


class _Server(ThreadingHTTPServer):
    """Serves each scraper in a thread of its own, and is silent about those that go away."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        handler = type("Handler", (_Handler,), {"registry": registry})
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._room = threading.BoundedSemaphore(_MOST_SCRAPERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
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
