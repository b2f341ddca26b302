"""What keeps a job of several hosts from starting: values, without any host."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
from support.processes import wait_until

from poprun_py.errors import StartError
from poprun_py.running.supervise.startup import Finding, Question, Startup

NEVER = float("inf")


def peers(*hosts):
    """Return instances that run on ``hosts``."""
    return {index: SimpleNamespace(host=host) for index, host in enumerate(hosts)}


@pytest.mark.parametrize("planned", [("a", "b"), ("", "b"), ("", ""), ()])
def test_instances_on_their_hosts_start(planned):
    assert Startup(planned, None).misplaced(peers("a", "b")) is None


def test_an_instance_on_another_host_is_refused_with_both_names():
    problem = Startup(("a", "b"), None).misplaced(peers("a", "c"))
    assert problem.startswith("instance 1 is on host c, planned on b: ")


class Answered:
    """A question whose answer is there when it is asked for the second time."""

    def __init__(self, explain):
        self.explain, self.times, self.is_closed = explain, 0, False

    def answer(self):
        self.times += 1
        return self.explain() if self.times > 1 else None

    def close(self):
        self.is_closed = True


def test_a_start_that_takes_long_is_looked_into_until_a_reason_is_found():
    found = [Finding(""), Finding("its clock is off"), Finding("it does not answer", True)]
    told = []
    startup = Startup(("a", "b"), lambda: found.pop(0), ask=Answered)
    now, waits = 0.0, []
    startup.begin(now)
    for _ in range(3):
        waits.append(startup.next_deadline() - now)
        assert startup.on_time(now) is None
        now = startup.next_deadline()
        assert startup.on_time(now) is None  # asked, and goes on
        assert 0 < startup.next_deadline() - now < 1
        told.append(startup.on_time(now := startup.next_deadline()))
    assert 10 < waits[0] < 15
    assert waits[0] < waits[1] < waits[2]
    assert startup.next_deadline() == NEVER
    assert [finding.sentence(1, 2, "") for finding in told] == [
        "1 of 2 instances have started after 10 s",
        "1 of 2 instances have started after 31 s. its clock is off",
        "it does not answer",
    ]
    assert told[2].sentence(1, 2, "no\n route\n") == "it does not answer. mpirun said: no route"


def test_hosts_that_do_not_answer_keep_neither_the_loop_nor_the_end():
    before = set(psutil.Process().children())
    startup = Startup(("a",), lambda: time.sleep(1000))
    startup.begin(0.0)
    assert startup.on_time(20.0) is None
    (asking,) = set(psutil.Process().children()) - before
    assert startup.on_time(30.0) is None
    startup.end()
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
def test_the_answer_of_another_process_is_what_was_found(explain, found, capfd):
    question = Question(explain)
    wait_until(lambda: (answer := question.answer()) is not None and found == answer)


def test_a_job_that_is_complete_is_not_looked_into():
    def explain():
        raise AssertionError("nothing was to be asked")

    startup = Startup(("a",), explain)
    startup.begin(0.0)
    startup.end()
    assert startup.on_time(1e9) is None


def test_a_job_of_this_machine_is_not_looked_into():
    startup = Startup((), None)
    startup.begin(0.0)
    assert startup.next_deadline() == NEVER
