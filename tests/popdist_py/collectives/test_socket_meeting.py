"""Meetings over sockets: one host and several, groups, lost instances, strangers, time limits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.listening import free_port
from support.processes import wait_until

from popdist_py.collectives.between_hosts import socket_meeting
from popdist_py.collectives.between_hosts.value_relay import Answer, Exchanges, Link, Relay
from popdist_py.collectives.communicators.join import JobMeeting
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.environment import (
    JOB_FOLDER,
    MEETING_PORT,
    MEMORY_CHECKPOINTS,
    RESTART_COUNT,
    SECRET,
    CollectiveSettings,
    InstanceEnvironment,
)
from popdist_py.errors import InstanceLostError, PopdistError

PLACES = pytest.mark.parametrize("is_alone", [True, False], ids=["one host", "several hosts"])


@pytest.fixture(autouse=True)
def waits_are_short(monkeypatch):
    monkeypatch.setattr(WaitLimits, "launcher_grace", 0.0)
    # The threads of a test are instances of a job that Python's exit must not wait for.
    monkeypatch.setattr(Relay, "_wait_for_others", lambda _: None)


def place(folder, is_alone):
    """Return the address of a relay, and the variables of the programs."""
    environ = {MEMORY_CHECKPOINTS: "1", SECRET: "secret", "MASTER_ADDR": "127.0.0.1"}
    if is_alone:
        environ[JOB_FOLDER] = str(folder)
    else:
        environ[MEETING_PORT] = str(free_port())
    instance = environment(0, 2, local=2 if is_alone else 1)
    return socket_meeting.address_of_relay(environ, instance), environ


def environment(index, count, local=1):
    return InstanceEnvironment(
        num_total_replicas=count, num_local_instances=local, replica_index_offset=index
    )


def meetings(folder, count, *, is_alone=True, timeout=30.0):
    """Return the meeting of each of ``count`` instances, each of which is a thread."""
    address, environ = place(folder, is_alone)
    settings = CollectiveSettings(hang_timeout=timeout, network="lo")

    def connect(index):
        return socket_meeting.connect_job(address, environment(index, count), settings, environ)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(connect, range(count)))


def on_each(met, function):
    with ThreadPoolExecutor(len(met)) as pool:
        return [each.result(60) for each in [pool.submit(function, one) for one in met]]


@PLACES
@pytest.mark.parametrize("count", [2, 5])
def test_instances_exchange_values_and_divide_into_meetings(tmp_path, count, is_alone):
    def meet(meeting):
        assert isinstance(meeting, JobMeeting)
        rank = meeting.rank
        found = [meeting.all_gather([rank, "x" * 70_000]), meeting.broadcast({"a": rank})]
        half = meeting.split(rank % 2, -rank)
        found += [half.rank, half.all_gather(rank), half.broadcast(rank)]
        return [*found, meeting.all_gather(None)]

    met = meetings(tmp_path, count, is_alone=is_alone)
    assert [(each.rank, each.size) for each in met] == [(rank, count) for rank in range(count)]
    for rank, found in enumerate(on_each(met, meet)):
        half = [other for other in reversed(range(count)) if other % 2 == rank % 2]
        assert found[0] == [[other, "x" * 70_000] for other in range(count)]
        assert found[1:] == [{"a": 0}, half.index(rank), half, half[0], [None] * count]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("late", [0, 2])
def test_instances_wait_without_a_limit_for_one_that_joins_late(tmp_path, late):
    address, environ = place(tmp_path, True)
    settings = CollectiveSettings(hang_timeout=0.1)

    def connect(index):
        return socket_meeting.connect_job(address, environment(index, 3), settings, environ)

    with ThreadPoolExecutor(3) as pool:
        met = {index: pool.submit(connect, index) for index in {0, 1, 2} - {late}}
        time.sleep(0.5)
        assert not any(each.done() for each in met.values())
        met[late] = pool.submit(connect, late)
        assert (
            on_each([each.result(60) for each in met.values()], lambda each: each.size) == [3] * 3
        )


def test_nothing_listens_after_all_have_connected(tmp_path):
    address, environ = place(tmp_path, False)
    settings = CollectiveSettings(network="lo")

    def connect(index):
        return socket_meeting.connect_job(address, environment(index, 3), settings, environ)

    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(connect, index) for index in (1, 0)]
        wait_until(lambda: listens(address), 30, "instance 0 does not listen")
        started.append(pool.submit(connect, 2))
        met = [each.result(60) for each in started]
    assert not listens(address)
    assert on_each(met, lambda meeting: meeting.broadcast(meeting.rank)) == [0] * 3


def listens(address):
    with contextlib.suppress(OSError), socket.create_connection(address, 5):
        return True
    return False


def test_a_caller_without_the_secret_takes_no_place(tmp_path, caplog):
    address, environ = place(tmp_path, False)
    settings = CollectiveSettings(network="lo")

    def connect(index, **other):
        instance = environment(index, 2)
        return socket_meeting.connect_job(address, instance, settings, {**environ, **other})

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, 0)
        wait_until(lambda: listens(address), 30, "instance 0 does not listen")
        secret, claim = b"another secret", (1).to_bytes(4, "big")
        assert socket_meeting._call_remote(address, secret, claim) is None
        met = [first, pool.submit(connect, 1)]
        assert on_each([each.result(60) for each in met], lambda each: each.all_gather(1)) == [
            [1, 1],
            [1, 1],
        ]
    assert "is not of this job" in caplog.text


def test_two_threads_of_an_instance_may_wait_for_different_groups(tmp_path):
    met, limits = meetings(tmp_path, 4), WaitLimits(30)
    with ThreadPoolExecutor(4) as pool:
        waiting = {other: pool.submit(met[1].group, [1, other], limits, "call") for other in (2, 3)}
        for other in (3, 2):
            second = met[other].group([1, other], limits, "call")
            first = waiting[other].result(60)
            assert [(each.rank, each.size) for each in (first, second)] == [(0, 2), (1, 2)]
            gathered = [pool.submit(each.all_gather, each.rank) for each in (first, second)]
            assert [each.result(60) for each in gathered] == [[0, 1]] * 2


def test_a_wait_for_an_instance_that_does_not_come_names_it(tmp_path):
    met = meetings(tmp_path, 3)
    with pytest.raises(
        InstanceLostError, match=r"call: instances 1, 2 did not make this call within 0.2 s"
    ):
        met[0].group([0, 1, 2], WaitLimits(0.2), "call")


@PLACES
def test_a_wait_for_an_instance_that_has_ended_fails_at_once(tmp_path, is_alone):
    met = meetings(tmp_path, 3, is_alone=is_alone, timeout=20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(met[1].all_gather, 1)
        time.sleep(0.1)
        assert not waiting.done()
        del met[2]
        with pytest.raises(InstanceLostError, match="instance 2 ended"):
            waiting.result(60)
    with pytest.raises(InstanceLostError, match="instance 2 ended"):
        met[0].all_gather(0)
    # The other instances can still make a group.
    pair = on_each(met, lambda each: each.group([0, 1], WaitLimits(30), "call").all_gather(1))
    assert pair == [[1, 1]] * 2


def test_the_end_of_instance_0_ends_the_waits_of_the_others(tmp_path):
    own, theirs = socket.socketpair()
    meeting = socket_meeting.SocketMeeting(
        socket_meeting._RelayedValues(Link(own), 1), [0, 1], "job", WaitLimits(1000), "init()"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meeting.all_gather, 1)
        assert theirs.recv(4)
        theirs.close()
        with pytest.raises(InstanceLostError, match=r"init\(\): instance 0 ended"):
            waiting.result(60)


def test_an_address_that_cannot_be_listened_at_is_an_error(tmp_path):
    with pytest.raises(PopdistError, match="instance 0 cannot open the address"):
        socket_meeting._listener(str(tmp_path / "none" / "relay"), None)


def test_a_forked_child_does_not_keep_the_connection(tmp_path):
    met = meetings(tmp_path, 2, timeout=20)
    end_read, end_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_write)
        os.read(end_read, 1)
        os._exit(0)
    try:
        del met[1]
        with pytest.raises(InstanceLostError, match="instance 1 ended"):
            met[0].all_gather(0)
    finally:
        os.close(end_write)
        os.close(end_read)
        os.waitpid(child, 0)


def test_the_relay_ends_with_its_last_link():
    pairs = [socket.socketpair() for _ in range(2)]
    relay = Relay({index: Link(theirs) for index, (_, theirs) in enumerate(pairs)})
    before = set(threading.enumerate())
    relay.start()
    (thread,) = (
        each
        for each in threading.enumerate()
        if each.name == "popdist-relay" and each not in before
    )
    assert not relay._others_left.is_set()
    pairs[1][0].close()
    assert relay._others_left.wait(30)  # so Python's exit in instance 0 goes on
    assert thread.is_alive()
    pairs[0][0].close()
    thread.join(30)
    assert not thread.is_alive()


def test_an_exchange_is_answered_once_for_instance_0_last():
    exchanges = Exchanges()
    assert exchanges.offer(0, "k", [2, 0], "zero") == []
    assert exchanges.offer(2, "k", [2, 0], "two") == [
        (2, Answer("k", "values", ["two", "zero"])),
        (0, Answer("k", "values", ["two", "zero"])),
    ]
    # The answer was on its way when the instance asked who is missing.
    assert exchanges.withdraw(0, "k") == []
    assert exchanges.lose(2) == []
    assert exchanges.offer(0, "l", [0, 2], 1) == [(0, Answer("l", "lost", [2]))]
    assert exchanges.withdraw(0, "l") == [(0, Answer("l", "missing", [0, 2]))]


@pytest.mark.parametrize(
    ("changed", "local", "address"),
    [
        ({}, 2, "/f/relay-0"),
        ({RESTART_COUNT: "3"}, 2, "/f/relay-3"),
        ({MEMORY_CHECKPOINTS: ""}, 2, None),
        ({JOB_FOLDER: ""}, 2, None),
        ({}, 1, ("h", 7)),
        ({MEETING_PORT: ""}, 1, None),
        ({"MASTER_ADDR": ""}, 1, None),
    ],
)
def test_the_address_of_the_relay_or_mpi(changed, local, address):
    environ = {
        MEMORY_CHECKPOINTS: "1", JOB_FOLDER: "/f", MEETING_PORT: "7", "MASTER_ADDR": "h", **changed
    }  # fmt: skip
    assert socket_meeting.address_of_relay(environ, environment(0, 2, local)) == address
