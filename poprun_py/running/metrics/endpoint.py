"""The HTTP endpoint of --metrics-port, which runs in a process of its own.

The endpoint process reads JSON documents of ``EndpointRecorder`` from standard input, and serves
the values in the last document. The names of the metrics follow
https://prometheus.io/docs/practices/naming (base units, ``_total``, ``_info``).
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from poprun_py.running.metrics.metrics_feed import BOUNDS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

# The time-out in seconds for receiving an HTTP request, and for sending the answer.
_SECONDS: Final = 5.0
# The largest number of scrapers (clients that collect metrics) to serve at a time, and the largest
# number of bytes to read from a request.
_MOST_SCRAPERS: Final = 256
_MOST_BYTES: Final = 16 << 10
_HEAD_END: Final = b"\r\n\r\n"
_PATH: Final = "/metrics"
# The page at "/". It is constant, so it can never show text of a request.
_PAGE: Final = b"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Metrics of a poprun-py job</title>
<h1>Metrics of a poprun-py job</h1>
<p>The metrics are at <a href="metrics">/metrics</a>, in the text format of Prometheus.</p>
</html>
"""
_PAGE_HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", "default-src 'none'"),
    ("X-Content-Type-Options", "nosniff"),
)

_LABELS: Final = ("instance", "host")
_ENDED: Final = "ended"
# The name of each gauge (current value of a metric), its key in an instance's JSON state, and its
# help text.
_GAUGES: Final = (
    ("poprun_step", "step", "Training steps done, including steps before a loaded checkpoint."),
    ("poprun_loss", "loss", "Loss of the last training step."),
    (
        "poprun_cpus_used",
        "cpus_used",
        "CPUs that the instance used on average since the last update.",
    ),
    ("poprun_cpus", "num_cpus", "CPUs that the instance may use."),
    (
        "poprun_memory_bytes",
        "memory_bytes",
        "Memory of the instance's processes, with shared memory counted once.",
    ),
    (
        "poprun_swap_bytes",
        "swap_bytes",
        "Memory of the instance's processes that is swapped to disk.",
    ),
)
# The gauges that are still served after an instance has ended.
_LASTING: Final = ("poprun_step", "poprun_loss")
# Characters that the name of a Prometheus label must not contain.
_NOT_OF_LABEL: Final = re.compile(r"[^A-Za-z0-9_]")
_HISTOGRAMS: Final = (
    (
        "poprun_step_duration_seconds",
        "seconds",
        "Time from the end of one training step to the end of the next.",
    ),
    (
        "poprun_step_own_duration_seconds",
        "own_seconds",
        "Duration of a training step without waiting for other instances.",
    ),
)


def main() -> None:
    """Serve the metrics of a job until standard input ends.

    The first document in standard input contains the file descriptor of the listening socket.
    """
    first = json.loads(sys.stdin.buffer.readline())
    collector = _Collector(first)
    registry = CollectorRegistry()
    registry.register(collector)
    server = _Server(socket.socket(fileno=first["descriptor"]), registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):  # a killed launcher may have sent an incomplete line
            collector.last = line
    # Exit without waiting for the threads that serve scrapers.
    os._exit(0)


def metric_families(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield all metrics of a job, computed from the launcher's first and last JSON document.

    ``first`` contains ``run_id``, ``program``, ``began`` (seconds since the epoch),
    ``num_instances`` and, if the run has tags, ``tags``.
    """
    facts = {name: str(first[name]) for name in ("run_id", "program")}
    for key, value in first.get("tags", {}).items():
        facts[f"tag_{_NOT_OF_LABEL.sub('_', key)}"] = value
    yield InfoMetricFamily("poprun_run", "Name of the run and its program.", value=facts)
    yield GaugeMetricFamily(
        "poprun_run_start_time_seconds",
        "When the run began, in seconds since the epoch.",
        value=first["began"],
    )
    yield CounterMetricFamily(
        "poprun_restarts", "Number of restarts after a failure.", value=last.get("restarts", 0)
    )
    yield GaugeMetricFamily(
        "poprun_instances", "Number of instances.", value=first["num_instances"]
    )
    view = last.get("view") or {"instances": [], "slowest": None}
    states: list[dict[str, Any]] = view["instances"]
    running = [state for state in states if state["phase"] != _ENDED]
    yield GaugeMetricFamily(
        "poprun_instances_running",
        "Number of instances whose program is running.",
        value=len(running),
    )
    steps: dict[str, Any] = last.get("steps", {})
    yield from _counters(states, steps)
    yield from _gauges(states)
    yield from _histograms(states, steps)
    yield from _straggler_gauges(view["slowest"], states)


def _counters(states: list[dict[str, Any]], steps: dict[str, Any]) -> Iterator[Metric]:
    made = CounterMetricFamily(
        "poprun_steps", "Training steps made in this attempt.", labels=_LABELS
    )
    samples = CounterMetricFamily(
        "poprun_samples", "Samples trained on in this attempt.", labels=_LABELS
    )
    seconds = CounterMetricFamily(
        "poprun_activity_seconds",
        "Time spent on each activity in this attempt.",
        labels=(*_LABELS, "activity"),
        unit="seconds",
    )
    for state in states:
        labels = _labels(state)
        recorded = steps.get(str(state["index"]), {}).get("count", 0)
        made.add_metric(labels, max(recorded, state["num_timed_steps"]))
        samples.add_metric(labels, state["num_samples"])
        for activity, spent in state["seconds"].items():
            seconds.add_metric([*labels, activity], spent)
    yield from (made, samples, seconds)


def _gauges(states: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, key, text in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        for state in states:
            is_valid = state["phase"] != _ENDED or name in _LASTING
            if is_valid and state[key] is not None:
                gauge.add_metric(_labels(state), float(state[key]))
        yield gauge


def _histograms(states: list[dict[str, Any]], steps: dict[str, Any]) -> Iterator[Metric]:
    bounds = (*map(str, BOUNDS), "+Inf")
    for name, key, text in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, text, labels=_LABELS, unit="seconds")
        for state in states:
            if (of_instance := steps.get(str(state["index"]))) is not None:
                found = of_instance[key]
                buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
                histogram.add_metric(_labels(state), buckets, found["sum"])
        yield histogram


def _straggler_gauges(
    slowest: dict[str, Any] | None, states: list[dict[str, Any]]
) -> Iterator[Metric]:
    ratio = GaugeMetricFamily(
        "poprun_slowest_step_ratio",
        "Ratio of step durations without waiting: the slowest instance divided by the median "
        "instance.",
    )
    if slowest is not None and slowest["median_of_all"]:
        ratio.add_metric((), slowest["step_seconds_without_waiting"] / slowest["median_of_all"])
    yield ratio
    straggler = GaugeMetricFamily(
        "poprun_straggler",
        "1 for the instance that the other instances wait for, else 0.",
        labels=_LABELS,
    )
    slow = slowest["instance"] if slowest is not None and slowest["is_straggler"] else None
    for state in states:
        straggler.add_metric(_labels(state), int(state["index"] == slow))
    yield straggler


def _labels(state: Mapping[str, Any]) -> list[str]:
    return [str(state["index"]), str(state["host"])]


class _Collector(Collector):
    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = first
        # No lock is needed, because the main thread replaces the whole document, and other threads
        # only read the document.
        self.last = b"{}"

    def collect(self) -> Iterator[Metric]:
        return metric_families(self._first, json.loads(self.last))


def _request_head(connection: socket.socket, seconds: float) -> bytes:
    """Return the head of an HTTP request; b"" if it is too long or not complete in time."""
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


def _body(environ: WSGIEnvironment, body: bytes) -> list[bytes]:
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _page(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
    """Answer a request for "/" with a page that links to the metrics."""
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        headers = [("Content-Type", "text/plain"), ("Allow", "GET, HEAD")]
        start_response("405 Method Not Allowed", headers)
        return [b"this page answers GET and HEAD; the metrics are at /metrics\n"]
    # An answer to HEAD has no body, so that the server cannot compute the length itself.
    start_response("200 OK", [*_PAGE_HEADERS, ("Content-Length", str(len(_PAGE)))])
    return _body(environ, _PAGE)


class _Handler(WSGIRequestHandler):
    timeout = _SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        try:
            self.rfile = io.BytesIO(_request_head(self.request, self.timeout))
        except TimeoutError:
            self.rfile = io.BytesIO()
        self.request.settimeout(self.timeout)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because this process has no log."""


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server that serves each scraper (client that collects metrics) in its own thread."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()
        self.setup_environ()
        self._metrics = make_wsgi_app(registry)
        self.set_app(self._answer)
        self._free_places = threading.BoundedSemaphore(_MOST_SCRAPERS)
        self._connections: dict[socket.socket, None] = {}  # open connections, oldest first

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["PATH_INFO"] == "/":
            return _page(environ, start_response)
        if environ["PATH_INFO"] != _PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return _body(environ, b"the metrics are at /metrics\n")
        # The answer is returned as one piece, so that the server sets the header Content-Length. If
        # this process ends while it sends an answer, a scraper then notices the missing part.
        return _body(environ, b"".join(self._metrics(environ, start_response)))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_places.acquire(blocking=False):
            # Close the oldest connection, because its scraper is slow: a quick scraper would
            # already have received its answer.
            for connection in list(self._connections)[:1]:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            if not self._free_places.acquire(timeout=_SECONDS):
                self.shutdown_request(request)
                return
        self._connections[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.pop(request, None)
            self._free_places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection. For example, a scraper may close a connection early."""
