"""Stragglers and the causes that are reported for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.stragglers import slowest, stragglers

STEP = 0.05


def training(index, *, step=STEP, steps=20, **spent):
    """Return an instance that spends its step on these activities and waits for the rest."""
    waiting = step - sum(spent.values())
    seconds = {"waiting": waiting, **spent}
    return InstanceState(
        index=index,
        host="a",
        num_steps=steps,
        step_seconds=step,
        own_seconds=step - waiting,
        shares=tuple(seconds.get(name, 0.0) / step for name in ACTIVITIES),
    )


def usual(count, **spent):
    return [training(index, **(spent or {"computing": 0.02})) for index in range(count)]


def test_the_instance_that_does_not_wait_for_others_is_slow():
    states = [*usual(3), training(3, computing=0.04)]
    (found,) = stragglers(states)
    assert (found.instance, found.own_seconds, found.median_seconds) == (
        3,
        pytest.approx(0.04),
        pytest.approx(0.02),
    )
    assert found.reason == "it computes longer (80% of its time)"


@pytest.mark.parametrize(
    ("spent", "cause"),
    [
        ({"computing": 0.02, "loading": 0.02}, "it loads data longer"),
        ({"computing": 0.04}, "it computes longer"),
        ({"computing": 0.02, "other": 0.02}, "the program's own code takes longer"),
    ],
)
def test_the_cause_is_the_activity_that_takes_longer_than_elsewhere(spent, cause):
    states = [*usual(2, computing=0.02), training(2, **spent)]
    (found,) = stragglers(states)
    assert found.cause == cause


@pytest.mark.parametrize(
    ("held_up", "cause"),
    [
        ({"queued": 0.4}, "it shares its CPUs"),
        ({"throttled": 0.4}, "its host throttles it"),
        ({"swap_bytes": 1 << 26}, "it swaps"),
        # If there are several causes, the one that leads to the others is reported.
        ({"queued": 0.4, "throttled": 0.4, "swap_bytes": 1}, "it swaps"),
        ({"queued": 0.4, "throttled": 0.4}, "its host throttles it"),
        # This little waiting for a CPU does not explain the difference.
        ({"queued": 0.05}, "it computes longer"),
    ],
)
def test_causes_on_the_host_come_before_activities(held_up, cause):
    states = [*usual(2), replace(training(2, computing=0.04), **held_up)]
    (found,) = stragglers(states)
    assert found.cause == cause


def test_saving_is_not_a_cause_because_it_is_outside_of_steps():
    spent = {"computing": 0.015, "loading": 0.008, "saving": 0.017}
    seconds = training(2, **spent)
    (found,) = stragglers([*usual(2, computing=0.015), replace(seconds, own_seconds=0.023)])
    assert found.cause == "it loads data longer"


def test_an_instance_with_ten_slow_steps_on_a_busy_host_is_not_slow():
    # Between two snapshots it worked hardly more than the others. Saving is not part of a step.
    hit = replace(training(2, computing=0.021, saving=0.02), own_seconds=0.04)
    assert stragglers([*usual(2), hit]) == []
    worst = slowest([*usual(2), hit])
    assert worst is not None
    assert not worst.is_slow


def test_a_delay_that_all_instances_share_is_not_a_cause():
    states = [replace(each, queued=0.4) for each in [*usual(2), training(2, loading=0.04)]]
    (found,) = stragglers(states)
    assert found.cause == "it loads data longer"


def test_the_sentence_names_instance_host_times_and_cause():
    (found,) = stragglers([*usual(1), training(1, loading=0.04)])
    assert found.sentence == (
        "instance 1 on a is slow: a step takes 40 ms without waiting for other instances, and "
        "20 ms in the median instance: it loads data longer (80% of its time)"
    )


def test_an_instance_that_waits_for_a_slower_one_is_not_a_straggler():
    """Instance 0 is slower than the median, but waits for instance 2."""
    spent = {0: {"computing": 0.0088}, 2: {"computing": 0.006, "other": 0.0600}}
    states = [
        training(index, step=0.066, **spent.get(index, {"computing": 0.0064})) for index in range(4)
    ]
    (found,) = stragglers(states)
    assert (found.instance, found.cause) == (2, "the program's own code takes longer")
    # If both are about equally slow, both are stragglers.
    states[0] = training(0, step=0.066, computing=0.060)
    assert [each.instance for each in stragglers([*states, *usual(2)])] == [2, 0]
    # An instance that waits for another still costs much of a step once the other is quicker.
    states[0] = training(0, step=0.066, computing=0.030)
    assert [each.instance for each in stragglers(states)] == [2, 0]


def test_instances_that_do_not_train_together_have_no_straggler():
    apart = [
        training(index, step=own, computing=own) for index, own in enumerate((0.02, 0.02, 0.04))
    ]
    assert stragglers(apart) == []


def test_the_calls_for_comparing_instances_grow_linearly_with_their_number(calls):
    def made(count):
        fast, slow = {"computing": 0.02}, {"computing": 0.04}
        states = [training(i, **(slow if i % 2 and i > 1 else fast)) for i in range(count)]
        assert len(stragglers(states)) == count // 2 - 1
        return calls(lambda: stragglers(states))

    # Comparing each instance with each other one would take 256 times as many calls.
    assert made(1024) < 64 * made(64)


@pytest.mark.parametrize(
    "states",
    [
        [],
        usual(1),
        usual(4),
        [*usual(1), training(1, computing=0.0239)],  # less than a fifth more
        [*usual(1), training(1, computing=0.04, steps=9)],  # too few steps
        # More than a fifth, but only 0.4 ms.
        [training(0, step=0.001, computing=0.0002), training(1, step=0.001, computing=0.0006)],
    ],
)
def test_instances_that_are_not_slow(states):
    assert stragglers(states) == []


def test_the_slowest_is_named_even_if_it_is_not_slow():
    found = slowest([*usual(2), training(2, computing=0.021)])
    assert found is not None
    assert found.instance == 2
    assert not found.is_slow
    assert slowest(usual(1)) is None


@given(
    st.lists(
        st.builds(
            InstanceState,
            index=st.integers(0, 1000),
            num_steps=st.integers(0, 100),
            step_seconds=st.floats(0, 10),
            own_seconds=st.floats(0, 10),
            shares=st.tuples(*[st.floats(0, 1)] * len(ACTIVITIES)),
            queued=st.floats(0, 1),
            throttled=st.floats(0, 1),
            swap_bytes=st.integers(0, 1 << 40),
        ),
        max_size=6,
        unique_by=lambda state: state.index,
    )
)
def test_never_the_half_of_the_instances_and_never_the_fastest(states):
    found = stragglers(states)
    assert len(found) <= len(states) / 2
    fastest = min((s.own_seconds for s in states), default=0)
    assert all(each.own_seconds > fastest for each in found)
    assert found == sorted(found, key=lambda each: -each.own_seconds)
    assert {each.instance for each in found} == {each.instance for each in stragglers(states[::-1])}
