"""Diagnosis of a job that does not start, and hosts that differ from the plan; without any host."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
from support.launcher.jobs import a_job
from support.processes import wait_until

from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.supervise import job_start
from poprun_py.running.supervise.job_description import Hosts, JobFiles, place_of_run
from poprun_py.running.supervise.job_start import (
    Finding,
    ProgramStart,
    Question,
    StartDiagnosis,
    misplaced,
)
from poprun_py.running.supervise.launch_result import Cause

NEVER = float("inf")


def peers(*hosts):
    """Return instances that run on ``hosts``."""
    return {index: SimpleNamespace(host=host) for index, host in enumerate(hosts)}


@pytest.mark.parametrize("planned", [("a", "b"), ("", "b"), ("", ""), ()])
def test_instances_on_their_hosts_start(planned):
    assert misplaced(planned, peers("a", "b")) == ""


def test_an_instance_on_another_host_is_refused_with_both_names():
    problem = misplaced(("a", "b"), peers("a", "c"))
    assert problem.startswith("instance 1 runs on host c, but the plan places it on host b: ")


class Answered:
    """A question whose answer is complete at the second request."""

    def __init__(self, explain):
        self.explain, self.times, self.is_closed = explain, 0, False

    def answer(self):
        self.times += 1
        return self.explain() if self.times > 1 else None

    def close(self):
        self.is_closed = True


def test_the_hosts_are_asked_until_they_find_a_reason(monkeypatch):
    monkeypatch.setattr(job_start, "Question", Answered)
    answers = [Finding(""), Finding("its clock is off"), Finding("it does not answer", True)]
    found = []
    diagnosis = StartDiagnosis(2, lambda: answers.pop(0), found.append, 0.0)
    now, waits = 0.0, []
    for _ in range(3):
        before = len(found)
        waits.append(diagnosis.next_deadline() - now)
        diagnosis.on_time(now)
        now = diagnosis.next_deadline()
        diagnosis.on_time(now)  # asks the hosts
        assert 0 < diagnosis.next_deadline() - now < 1
        assert len(found) == before
        diagnosis.on_time(now := diagnosis.next_deadline())
        assert len(found) == before + 1
    assert 10 < waits[0] < 15
    assert waits[0] < waits[1] < waits[2]
    assert diagnosis.next_deadline() == NEVER
    assert [finding.sentence(1, 2, "") for finding in found] == [
        "1 of 2 instances have started after 10 s",
        "1 of 2 instances have started after 31 s. its clock is off",
        "it does not answer",
    ]
    assert found[2].sentence(1, 2, "no\n route\n") == "it does not answer. mpirun said: no route"


def test_hosts_that_do_not_answer_delay_neither_the_loop_nor_the_end():
    before = set(psutil.Process().children())
    found = []
    diagnosis = StartDiagnosis(1, lambda: time.sleep(1000), found.append, 0.0)
    diagnosis.on_time(20.0)
    (asking,) = set(psutil.Process().children()) - before
    diagnosis.on_time(30.0)
    assert found == []
    diagnosis.end()
    assert not asking.is_running()


def refuse():
    raise StartError("host b: it does not answer")


@pytest.mark.parametrize(
    ("explain", "found"),
    [
        (refuse, Finding("host b: it does not answer", True)),
        (lambda: "Host b: its clock is off", Finding("Host b: its clock is off")),
        (lambda: 1 // 0, Finding("")),
    ],
)
def test_the_child_process_returns_the_answer_of_the_hosts(explain, found, capfd):
    question = Question(explain)
    wait_until(lambda: (answer := question.answer()) is not None and found == answer)


def test_no_host_is_asked_after_all_instances_have_connected():
    def explain():
        raise AssertionError("nothing was to be asked")

    diagnosis = StartDiagnosis(1, explain, print, 0.0)
    diagnosis.end()
    diagnosis.on_time(1e9)


def test_a_job_on_this_host_asks_no_hosts():
    diagnosis = StartDiagnosis(2, None, print, 0.0)
    assert diagnosis.next_deadline() == NEVER


class Channel:
    """A control channel that records the kinds of the frames for each instance."""

    def __init__(self, count):
        self.sent = []
        self.peers = {index: self.peer(index) for index in range(count)}

    def peer(self, index):
        def send_parts(frames):
            self.sent.append((index, next(frames)[:1]))

        connection = SimpleNamespace(send_parts=send_parts)
        return SimpleNamespace(
            index=index, host="b", port=7, meeting_port=8, connection=connection, leased=()
        )

    def send_to(self, index, kind, value):
        self.sent.append((index, kind))
        self.values = getattr(self, "values", {}) | {index: value}


class Shutdown:
    """A shutdown that records its cause."""

    asked_at = None

    def __init__(self):
        self.ended = []

    def end(self, cause, reason):
        self.ended.append((cause, reason))


@pytest.fixture
def start(tmp_path):
    """The start of two instances on another host, which lease it and read a file."""
    hosts = Hosts(
        leases={0: {"cpus": [2]}},
        refusal_of=lambda _, answer: answer.get("refusal", ""),
        others=frozenset({0, 1}),
    )
    channel, shutdown, started = Channel(2), Shutdown(), []
    program_start = ProgramStart(
        a_job(
            count=2,
            hosts=hosts,
            files=JobFiles(call=tmp_path / "call", places=(place_of_run(tmp_path),)),
        ),
        channel,
        shutdown,
        lambda _: {},
        lambda: started.append(1),
    )
    return program_start, channel, shutdown, started


def test_programs_start_when_all_hosts_have_taken_leases_and_stored_the_file(start):
    program_start, channel, shutdown, started = start
    program_start.begin()
    assert channel.sent == [(0, control_protocol.LEASE)]
    program_start.on_lease(channel.peers[0], {})
    assert channel.sent[1:] == [(index, control_protocol.INPUT_FILE) for index in (0, 1)]
    program_start.on_file_stored(channel.peers[1], {"path": "/tmp/call"})
    assert started == []
    program_start.on_file_stored(channel.peers[0], {"path": "/tmp/call"})
    assert channel.sent[3:] == [(index, control_protocol.GO) for index in (0, 1)]
    assert (started, shutdown.ended) == ([1], [])
    # A wrapper on another host chooses the other paths itself.
    sent = channel.values[1]
    ports = {"MASTER_PORT": "7", "POPDIST_MEETING_PORT": "8"}
    assert sent["variables"] == {**ports, "POPDIST_CALL": "/tmp/call"}
    assert sent["files"] == {"POPDIST_RUN_FILES": ""}


def test_a_kept_wrapper_leases_only_other_cpus(start):
    program_start, channel, _, _ = start
    channel.peers[0].leased = [2]
    program_start.begin()
    assert channel.sent == [(index, control_protocol.INPUT_FILE) for index in (0, 1)]
    channel.sent.clear()
    channel.peers[0].leased = [1, 2]
    program_start.begin()
    assert channel.sent == [(0, control_protocol.LEASE)]
    program_start.on_lease(channel.peers[0], {})
    assert channel.peers[0].leased == [2]


def test_a_refused_lease_or_a_full_host_ends_the_job(start):
    program_start, channel, shutdown, started = start
    program_start.begin()
    program_start.on_lease(channel.peers[0], {"refusal": "host b: its cores are in use"})
    program_start.on_file_stored(channel.peers[1], {"problem": "No space left on device"})
    (lease, reason), (full, advice) = shutdown.ended
    assert (lease, full) == (Cause.REFUSED, Cause.REFUSED)
    assert reason == "host b: its cores are in use"
    assert advice.startswith("host b cannot store the function call")
    assert (started, len(channel.sent)) == ([], 1)
