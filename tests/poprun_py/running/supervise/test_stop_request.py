"""The time limits of a request to stop, after which programs get the signal."""

from __future__ import annotations

from signal import SIGTERM, SIGUSR1

from poprun_py.running.supervise.shutdown import StopAction, StopRequest

NEVER = float("inf")


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
