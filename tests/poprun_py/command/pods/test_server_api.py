"""Tests of the authentication, errors, repeated requests and limits of the pod server's API."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from support.memory_pod import POD, MemoryPod
from support.pod_servers import TOKEN, served
from support.processes import wait_until

from popdist_py.pods.model.json_values import from_json
from popdist_py.pods.server import pod_api

HOLDER = {"host": "h", "pid": 1, "user": "u", "program": "p"}
PASS = {"Authorization": f"Bearer {TOKEN}", pod_api.USER_HEADER: "ada"}


class Site:
    """A pod in memory with a server, and functions that send requests to it."""

    def __init__(self, store, port, log, access):
        self.store, self.port, self.log, self.access = store, port, log, access
        self.pool = urllib3.HTTPConnectionPool("127.0.0.1", port, retries=False, timeout=20)

    def ask(self, verb, path, body=None, headers=PASS, **more):
        if isinstance(body, dict):
            body = json.dumps(body)
        answer = self.pool.request(verb, path, body=body, headers={**headers, **more})
        return answer.status, json.loads(answer.data), answer

    def raw(self, data, wait=20.0):
        """Send bytes, and return all bytes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as link:
            found = b""
            # A server that stops reading resets the connection.
            with contextlib.suppress(ConnectionError):
                link.sendall(data)
                with contextlib.suppress(OSError):  # not connected any more
                    link.shutdown(socket.SHUT_WR)
                while part := link.recv(65536):
                    found += part
            return found


@pytest.fixture(scope="module")
def site():
    log, access = [], []
    store = MemoryPod()
    with served(store, log=log, access_log=access.append) as port:
        made = Site(store, port, log, access)
        yield made
        made.pool.close()


@pytest.fixture(autouse=True)
def empty(site):
    for each in (site.store.calls, site.store.kept, site.store.held, site.log, site.access):
        each.clear()


def test_without_a_token_only_the_version_is_answered(site):
    status, said, _ = site.ask("GET", pod_api.VERSION_PATH, headers={})
    assert (status, said["server"], said["api"]) == (200, "poprun-py-pod", 1)
    answers = {
        (status, json.dumps(said))
        for path in ("/v1/pod", "/v1/partition?name=x", "/", "/v2/pod", "/v1/version/")
        for status, said, answer in [site.ask("GET", path, headers={})]
        if answer.headers["WWW-Authenticate"] == "Bearer" and "Server" not in answer.headers
    }
    assert answers == {
        (401, '{"error": "not-allowed", "message": "the token of this server is missing"}')
    }


@pytest.mark.parametrize(
    "given_token",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN,
     "Bearer \xe9"],
)  # fmt: skip
def test_a_wrong_token_is_refused(site, given_token):
    assert site.ask("GET", "/v1/pod", Authorization=given_token)[0] == 401
    body = {"request": {"name": "p", "size": 4}}
    assert site.ask("POST", "/v1/create-partition", body, Authorization=given_token)[0] == 401
    assert site.store.calls == []


@pytest.mark.parametrize("user", ["", "a b", "%0a", "x" * 65, "%ff"])
def test_the_header_with_the_user_is_required(site, user):
    status, said, _ = site.ask("GET", "/v1/pod", headers={**PASS, pod_api.USER_HEADER: user})
    assert (status, said["error"]) == (400, "invalid-request")
    assert pod_api.USER_HEADER in said["message"]


def test_a_call_is_made_for_the_user_of_the_header(site):
    user = {pod_api.USER_HEADER: "m%C3%BCller"}
    body = {"request": {"name": "p4", "size": 4}}
    status, said, _ = site.ask("POST", "/v1/create-partition", body, **user)
    assert (status, said["owner"], said["sync_type"]) == (200, "müller", "ST_GS2_DEFAULT")
    assert site.ask("GET", "/v1/partition?name=p4")[1] == said
    assert site.ask("GET", "/v1/partitions")[1] == [said]
    assert from_json(type(POD), site.ask("GET", "/v1/pod")[1], "pod") == POD


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "code", "part"),
    [
        ("GET", "/v1/partition?name=x", None, 404, "unknown-name", "'x'"),
        ("GET", "/v1/partition", None, 400, "invalid-request", "partition.name is missing"),
        ("GET", "/v1/partition?name=a&name=b", None, 400, "invalid-request", "is an array"),
        ("GET", "/v1/pod?x=1", None, 400, "invalid-request", '"x"'),
        ("POST", "/v1/reset-partition", "{", 400, "invalid-request", "not JSON"),
        ("POST", "/v1/reset-partition", "[" * 99999, 400, "invalid-request", "levels"),
        ("POST", "/v1/reset-partition", {"name": 1}, 400, "invalid-request", "name is 1"),
        ("POST", "/v1/remove-partition", {"name": "x", "force": False}, 404, "unknown-name", "x"),
        ("GET", "/v1/reset-partition", None, 405, "unknown-call", "POST /v1/reset-partition"),
        ("GET", "/v1/nothing", None, 404, "unknown-call", "GET /v1/pod"),
        ("POST", "/v1/fail-partition", {"name": "x", "reason": ""}, 500, "error", "standard error"),
    ],
)
def test_an_error_has_a_code_and_a_message_of_one_line(site, verb, path, body, status, code, part):
    got, said, _ = site.ask(verb, path, body)
    assert (got, said["error"]) == (status, code)
    assert part in said["message"]
    assert "\n" not in said["message"]
    assert set(said) == {"error", "message"}
    # The traceback of an internal error is only in the server's log.
    assert ("a defect of the store" in "".join(site.log)) is (status == 500)
    assert "defect" not in said["message"]


def test_a_repeated_request_is_done_once(site):
    body = {"partition": "p", "num_ipus": 2, "holder": HOLDER, "ipus": None}
    once = {pod_api.REQUEST_HEADER: "request-1"}
    first = site.ask("POST", "/v1/attach", body, **once)[1]
    assert site.ask("POST", "/v1/attach", body, **once)[1] == first
    assert len(site.store.held) == 1
    # Requests of other users, with other ids or without an id are not repeats.
    assert site.ask("POST", "/v1/attach", body, **once, **{pod_api.USER_HEADER: "bob"})[0] == 200
    assert site.ask("POST", "/v1/attach", body)[1] != first
    assert len(site.store.held) == 3
    status, said, _ = site.ask("POST", "/v1/attach", {**body, "num_ipus": 4}, **once)
    assert (status, said["error"]) == (400, "invalid-request")
    assert site.ask("POST", "/v1/attach", body, **{pod_api.REQUEST_HEADER: "short"})[0] == 400


def test_a_repeat_waits_for_the_request_in_progress(site):
    site.store.gate.clear()
    body = {"request": {"name": "slow", "size": 4}}
    answers = []
    askers = [
        threading.Thread(
            target=lambda: answers.append(
                site.ask(
                    "POST",
                    "/v1/create-partition",
                    body,
                    **{pod_api.REQUEST_HEADER: "same-one"},
                )
            )
        )
        for _ in range(3)
    ]
    for asker in askers:
        asker.start()
    site.store.gate.set()
    for asker in askers:
        asker.join(20)
    assert [status for status, _, _ in answers] == [200] * 3
    assert len(site.store.calls) == 1


def test_ids_of_attachments_are_not_in_lists(site):
    body = {"partition": "p", "num_ipus": 2, "holder": HOLDER, "ipus": [2, 3]}
    lease = site.ask("POST", "/v1/attach", body)[1]
    secret = lease["attachment"]["id"]
    assert secret in site.store.held
    assert lease["seconds"] == 30
    listed = site.ask("GET", "/v1/attachments")[1]
    assert [(each["id"], each["ipus"]) for each in listed] == [("", [2, 3])]
    assert site.ask("POST", "/v1/renew", {"ids": [secret, "other"]})[1] == ["other"]
    assert site.ask("POST", "/v1/detach", {"attachment": lease["attachment"]})[1] is None
    assert site.store.held == {}
    assert secret not in "".join(site.access)


def test_the_access_log_has_users_and_calls_but_no_secrets(site):
    site.ask("GET", "/v1/partition?name=a%0Ab%1B")
    site.ask("GET", "/v1/pod", headers={"Authorization": "Bearer hidden-one"})
    lines = [line.rpartition(" ")[0].rpartition(" ")[0] for line in site.access]
    assert lines == [
        "127.0.0.1 ada GET /v1/partition?name=a%0Ab%1B 404",
        "127.0.0.1 - GET /v1/pod 401",
    ]
    assert TOKEN not in "".join(site.access)
    assert "hidden-one" not in "".join(site.access)


@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(
        lambda noise: b"POST /v1/attach HTTP/1.1\r\nAuthorization: Bearer " + TOKEN.encode()
        + b"\r\n" + pod_api.USER_HEADER.encode()
        + b": ada\r\nContent-Length: %d\r\n\r\n" % len(noise) + noise
    )
    | st.binary(max_size=60).map(lambda noise: b"GET /v1/" + noise + b" HTTP/1.1\r\n\r\n")
)  # fmt: skip
def test_random_bytes_are_refused_and_the_server_goes_on(site, noise):
    answer = site.raw(noise)
    assert not answer.startswith(b"HTTP/1.1 2")
    assert b"Traceback" not in answer
    assert site.store.calls == []
    assert site.log == []


def test_too_large_bodies_are_refused(site):
    head = f"POST /v1/attach HTTP/1.1\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    assert site.raw(head).startswith(b"HTTP/1.1 413")
    body = (
        b"POST /v1/attach HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 20
    )
    assert site.raw(body)[9:12] in (b"413", b"")
    assert site.store.calls == []
    many = b"GET /v1/pod HTTP/1.1\r\n" + b"X-A: " + b"a" * (32 << 10) + b"\r\n\r\n"
    assert site.raw(many)[9:12] in (b"431", b"")


@pytest.mark.sweep
def test_connections_of_slow_senders_are_closed_while_others_are_served():
    with served(MemoryPod(), idle_seconds=0.6) as port:
        drops = socket.create_connection(("127.0.0.1", port), timeout=20)
        idle = socket.create_connection(("127.0.0.1", port), timeout=20)
        pool = urllib3.HTTPConnectionPool("127.0.0.1", port, retries=False, timeout=20)
        since = time.monotonic()
        with drops, idle, pool:
            drops.sendall(b"POST /v1/attach HTTP/1.1\r\n")
            drops.settimeout(0.05)
            # The sender is never silent for as long as the time-out of the server.
            while time.monotonic() - since < 15:
                try:
                    drops.sendall(b"X")
                    if drops.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
                finally:
                    assert pool.request("GET", pod_api.VERSION_PATH).status == 200
            assert time.monotonic() - since < 15
            assert idle.recv(1) == b""


def test_a_client_is_served_while_another_holds_all_connections():
    """Another address holds the most connections; a client with an older one is still served."""
    ask = b"GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n"
    with served(MemoryPod()) as port, contextlib.ExitStack() as crowd:

        def connected(source):
            return crowd.enter_context(
                socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
            )

        kept, held = connected("127.0.0.7"), [connected("127.0.0.9") for _ in range(700)]
        for _ in range(3):
            with connected("127.0.0.8") as new:
                new.sendall(ask)
                assert new.recv(12) == b"HTTP/1.1 200"
            held += [connected("127.0.0.9") for _ in range(100)]
        kept.sendall(ask)
        assert kept.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: sum(map(has_ended, held)) >= len(held) - 512)


def has_ended(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
