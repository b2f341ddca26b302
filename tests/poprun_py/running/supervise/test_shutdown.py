"""The shutdown of a job, with a channel that records the frames."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.launcher.jobs import a_job

from poprun_py.instance import control_protocol
from poprun_py.running.supervise import shutdown
from poprun_py.running.supervise.launch_result import Cause, StackGroup
from poprun_py.running.supervise.shutdown import JobShutdown


class Channel:
    """A control channel that records the frames and has no wrappers."""

    def __init__(self, count):
        # The process of the test stands for the wrappers, because SIGCONT has no effect on it.
        self.peers = {
            index: SimpleNamespace(
                index=index, pid=os.getpid(), program_end=None, instance_end=None
            )
            for index in range(count)
        }
        self.is_complete = True
        self.sent = []

    def broadcast(self, kind, value):
        self.sent.append((kind, value))


def job_end(count=2, *, states=None):
    channel, lines = Channel(count), []
    job = a_job(count=count)
    job = replace(
        job,
        hosts=replace(job.hosts, keeps_state=states is not None),
        files=replace(job.files, checkpoint_memory=None if states is None else str(states)),
    )
    return JobShutdown(job, channel, lines.append, lines.append), channel, lines


def test_a_failure_asks_all_instances_once():
    policy, channel, lines = job_end()
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    policy.end(Cause.FAILED, "instance 0 ended with exit code 1")
    assert channel.sent == [(control_protocol.STOP, [5, signal.SIGTERM])]
    assert lines == ["instance 1 ended with exit code 3: stopping the other instances"]
    assert policy.stop.reason == "instance 1 ended with exit code 3"


def test_after_sigint_programs_get_no_other_signal_within_the_grace_time():
    policy, channel, lines = job_end()
    policy.on_signal(signal.SIGINT)
    # One instance has saved and ended with KeyboardInterrupt, and the other is still saving.
    policy.end(Cause.FAILED, "instance 1 ended with signal SIGINT")
    assert channel.sent == [(control_protocol.STOP, [5, signal.SIGINT])]
    assert (policy.stop.cause, policy.stop.signal) == (Cause.SIGNAL, 2)
    assert lines[0] == (
        "SIGINT received: stopping the instances, which have 5 s to end (--grace). "
        "Press Ctrl-C again to kill the instances at once"
    )


def test_a_second_signal_kills_all_instances(monkeypatch):
    policy, channel, lines = job_end()
    policy.on_signal(signal.SIGTERM)
    assert channel.sent == [(control_protocol.PROPOSE_STOP, 0)]
    later = time.monotonic() + 0.4
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: later)
    policy.on_signal(signal.SIGTERM)
    policy.on_time(policy.next_deadline())
    assert channel.sent[1:] == [(control_protocol.STOP, [0, signal.SIGTERM])]
    assert lines == ["received SIGTERM again: killing all instances"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_request_that_comes_as_two_signals_counts_once(number):
    policy, channel, lines = job_end()
    policy.on_signal(number)
    asked = list(channel.sent)
    policy.on_signal(number)
    policy.on_time(time.monotonic())
    assert channel.sent == asked
    assert not [line for line in lines if "killing" in line]


def test_another_signal_kills_at_once():
    policy, channel, lines = job_end()
    policy.on_signal(signal.SIGTERM)
    policy.on_signal(signal.SIGINT)
    policy.on_time(time.monotonic())
    assert channel.sent[1:] == [(control_protocol.STOP, [0, signal.SIGTERM])]
    assert lines == ["received SIGINT again: killing all instances"]


@pytest.mark.parametrize(
    ("number", "sent"),
    [
        (signal.SIGTERM, (control_protocol.PROPOSE_STOP, 0)),
        (signal.SIGABRT, (control_protocol.PROPOSE_STOP, 0)),
        (signal.SIGINT, (control_protocol.STOP, [5, signal.SIGINT])),
    ],
)
def test_a_signal_sent_to_mpirun_asks_the_instances_to_end(number, sent):
    policy, channel, _ = job_end(1)
    policy.on_signal_of_mpirun(number)
    policy.on_signal_of_mpirun(number)  # the signal stays pending
    assert channel.sent == [sent]
    policy.on_answer(0, 0, 0)
    policy.end(Cause.FAILED, "instance 0 ended with signal SIGTERM")
    policy.on_end_of_mpirun("mpirun ended with exit code 1", is_early=True)
    name = signal.Signals(number).name
    assert (policy.stop.cause, policy.stop.signal) == (Cause.MPIRUN_ENDED, number)
    assert policy.stop.reason == f"mpirun was ended by {name}"


def test_a_signal_to_the_launcher_and_mpirun_counts_as_one_to_the_launcher():
    policy, _, _ = job_end(1)
    policy.on_signal_of_mpirun(signal.SIGTERM)
    policy.on_signal(signal.SIGTERM)
    assert (policy.stop.cause, policy.stop.reason) == (Cause.SIGNAL, "SIGTERM received")


def test_the_reason_has_the_end_of_mpirun_even_if_wrappers_reported_first():
    policy, _, _ = job_end()
    policy.end(Cause.MPIRUN_ENDED, "mpirun ended the instances")
    policy.on_end_of_mpirun("mpirun ended with exit code 1", is_early=False)
    assert policy.stop.reason == "mpirun ended with exit code 1"


def test_programs_that_never_ask_whether_to_stop_are_ended_by_sigterm():
    policy, channel, _ = job_end(1)
    policy.on_signal(signal.SIGHUP)
    policy.on_answer(0, 0, 0)
    assert channel.sent == [
        (control_protocol.PROPOSE_STOP, 0),
        (control_protocol.STOP, [5, signal.SIGTERM]),
    ]
    assert (policy.stop.signal, policy.stop.reason) == (signal.SIGHUP, "SIGHUP received")


def test_sigusr1_is_passed_on_to_programs_that_never_ask_and_ends_nothing():
    policy, channel, _ = job_end(1)
    policy.on_signal(signal.SIGUSR1)
    policy.on_answer(0, 0, 0)
    policy.on_signal(signal.SIGUSR2)
    assert channel.sent == [
        (control_protocol.PROPOSE_STOP, 0),
        (control_protocol.SIGNAL, 10),
        (control_protocol.SIGNAL, 12),
    ]
    assert policy.stop is None


def test_a_signal_after_a_failure_is_the_cause():
    policy, _, _ = job_end()
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    policy.on_signal(signal.SIGINT)
    assert (policy.stop.cause, policy.stop.signal) == (Cause.SIGNAL, 2)


def test_a_hung_job_is_ended_when_its_stacks_are_known():
    policy, channel, lines = job_end()
    assert policy.may_hang
    policy.decide(Cause.HANG, "no step for 3.0 s", hung=(0, 1))
    assert not policy.may_hang
    assert channel.sent == lines == []
    groups = (StackGroup(instances=(1,), text="here"),)
    policy.end_with_stacks((1,), groups)
    assert channel.sent == [(control_protocol.STOP, [5, signal.SIGTERM])]
    assert (policy.stop.hung, policy.stop.stacks) == ((1,), groups)


def test_a_saving_job_may_hang_and_an_ending_job_may_not():
    policy, _, _ = job_end()
    policy.on_signal(signal.SIGTERM)
    assert policy.may_hang
    policy.end(Cause.FAILED, "instance 1 ended with exit code 3")
    assert not policy.may_hang


def test_a_refusal_is_the_cause_even_while_the_job_ends():
    policy, channel, lines = job_end()
    policy.end(Cause.MPIRUN_ENDED, "mpirun ended with exit code 1")
    policy.end(Cause.REFUSED, "host b does not answer")
    assert policy.is_refused
    assert policy.stop.reason == "host b does not answer"
    assert len(channel.sent) == len(lines) == 1


# --- new hosts ------------------------------------------------------------------------------------


def test_for_new_hosts_programs_that_keep_their_state_in_memory_end_at_once(tmp_path):
    policy, channel, _ = job_end(states=tmp_path)
    policy.use_new_hosts("node1 can be used again")
    assert channel.sent == [(control_protocol.STOP, [5, signal.SIGTERM])]
    assert (policy.stop.cause, policy.stop.reason) == (Cause.HOSTS, "node1 can be used again")


def test_for_new_hosts_other_programs_save_at_the_same_call():
    policy, channel, _ = job_end()
    policy.use_new_hosts("node1 can be used again")
    policy.on_answer(0, 0, 3)
    policy.on_answer(1, 0, 4)
    assert policy.stop is None
    for index in (0, 1):
        policy.on_answer(index, 6, 4)
    assert channel.sent[-1] == (control_protocol.AGREE_STOP, 6)
    assert (policy.stop.cause, policy.stop.signal, policy.may_hang) == (Cause.HOSTS, 0, True)
    # No time limit applies to the checkpoint, because no time is short.
    assert policy.next_deadline() == float("inf")


def test_for_new_hosts_programs_that_cannot_save_go_on():
    policy, channel, lines = job_end()
    policy.use_new_hosts("node1 can be used again")
    policy.on_answer(0, 0, 0)
    policy.on_answer(1, 0, 0)
    assert channel.sent == [(control_protocol.PROPOSE_STOP, 0)]
    assert policy.stop is None
    assert lines == [
        "node1 can be used again: the job will use new hosts after its next restart, or when its "
        "programs keep their state in memory (--memory-checkpoints) or call stopRequested()"
    ]
    policy.on_signal(signal.SIGTERM)
    policy.on_answer(0, 0, 0)
    policy.on_answer(1, 0, 0)
    assert channel.sent[-1] == (control_protocol.STOP, [5, signal.SIGTERM])


def test_for_new_hosts_programs_are_asked_again_until_they_can_save(tmp_path):
    policy, channel, lines = job_end(states=tmp_path / "states")
    policy.use_new_hosts("node1 can be used again")
    for _ in range(2):
        policy.on_answer(0, 0, 0)
        policy.on_answer(1, 0, 0)
        policy.on_time(policy.next_deadline())
    assert channel.sent == [(control_protocol.PROPOSE_STOP, 0)] * 3
    assert len(lines) == 1
    policy.on_answer(0, 0, 0)
    policy.on_answer(1, 0, 0)
    (tmp_path / "states").mkdir()
    policy.on_time(policy.next_deadline())
    assert policy.stop.cause is Cause.HOSTS
    assert channel.sent[-1] == (control_protocol.STOP, [5, signal.SIGTERM])


@pytest.mark.parametrize("keeps_state", [False, True])
def test_new_hosts_do_not_disturb_a_job_that_is_ending(keeps_state, tmp_path):
    policy, channel, _ = job_end(states=tmp_path if keeps_state else None)
    channel.peers[1].program_end = {"code": 0}
    policy.use_new_hosts("node1 can be used again")
    assert (channel.sent, policy.stop) == ([], None)
    channel.peers[1].program_end = None
    policy.end(Cause.FAILED, "instance 0 ended with exit code 1")
    policy.use_new_hosts("node1 can be used again")
    assert policy.stop.cause is Cause.FAILED
