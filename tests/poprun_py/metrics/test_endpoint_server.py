"""The server of the endpoint: who is silent is let go, and there is an end to how many it takes."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request

import pytest
from conftest import wait_until
from prometheus_client import CollectorRegistry, Gauge

from poprun_py.errors import UsageError
from poprun_py.metrics import endpoint
from poprun_py.metrics.endpoint_recorder import listen


@pytest.fixture
def served(monkeypatch):
    """Serve one number, to two scrapers at a time; returns the address."""
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
        scrape(served, "/")


def test_who_says_nothing_is_let_go(served, monkeypatch):
    monkeypatch.setattr(endpoint._Handler, "timeout", endpoint._Handler.timeout / 50)
    with socket.create_connection(served, timeout=20) as silent:
        silent.sendall(b"GET /metr")
        assert silent.recv(1) == b""


def test_who_comes_when_there_is_no_room_is_sent_away_and_may_come_again(served, monkeypatch):
    monkeypatch.setattr(endpoint._Handler, "timeout", 60)
    with (
        socket.create_connection(served),
        socket.create_connection(served),
        socket.create_connection(served, timeout=20) as third,
    ):
        assert third.recv(1) == b""

    def is_served():
        try:
            return "poprun_number" in scrape(served)
        except OSError:
            return False

    wait_until(is_served)


def test_a_port_is_one_of_this_machine_only_and_of_one_job(served):
    assert served[0] == "127.0.0.1"
    with pytest.raises(UsageError, match=rf"^--x: port {served[1]} of 127.0.0.1: Address already"):
        listen(served[1], "--x")
