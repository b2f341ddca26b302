"""All instances stop at the same call of ``stopRequested()``, whatever the timing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.supervise.shutdown import StopAction, StopConsensus


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


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_all_stop_at_the_same_call_whatever_the_timing(count, dice):
    instances = [Instance() for _ in range(count)]
    for instance in instances:
        instance.run(dice.randrange(20) + 1)
    agreement = StopConsensus(range(count))
    messages = [(i, 0) for i in range(count)]  # proposals on the way to the instances
    answers: list[tuple[int, int, int]] = []
    while not agreement.agreed:
        dice.choice(instances).run(dice.randrange(8))
        if messages and dice.random() < 0.5:
            index, proposal = messages.pop(dice.randrange(len(messages)))
            instances[index].proposed = proposal or instances[index].proposed
            answers.append((index, proposal, instances[index].polls))
        elif answers:
            move = agreement.answer(*answers.pop(dice.randrange(len(answers))))
            if move is StopAction.PROPOSE:
                messages += [(i, agreement.proposal) for i in range(count)]
            assert move is not StopAction.SIGNAL
    for instance in instances:
        instance.agreed = agreement.proposal
        instance.check()
        instance.run(10_000)
    assert {instance.stopped_at for instance in instances} == {agreement.proposal}


def test_programs_that_never_call_get_the_signal():
    agreement = StopConsensus([0, 1])
    assert agreement.answer(0, 0, 0) is None
    assert agreement.answer(1, 0, 0) is StopAction.SIGNAL


def test_the_others_agree_without_an_instance_that_ends():
    agreement = StopConsensus([0, 1])
    agreement.answer(0, 0, 7)
    assert agreement.remove(1) is StopAction.PROPOSE
    assert agreement.proposal > 7
    assert agreement.answer(0, agreement.proposal, 8) is StopAction.AGREE


def test_late_answer_to_an_old_proposal_is_ignored():
    agreement = StopConsensus([0])
    agreement.answer(0, 0, 5)
    assert agreement.answer(0, 0, 6) is None
