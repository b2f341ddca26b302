"""Signals to the launcher, and their reasons."""

from __future__ import annotations

import contextlib
import signal

from poprun_py.instance import python_stacks
from poprun_py.instance.program_environment import STACKS_SIGNAL
from poprun_py.running.supervise.signal_pipe import (
    HANGUP_ONCE,
    INTERRUPT_ONCE,
    PARENT_ENDED,
    SignalPipe,
    hold_signals,
)


def test_a_launcher_in_an_instance_can_answer_the_wrapper():
    launchers = {HANGUP_ONCE, INTERRUPT_ONCE, PARENT_ENDED}
    assert len(launchers) == 3
    assert launchers.isdisjoint({python_stacks._ASK_SIGNAL, STACKS_SIGNAL})


def test_the_end_of_the_parent_process_is_distinguished_from_sighup():
    with contextlib.ExitStack() as resources:
        caught = SignalPipe(resources)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(HANGUP_ONCE)
        ended = (signal.SIGHUP, "the process that started the job has ended")
        assert caught.take() == [(signal.SIGUSR1, ""), ended]
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(INTERRUPT_ONCE)
        assert caught.take() == [(signal.SIGHUP, "")]


def test_signals_between_two_attempts_reach_the_next_one():
    with hold_signals():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with contextlib.ExitStack() as resources:
                SignalPipe(resources)
                signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)
        with contextlib.ExitStack() as resources:
            caught = SignalPipe(resources)
            assert sorted(number for number, _ in caught.take()) == [
                signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM
            ]  # fmt: skip
        signal.raise_signal(signal.SIGTERM)
    assert not signal.sigpending()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
