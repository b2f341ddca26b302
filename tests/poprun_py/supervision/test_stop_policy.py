"""The steps of a job's end, with a channel that keeps what is sent."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from poprun_py.instance import protocol
from poprun_py.supervision.job import Cause, Job, StackGroup
from poprun_py.supervision.stop_policy import StopPolicy


class Channel:
    """A control channel on which nobody listens."""

    def __init__(self, count):
        # Our own process stands for the wrappers: SIGCONT does nothing to it.
        self.peers = {
            index: SimpleNamespace(index=index, pid=os.getpid(), died=None, outcome=None)
            for index in range(count)
        }
        self.is_complete = True
        self.sent = []

    def broadcast(self, kind, value):
        self.sent.append((kind, value))


def job_end(count=2):
    channel, lines = Channel(count), []
    job = Job(command=("mpirun",), variables=({},) * count, environ={}, grace_seconds=5)
    return StopPolicy(job, channel, lines.append), channel, lines


def test_a_failure_asks_all_once():
    policy, channel, lines = job_end()
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    policy.end(Cause.FAILED, "instance 0 ended with exit code 1")
    assert channel.sent == [(protocol.STOP, 5)]
    assert lines == ["instance 1 ended with exit code 3: stopping the other instances"]
    assert policy.stop.reason == "instance 1 ended with exit code 3"


def test_sigint_reaches_the_programs_before_they_are_asked_to_end():
    policy, channel, _ = job_end()
    policy.on_signal(signal.SIGINT)
    assert channel.sent == [(protocol.SIGNAL, 2), (protocol.STOP, 5)]
    assert (policy.stop.cause, policy.stop.signal) == (Cause.SIGNAL, 2)


def test_the_second_signal_forces():
    policy, channel, lines = job_end()
    policy.on_signal(signal.SIGTERM)
    assert channel.sent == [(protocol.PROPOSE, 0)]
    policy.on_signal(signal.SIGTERM)
    policy.on_time(policy.next_deadline())
    assert channel.sent[1:] == [(protocol.STOP, 0)]
    assert lines == ["SIGTERM again: killing all instances"]


def test_programs_that_never_ask_whether_to_stop_are_ended_by_sigterm():
    policy, channel, _ = job_end(1)
    policy.on_signal(signal.SIGHUP)
    policy.on_answer(0, 0, 0)
    assert channel.sent == [(protocol.PROPOSE, 0), (protocol.STOP, 5)]
    assert (policy.stop.signal, policy.stop.reason) == (signal.SIGHUP, "SIGHUP received")


def test_sigusr1_is_passed_on_to_programs_that_never_ask_and_ends_nothing():
    policy, channel, _ = job_end(1)
    policy.on_signal(signal.SIGUSR1)
    policy.on_answer(0, 0, 0)
    policy.on_signal(signal.SIGUSR2)
    assert channel.sent == [
        (protocol.PROPOSE, 0), (protocol.SIGNAL, 10), (protocol.SIGNAL, 12),
    ]  # fmt: skip
    assert policy.stop is None


def test_a_signal_after_a_failure_is_what_ended_the_job():
    policy, _, _ = job_end()
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    policy.on_signal(signal.SIGINT)
    assert (policy.stop.cause, policy.stop.signal) == (Cause.SIGNAL, 2)


def test_a_hang_is_decided_first_and_ended_when_the_stacks_are_there():
    policy, channel, lines = job_end()
    assert policy.may_hang
    policy.decide(Cause.HANG, "no step for 3.0 s", hung=(0, 1))
    assert not policy.may_hang
    assert channel.sent == lines == []
    groups = (StackGroup(instances=(1,), text="here"),)
    policy.end_with_stacks((1,), groups)
    assert channel.sent == [(protocol.STOP, 5)]
    assert (policy.stop.hung, policy.stop.stacks) == ((1,), groups)


def test_a_job_that_saves_may_hang_and_one_that_ends_may_not():
    policy, _, _ = job_end()
    policy.on_signal(signal.SIGTERM)
    assert policy.may_hang
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    assert not policy.may_hang


def test_what_cannot_start_says_why_also_while_it_ends():
    policy, channel, lines = job_end()
    policy.end(Cause.MPIRUN_ENDED, "mpirun ended with exit code 1")
    policy.end(Cause.REFUSED, "host b does not answer")
    assert policy.is_refused
    assert policy.stop.reason == "host b does not answer"
    assert len(channel.sent) == len(lines) == 1
