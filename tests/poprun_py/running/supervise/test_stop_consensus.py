"""A request to stop: all instances stop at the same call of ``stopRequested()``, or in time."""

from __future__ import annotations

from signal import SIGTERM, SIGUSR1

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.supervise.shutdown import StopAction, StopRequest

NEVER = float("inf")


class Instance:
    """A program that calls ``stopRequested()``, as in ``popdist_py.heartbeat``."""

    def __init__(self):
        self.polls = self.proposed = self.agreed = 0
        self.stopped_at = None

    def run(self, calls):
        """Make up to ``calls`` calls; stop at a call that has to wait for the consensus."""
        for _ in range(calls):
            if self.stopped_at is not None or self.waits():
                return
            self.polls += 1
            self.check()

    def waits(self):
        return 0 < self.proposed <= self.polls and self.agreed != self.proposed

    def check(self):
        if 0 < self.proposed <= self.polls and self.agreed == self.proposed:
            self.stopped_at = self.polls


def requested(members):
    request = StopRequest(5)
    assert request.begin(SIGUSR1, members, 0.0) is StopAction.PROPOSE
    return request


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_all_stop_at_the_same_call_whatever_the_timing(count, dice):
    instances = [Instance() for _ in range(count)]
    for instance in instances:
        instance.run(dice.randrange(20) + 1)
    agreement = requested(range(count))
    messages = [(i, 0) for i in range(count)]  # proposals on the way to the instances
    answers: list[tuple[int, int, int]] = []
    while not agreement.agreed:
        dice.choice(instances).run(dice.randrange(8))
        if messages and dice.random() < 0.5:
            index, proposal = messages.pop(dice.randrange(len(messages)))
            instances[index].proposed = proposal or instances[index].proposed
            answers.append((index, proposal, instances[index].polls))
        elif answers:
            move = agreement.answer(*answers.pop(dice.randrange(len(answers))), 0.0)
            if move is StopAction.PROPOSE:
                messages += [(i, agreement.proposal) for i in range(count)]
            assert move is not StopAction.SIGNAL
    for instance in instances:
        instance.agreed = agreement.proposal
        instance.check()
        instance.run(10_000)
    assert {instance.stopped_at for instance in instances} == {agreement.proposal}


def test_programs_that_never_call_get_the_signal():
    agreement = requested([0, 1])
    assert agreement.answer(0, 0, 0, 0.0) is None
    assert agreement.answer(1, 0, 0, 0.0) is StopAction.SIGNAL


def test_the_consensus_continues_without_an_instance_that_ends():
    agreement = requested([0, 1])
    agreement.answer(0, 0, 7, 0.0)
    assert agreement.remove(1, 0.0) is StopAction.PROPOSE
    assert agreement.proposal > 7
    assert agreement.answer(0, agreement.proposal, 8, 0.0) is StopAction.AGREE


def test_late_answer_to_an_old_proposal_is_ignored():
    agreement = requested([0])
    agreement.answer(0, 0, 5, 0.0)
    assert agreement.answer(0, 0, 6, 0.0) is None


def test_a_job_with_missing_instances_gets_the_signal_at_once():
    request = StopRequest(5)
    assert request.begin(SIGUSR1, (), 0.0) is StopAction.SIGNAL
    assert request.signal == SIGUSR1
    assert request.next_deadline() == NEVER


def test_programs_that_never_ask_get_the_signal():
    request = StopRequest(5)
    assert request.begin(SIGUSR1, (0, 1), 0.0) is StopAction.PROPOSE
    assert request.proposal == 0
    assert request.answer(0, 0, 0, 1.0) is None
    assert request.answer(1, 0, 0, 1.0) is StopAction.SIGNAL
    assert request.next_deadline() == NEVER
    assert request.begin(SIGTERM, (0,), 2.0) is StopAction.PROPOSE


def test_a_wrapper_that_does_not_answer_is_not_waited_for():
    request = StopRequest(5)
    request.begin(SIGUSR1, (0, 1), 10.0)
    request.answer(0, 0, 7, 10.1)
    assert request.on_time(12.9) is None
    assert request.on_time(request.next_deadline()) is StopAction.SIGNAL
    assert request.next_deadline() == NEVER
    assert request.answer(1, 0, 7, 14.0) is None


def test_programs_that_ask_have_the_grace_time_after_sigterm_only():
    for number, deadline in ((SIGTERM, 6.0), (SIGUSR1, NEVER)):
        request = StopRequest(5)
        request.begin(number, (0, 1), 0.0)
        request.answer(0, 0, 7, 0.5)
        assert request.answer(1, 0, 7, 1.0) is StopAction.PROPOSE
        proposal = request.proposal
        assert request.next_deadline() == deadline
        assert request.answer(0, proposal, 8, 2.0) is None
        assert request.answer(1, proposal, 8, 2.0) is StopAction.AGREE
        assert request.next_deadline() == deadline
        assert request.on_time(6.0) is (StopAction.SIGNAL if number == SIGTERM else None)


def test_sigterm_limits_a_stop_that_sigusr1_began():
    request = StopRequest(5)
    request.begin(SIGUSR1, (0,), 0.0)
    assert request.answer(0, 0, 7, 0.1) is StopAction.PROPOSE
    assert request.begin(SIGTERM, (0,), 20.0) is None
    assert request.next_deadline() == 25.0
    assert request.on_time(25.0) is StopAction.SIGNAL
    assert request.signal == SIGTERM


def test_the_others_agree_without_an_instance_that_ends():
    request = StopRequest(5)
    assert request.remove(0, 0.0) is None
    request.begin(SIGUSR1, (0, 1), 0.0)
    request.answer(0, 0, 7, 0.1)
    assert request.remove(1, 0.2) is StopAction.PROPOSE
