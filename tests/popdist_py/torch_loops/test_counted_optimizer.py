"""Which steps of several optimizers count as training steps."""

from __future__ import annotations

import threading

import pytest

from popdist_py.torch_loops.counted_optimizer import CountedOptimizer


class Optimizer:
    """An optimizer that can be referred to weakly, like torch's."""


@pytest.fixture
def counted():
    return CountedOptimizer()


def steps(counted, *optimizers):
    """Let the optimizers step in turn; return how many of the steps count."""
    number = 0
    for optimizer in optimizers:
        counted.begin_step(optimizer)
        number += counted.end_step(optimizer)
    return number


def test_only_the_optimizer_that_steps_first_counts(counted):
    critic, generator = Optimizer(), Optimizer()
    assert steps(counted, critic, critic, generator, critic, generator) == 3


def test_the_second_phase_of_a_training_counts_once_the_first_is_over(counted):
    first, second = Optimizer(), Optimizer()
    assert steps(counted, first, *[second] * 100) == 1
    assert steps(counted, *[second] * 10) == 10
    assert steps(counted, first) == 0


def test_steps_in_turn_never_replace_the_counted_optimizer(counted):
    first, *others = (Optimizer() for _ in range(300))
    assert steps(counted, *[first, *others, first, *[others[0]] * 100] * 3) == 6


def test_an_optimizer_replaces_a_deleted_one_at_once(counted):
    assert steps(counted, Optimizer()) == 1
    assert [steps(counted, Optimizer()) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("is_one", [True, False], ids=["its base class", "an optimizer in it"])
def test_a_step_within_a_step_counts_once(counted, is_one):
    outer = Optimizer()
    inner = outer if is_one else Optimizer()
    for _ in range(3):
        counted.begin_step(outer)
        counted.begin_step(inner)
        assert counted.end_step(inner)
        assert not counted.end_step(outer)


def test_a_step_that_fails_does_not_count(counted):
    optimizer = Optimizer()
    counted.begin_step(optimizer)  # this step raises an error
    assert steps(counted, optimizer) == 1
    assert not counted.end_step(optimizer)


def test_threads_step_their_optimizers_at_the_same_time(counted):
    first, second = Optimizer(), Optimizer()
    assert steps(counted, first) == 1
    counted.begin_step(first)
    thread = threading.Thread(target=steps, args=(counted, second))
    thread.start()
    thread.join()
    assert counted.end_step(first)
