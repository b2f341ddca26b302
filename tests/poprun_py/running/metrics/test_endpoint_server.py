"""The HTTP server of the endpoint, with silent, slow and many scrapers."""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from poprun_py.errors import UsageError
from poprun_py.running.metrics import endpoint
from poprun_py.running.metrics.metrics_feed import listen


@pytest.fixture
def served(monkeypatch):
    """Serve one number to at most two scrapers at a time, and return the address."""
    monkeypatch.setattr(endpoint, "_MOST_SCRAPERS", 2)
    registry = CollectorRegistry()
    Gauge("poprun_number", "A number.", registry=registry).set(7)
    server = endpoint._Server(listen(0, "--metrics-port 0"), registry)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address
    server.shutdown()
    server.server_close()
    thread.join()


def scrape(address, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}{path}", timeout=20) as response:
        return response.read().decode()


def test_only_the_metrics_are_served(served):
    assert "poprun_number 7.0" in scrape(served)
    assert "poprun_number 7.0" in scrape(served, "/metrics?name[]=poprun_number")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(served, "/other")


def asked(served, method, path):
    """Return the status, the headers and the body of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", served[1], timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Host": "<b>host</b>"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


@pytest.mark.parametrize("path", ["/", "/?<b>asked</b>"])
def test_the_first_page_links_to_the_metrics_and_repeats_no_request(served, path):
    status, headers, page = asked(served, "GET", path)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(headers["Content-Length"]) == len(page)
    assert "<b>" not in page
    (link,) = re.findall('href="(.*?)"', page)
    assert "poprun_number 7.0" in scrape(served, urllib.parse.urljoin("/", link))
    status, of_head, body = asked(served, "HEAD", path)
    assert (status, body) == (200, "")
    assert of_head["Content-Length"] == headers["Content-Length"]
    status, headers, _ = asked(served, "POST", path)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/metrics", "/other"])
def test_an_answer_to_head_has_no_body(served, path):
    with socket.create_connection(served, timeout=20) as scraper:
        scraper.sendall(f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
        answer = b"".join(iter(lambda: scraper.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.0 405 " if path == "/metrics" else b"HTTP/1.0 404 ")
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_an_answer_has_its_length(served, encoding):
    url = f"http://127.0.0.1:{served[1]}/metrics"
    request = urllib.request.Request(url, headers={"Accept-Encoding": encoding})
    with urllib.request.urlopen(request, timeout=20) as response:
        length = response.headers["Content-Length"]
        assert response.headers["Content-Encoding"] == (encoding if encoding == "gzip" else None)
        assert int(length) == len(response.read()) > 0


@pytest.mark.parametrize("words", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nA: b\r\n"])
def test_an_incomplete_request_is_closed_after_the_time_out(served, monkeypatch, words):
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.2)
    with socket.create_connection(served, timeout=20) as silent:
        silent.sendall(words)
        end = time.monotonic() + 60
        while not select.select([silent], [], [], 0.01)[0]:
            assert time.monotonic() < end
            with contextlib.suppress(ConnectionError):
                silent.sendall(b"x")
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def test_a_request_that_is_too_long_is_closed(served):
    request = b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 100_000
    with socket.create_connection(served, 20) as loud, contextlib.suppress(ConnectionError):
        loud.sendall(request)
        assert loud.recv(1) == b""
    assert "poprun_number" in scrape(served)


def test_scrapers_are_served_despite_many_silent_connections(served, monkeypatch):
    monkeypatch.setattr(endpoint._Handler, "timeout", 60)
    with contextlib.ExitStack() as crowd:
        for _ in range(10):
            crowd.enter_context(socket.create_connection(served))
        for _ in range(3):
            assert "poprun_number" in scrape(served)


@settings(max_examples=20)
@given(st.binary(max_size=100))
def test_random_requests_are_refused(words):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
        assert endpoint._request_head(ours, 20) in (b"", words)


def test_a_port_belongs_to_the_loopback_address_and_to_one_job(served):
    assert served[0] == "127.0.0.1"
    with pytest.raises(
        UsageError, match=rf"^--x: cannot listen on port {served[1]} of 127.0.0.1: Address already"
    ):
        listen(served[1], "--x")
