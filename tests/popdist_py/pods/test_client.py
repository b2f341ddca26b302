"""The client of a pod's server: what it repeats, how it renews, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.listening import free_port
from support.memory_pod import POD, MemoryPod
from support.pod_servers import TOKEN, served
from support.processes import wait_until

from popdist_py.pods.model.pod_errors import (
    InvalidRequestError,
    NameTakenError,
    NotAllowedError,
    PodError,
    UnknownNameError,
    UnreachableError,
)
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest
from popdist_py.pods.server import pod_api, server_store
from popdist_py.pods.server.server_store import ServerStore

HOLDER = Holder(host="h", pid=1, user="u", program="p")


@contextlib.contextmanager
def opened(port, **more):
    store = ServerStore(f"http://127.0.0.1:{port}", TOKEN, **{"timeout": 20.0, **more})
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(server_store, "_FIRST_PAUSE", 0.01)


@pytest.fixture
def pod():
    return MemoryPod()


@pytest.fixture
def port(pod):
    with served(pod, seconds=1.2) as port:
        yield port


def test_calls_return_what_the_store_returns(pod, port):
    with opened(port, user="müller") as store:
        made = store.create_partition(PartitionRequest(name="a/../b?&", size=4))
        assert made.owner == "müller"
        assert store.partition("a/../b?&") == made
        assert store.partitions() == (made,)
        assert store.pod() == POD
        assert store.reset_partition("a/../b?&").generation == 1
        store.remove_partition("a/../b?&", force=True)
        assert pod.calls[-1] == ("remove_partition", "müller", "a/../b?&", True)
        with pytest.raises(UnknownNameError, match="there is no partition 'x'"):
            store.partition("x")
        with pytest.raises(PodError, match="see the standard error"):
            store.fail_partition("x", "y")


@pytest.mark.parametrize("token", ["", "  \n", "two words", "new\nline", "\xe9" * 20])
def test_a_token_that_can_be_none_is_not_sent(token):
    with pytest.raises(NotAllowedError, match="POPRUN_POD_TOKEN_FILE"):
        ServerStore("http://127.0.0.1:1", token)


def test_a_wrong_token_says_what_to_do(port):
    store = ServerStore(f"http://127.0.0.1:{port}", "another-token", 5)
    with pytest.raises(NotAllowedError, match=r"127\.0\.0\.1:\d+ .*POPRUN_POD_TOKEN_FILE"):
        store.pod()
    store.close()


@pytest.mark.parametrize(
    "url",
    ["", "x", "http://h:0", "http://h:99999", "https://h:1", "http://u:p@h:1",
     "http://h:1/x", "http://h h:1", "http://:1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InvalidRequestError, match="http://HOST:PORT"):
        ServerStore(url, TOKEN)


def test_a_port_without_a_server_is_an_error_of_one_line():
    port = free_port()
    with opened(port) as store, pytest.raises(UnreachableError) as refused:
        store.pod()
    message = str(refused.value)
    assert f"127.0.0.1:{port} cannot be reached (Connection refused)" in message
    assert "poprun-py-pod serve" in message
    assert "\n" not in message


def test_a_server_that_does_not_answer_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        since = time.monotonic()
        with opened(port, timeout=0.15) as store:
            with pytest.raises(UnreachableError, match=r"did not answer within 0\.15 s: start"):
                store.pod()
            with pytest.raises(UnreachableError, match=r"change may have been made: start"):
                store.reset_partition("p")
        assert time.monotonic() - since >= 0.3


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"<html>", b"[1]", b"{}", b'{"name": "p"}', b'{"error": 1}', b"x" * (17 << 20)],
    ids=["nothing", "text", "html", "array", "object", "pod", "error", "large"],
)
@pytest.mark.parametrize("status", [200, 302, 404])
def test_something_else_at_the_address_is_recognised(status, body):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with (
            opened(server.server_port) as store,
            pytest.raises(
                UnreachableError, match=r"\(HTTP \d+\) is not the answer of a pod server"
            ),
        ):
            store.pod()
        thread.join(20)


def test_a_server_of_another_version_is_said(port, monkeypatch):
    with opened(port) as store:
        monkeypatch.setattr(pod_api, "API", 2)
        with pytest.raises(
            UnreachableError, match=r"does not know /v2/pod, because the server has another"
        ):
            store.pod()


def _whole_request(link):
    asked = link.recv(65536)
    while b"\r\n\r\n" not in asked:
        asked += link.recv(65536)
    head, _, body = asked.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += link.recv(65536)
    return head + b"\r\n\r\n" + body


class Cutter:
    """Passes connections to a port, and cuts the first answers off after they were made."""

    def __init__(self, port, cuts):
        self._port, self.cuts = port, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, socket.create_connection(("127.0.0.1", self._port)) as behind:
                asked = _whole_request(link)
                behind.sendall(asked.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                answer = b""
                while part := behind.recv(65536):
                    answer += part
                if self.cuts:
                    self.cuts -= 1
                else:
                    link.sendall(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


def test_a_request_whose_answer_was_lost_is_done_once(pod, port):
    with Cutter(port, cuts=2) as cutter, opened(cutter.port) as store:
        made = store.create_partition(PartitionRequest(name="p", size=4))
        assert cutter.cuts == 0
        assert [name for name, *_ in pod.calls] == ["create_partition"]
        assert made == pod.kept["p"]
        cutter.cuts = 1
        assert store.partitions() == (made,)
        # The same words again are another request.
        with pytest.raises(NameTakenError):
            store.create_partition(PartitionRequest(name="p", size=4))
        cutter.cuts = 9
        with pytest.raises(
            UnreachableError, match="without an answer; the requested change may have been made"
        ):
            store.reset_partition("p")
        assert [name for name, *_ in pod.calls].count("reset_partition") == 1
        cutter.cuts = 0


def test_attachments_are_renewed_until_they_are_given_back(pod, port):
    renewed = []
    pod.renew = lambda identity, _: renewed.append(identity)
    with opened(port) as store:
        first = store.attach("p", 2, HOLDER)
        second = store.attach("p", 4, HOLDER, ipus=[4, 5, 6, 7])
        assert (first.ipus, second.ipus) == ((0, 1), (4, 5, 6, 7))
        assert {each.id for each in store.attachments()} == {""}
        wait_until(lambda: {first.id, second.id} <= set(renewed))
        store.detach(first)
        store.detach(first)
        assert set(pod.held) == {second.id}
        renewed.clear()
        wait_until(lambda: len(renewed) >= 3)
        # What was under way when it was given back may still come.
        assert renewed[1:] == [second.id] * (len(renewed) - 1)
    assert pod.held == {}
    with pytest.raises(UnreachableError, match="has closed its connection"):
        store.pod()


def test_what_was_taken_away_is_taken_back(pod, port):
    with opened(port) as store:
        held = store.attach("p", 2, HOLDER, ipus=[2, 3])
        del pod.held[held.id]  # as after a cut of the network
        wait_until(lambda: pod.held)
        (again,) = pod.held.values()
        assert (again.ipus, again.id == held.id) == ((2, 3), False)
        wait_until(lambda: again.id in {one.attachment.id for one in store._renewal._held.values()})
        store.detach(held)
        assert pod.held == {}


def test_what_somebody_else_has_by_then_is_said(pod, port, caplog):
    with opened(port) as store:
        held = store.attach("p", 2, HOLDER)
        pod.attach_renewed = lambda *_, **__: (_ for _ in ()).throw(UnknownNameError("no p"))
        del pod.held[held.id]

        def said():  # the server in this process says when it is busy
            return [one for one in caplog.records if not one.name.startswith("waitress")]

        wait_until(said)
        (record,) = said()
        message = record.getMessage()
        assert "this job has lost its lease of the IPUs 0, 1 of partition p," in message
        assert message.endswith("other jobs may use these IPUs (no p)")


def test_a_forked_child_neither_renews_nor_gives_back(pod, port):
    with opened(port) as store:
        held = store.attach("p", 2, HOLDER)
        child = os.fork()
        if child == 0:
            try:
                store.detach(held)
                store.close()
                os._exit(0 if threading.active_count() == 1 and held.id else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert set(pod.held) == {held.id}
        child = os.fork()
        if child == 0:
            try:
                # Its calls use connections of their own.
                parents = store._pool
                os._exit(0 if store.pod() == POD and store._pool is not parents else 1)
            finally:
                os._exit(2)
        assert store.pod() == POD
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_does_not_wait_for_a_server_that_is_gone(pod):
    with served(pod) as port:
        store = ServerStore(f"http://127.0.0.1:{port}", TOKEN)
        store.attach("p", 2, HOLDER)
    store.close()
    store.close()


def test_no_secret_is_in_what_is_shown(port):
    with opened(port) as store:
        assert TOKEN not in repr(store) + str(store) + json.dumps(store.where)
