"""Plans on other hosts: how many hosts and instances a job has after a loss or an addition."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import StartError, UsageError
from poprun_py.launching import host_changes
from poprun_py.launching.host_changes import JobHosts
from poprun_py.launching.launch_planning import plan
from poprun_py.launching.replanning import divisions, with_instances
from poprun_py.machines import host_checks
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import Host
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.running.supervise.job_description import Hosts
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult
from poprun_py.terminal import Console

WAITING = {"wait_for_hosts": "forever", "max_restarts": 1}
PROBED = ProbedHosts(shell=Shell(("ssh",)), machines={}, hostnames={})
_NUMBERS = st.integers(1, 12)


def hosts(count):
    return tuple(Host(name=f"node{index}") for index in range(count))


def topology(num_hosts, per_host, local_replicas):
    number = num_hosts * per_host
    config = LaunchConfig(num_instances=number, num_replicas=number * local_replicas)
    return make_topology(config, hosts(num_hosts))


@given(_NUMBERS, st.integers(1, 4), _NUMBERS, _NUMBERS)
def test_every_division_is_even_and_keeps_the_replicas(num_hosts, per_host, local, left):
    whole = topology(num_hosts, per_host, local)
    found = list(divisions(whole, left))
    assert found
    assert found == sorted(found, reverse=True)
    for used, number in found:
        assert used <= left
        assert number % used == 0
        assert whole.num_replicas % number == 0
        assert number <= per_host * max(used, num_hosts)


@pytest.mark.parametrize(
    ("whole", "left", "best"),
    [
        (topology(2, 1, 2), 1, (1, 2)),
        (topology(4, 1, 1), 3, (2, 4)),
        (topology(4, 1, 3), 3, (3, 3)),
        (topology(3, 2, 1), 2, (2, 6)),
        (topology(1, 1, 4), 2, (2, 2)),
        (topology(2, 1, 2), 4, (4, 4)),
        (topology(2, 1, 2), 2, (2, 2)),
    ],
)
def test_the_first_division_uses_as_many_hosts_and_instances_as_possible(whole, left, best):
    assert next(divisions(whole, left)) == best


@pytest.mark.parametrize(
    ("whole", "left", "best"),
    [
        (topology(4, 1, 2), 3, (2, 2)),
        (topology(4, 2, 1), 2, (2, 4)),
        (topology(2, 1, 2), 1, (1, 1)),
        (topology(2, 1, 2), 4, (4, 4)),
    ],
)
def test_no_host_gets_more_instances_if_wrappers_are_kept(whole, left, best):
    assert next(divisions(whole, left, keeps_wrappers=True)) == best


def test_options_name_no_instance_that_does_not_exist_any_more():
    config = LaunchConfig(
        num_instances=4, num_replicas=4, stdin_instance=3, only_output_from_instance=(1, 3)
    )
    fewer = with_instances(config, 2)
    assert (fewer.num_instances, fewer.num_replicas, fewer.stdin_instance) == (2, 4, 0)
    assert fewer.only_output_from_instance == (1,)
    assert with_instances(config, 1).only_output_from_instance == (0,)
    assert with_instances(config, 4) == config


# --- the hosts of a job over its attempts --------------------------------------------------------


class Said(Console):
    """A console that keeps its messages in a list."""

    def __init__(self):
        super().__init__(is_verbose=False, prints_bindings=False)
        self.lines = []
        self.warn = self.tell = self.log = self.lines.append


@pytest.fixture
def job(monkeypatch):
    """Return a function that makes the hosts of a job; ``problems`` has those that cannot be used.

    No host is contacted.
    """

    def make(names, **options):
        monkeypatch.setattr(host_checks, "probe_hosts", lambda *_, **__: PROBED)
        config = LaunchConfig(host=names, program=("true",), **options)
        made = JobHosts(plan(config, environ=dict(os.environ)), Said(), ())
        made.problems = {}
        made._problems = lambda hosts: {
            h.name: p for h in hosts if (p := made.problems.get(h.name))
        }
        return made

    return make


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"memory_checkpoints": True, "allow_fewer_hosts": True, "wait_for_hosts": "forever"}, 3),
        ({"memory_checkpoints": True, "wait_for_hosts": 60.0}, 3),
        ({"memory_checkpoints": True, "allow_fewer_hosts": True}, 5),
        ({"memory_checkpoints": True}, 15),
        ({"allow_fewer_hosts": True, "wait_for_hosts": "forever"}, 15),
    ],
)
def test_a_silent_host_is_lost_early_if_its_loss_costs_little(job, options, seconds):
    assert job("localhost", **options).changeable(Hosts(), None).lost_after == seconds


def end(job, *lost, has_model=True):
    """End an attempt that has lost hosts, and return the plan of the next attempt."""
    names = [each.name for each in job.plan.topology.hosts]
    result = LaunchResult(exit_code=1, instances=(InstanceResult(index=0, has_model=has_model),))
    job.note_end(result, [Host(name=name) for name in names if name in lost])
    # Lost hosts do not answer at once.
    job.problems = {
        name: {"text": "the host does not answer", "is_reached": False} for name in lost
    }
    assert job.choose(lambda _: 0, lambda: False) == 0
    return shape(job.plan)


def slept(_):
    """Wait for a moment, without a signal."""
    time.sleep(0.01)
    return 0


def shape(planned):
    topology = planned.topology
    return [host.name for host in topology.hosts], topology.num_instances, topology.num_replicas


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(host_changes, "_ANSWER_SECONDS", 0.0)


def test_a_job_goes_on_with_fewer_instances_and_returns_to_its_first_plan(job):
    made = job("a:1,b:1", num_instances=2, num_replicas=4, allow_fewer_hosts=True, **WAITING)
    first = made.plan
    assert end(made, "b") == (["a"], 1, 4)
    assert made._console.lines == [
        "the job continues without host b: 1 instance with 4 replicas each, instead of 2 instances"
    ]
    assert made.is_waiting
    assert json.loads(made.ask_lost()) == made.problems
    assert made.take_lost(made.ask_lost()) == ""
    made.problems = {}
    assert made.take_lost(made.ask_lost()) == "host b can be used again"
    assert not made.is_waiting
    assert end(made) == (["a", "b"], 2, 4)
    assert made.plan is first


def test_processes_that_are_replicas_share_cores_or_wait(job):
    made = job("a:1,b:1", num_instances=2, num_replicas=2, allow_fewer_hosts=True)
    assert end(made, "b", has_model=False) == (["a"], 2, 2)
    assert made.plan.config.oversubscribe
    assert made._console.lines == [
        (
            "the job continues without host b: the instances share cores, because fewer "
            "instances would train with fewer replicas"
        )
    ]
    made = job("a,b", num_instances=2, num_replicas=2, **WAITING)
    assert end(made, "b", has_model=False) == (["a", "b"], 2, 2)
    assert made.lacks_hosts
    assert made._console.lines == [
        ("waiting until the lost hosts can be used again (--wait-for-hosts)")
    ]


def test_a_job_waits_for_a_host_if_none_is_left(job):
    made = job("a,b", num_instances=2, num_replicas=2, allow_fewer_hosts=True, **WAITING)
    assert end(made, "a", "b") == (["a", "b"], 2, 2)
    assert made.lacks_hosts
    made.problems = {"b": {"text": "the host does not answer", "is_reached": False}}
    assert made.take_lost(made.ask_lost()) == "host a can be used again"
    assert made.choose(lambda _: 0, lambda: True) == 0
    assert shape(made.plan)[0] == ["a"]


def test_a_host_that_no_division_used_replaces_a_lost_one(job):
    made = job(
        "a:2,b:2,c:2,d:2", num_instances=4, num_replicas=8, allow_fewer_hosts=True, **WAITING
    )
    assert end(made, "d") == (["a", "b"], 4, 8)
    assert end(made, "b") == (["a", "c"], 4, 8)
    # Three hosts would be of no use, but four are.
    made.problems = {"b": {"text": "the host does not answer", "is_reached": False}}
    assert made.take_lost(made.ask_lost()) == ""
    assert "host d is not used: 4 instances with 8 replicas cannot be split" in "\n".join(
        made._console.lines
    )
    made.problems = {}
    assert made.take_lost(made.ask_lost()) == "hosts d, b can be used again"
    assert end(made) == (["a", "b", "c", "d"], 4, 8)


def test_a_host_that_ran_again_is_not_lost_any_more(job):
    made = job("a:1,b:1", num_instances=2, num_replicas=4, allow_fewer_hosts=True)
    made._first = made.plan = replace(
        made.plan, config=made.plan.config.replace(allow_fewer_hosts=False)
    )
    assert end(made, "b") == (["a", "b"], 2, 4)
    made._first = made.plan = replace(
        made.plan, config=made.plan.config.replace(allow_fewer_hosts=True)
    )
    assert end(made) == (["a", "b"], 2, 4)
    assert made._console.lines == []


def test_hosts_that_do_not_suffice_are_planned_once(job, monkeypatch):
    made = job("a,b,c", num_instances=3, num_replicas=3, allow_fewer_hosts=True, **WAITING)
    made.note_end(LaunchResult(exit_code=1), made.plan.topology.hosts)
    made.problems = {"c": {"text": "the host does not answer", "is_reached": False}}

    def full(*_, **__):
        raise UsageError("too few cores")

    monkeypatch.setattr(host_changes, "plan_on_hosts", full)
    made._check_use = lambda _: None
    calls = iter(range(100))
    assert made.choose(slept, lambda: next(calls) < 99) == 0
    assert made._console.lines.count("the job cannot continue without host c: too few cores") == 1


def test_a_wait_ends_after_its_time(job, monkeypatch):
    made = job("a,b", num_instances=2, num_replicas=2, wait_for_hosts=10.0, max_restarts=1)
    end(made, "b")
    assert made.lacks_hosts
    later = time.monotonic() + 20
    monkeypatch.setattr(host_changes.time, "monotonic", lambda: later)
    assert not made.lacks_hosts
    assert made._console.lines[-1] == (
        "the job no longer waits for host b, because the time of wait_for_hosts=10.0 is over"
    )


def test_a_wait_ends_when_the_host_is_back(job):
    made = job("a,b", num_instances=2, num_replicas=2, **WAITING)
    first = made.plan
    made.note_end(LaunchResult(exit_code=1), made.plan.topology.hosts[1:])
    assert made.lacks_hosts
    assert made.choose(slept, lambda: True) == 0
    assert not made.lacks_hosts
    assert made.plan is first
    assert made._console.lines == [
        ("waiting until the lost hosts can be used again (--wait-for-hosts)"),
        "the job continues with host b",
    ]


def test_a_signal_ends_a_wait(job):
    made = job("a,b", num_instances=2, num_replicas=2, **WAITING)
    made.note_end(LaunchResult(exit_code=1), made.plan.topology.hosts[1:])
    made.problems = {"b": {"text": "the host does not answer", "is_reached": False}}
    assert made.choose(lambda _: signal.SIGTERM, lambda: True) == signal.SIGTERM


def test_a_host_that_answers_but_cannot_run_the_job_is_named_once(job, monkeypatch):
    made = job("a:1,b:1", num_instances=2, num_replicas=4, allow_fewer_hosts=True, **WAITING)
    end(made, "b")
    made.problems = {"b": {"text": "Pythonis missing on the host", "is_reached": True}}
    for _ in range(2):
        assert made.take_lost(made.ask_lost()) == ""
    assert made._console.lines[1:] == ["host b is not used: Pythonis missing on the host"]
    made.problems = {}

    def full(*_, **__):
        raise StartError("other jobs hold the cores of b")

    monkeypatch.setattr(host_changes, "plan_on_hosts", full)
    assert made.take_lost(made.ask_lost()) == ""
    assert made._console.lines[2:] == ["host b is not used: other jobs hold the cores of b"]


def test_a_user_adds_a_host(job):
    made = job("a:1", num_instances=1, num_replicas=4)
    reason, reply = made.take_new(made.ask_new("b:1", has_model=True), is_problem=False)
    assert (reason, json.loads(reply)) == ("host b was added", {"host": "b"})
    assert end(made) == (["a", "b"], 2, 4)
    assert made._console.lines == [
        "the job continues with host b: 2 instances with 2 replicas each, instead of 1 instance"
    ]


@pytest.mark.parametrize(
    ("name", "has_model", "part"),
    [
        ("a", True, "host a is already part of the job"),
        ("b,c", True, "b,c names 2 hosts; add one host at a time"),
        ("b[", True, "b["),
        ("down", True, "host down: the host does not answer"),
        ("b", False, "host b: 1 instance with 4 replicas cannot be split evenly over 2 hosts"),
    ],
)
def test_a_host_that_cannot_be_added_is_refused_with_a_reason(job, name, has_model, part):
    made = job("a", num_instances=1, num_replicas=4)
    made.problems = {"down": {"text": "the host does not answer", "is_reached": False}}
    with pytest.raises(StartError) as caught:
        made.ask_new(name, has_model=has_model)
    assert part in str(caught.value)
    reason, reply = made.take_new(str(caught.value), is_problem=True)
    assert (reason, json.loads(reply)) == ("", {"problem": str(caught.value)})


def test_an_answer_that_is_no_json_changes_nothing(job):
    made = job("a,b", num_instances=2, num_replicas=2, **WAITING)
    end(made, "b")
    assert made.take_lost("") == ""
    assert made.is_waiting
