"""Who is slow and why: by the time that is not spent waiting for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.watch.instance_state import ACTIVITIES, InstanceState
from poprun_py.running.watch.stragglers import slowest, stragglers

STEP = 0.05


def training(index, *, step=STEP, steps=20, **spent):
    """Return an instance whose step of ``step`` seconds is made of these; else it waits."""
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


def test_in_step_all_take_as_long_and_the_one_that_does_not_wait_is_slow():
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
def test_the_reason_is_what_takes_longer_than_elsewhere(spent, cause):
    states = [*usual(2, computing=0.02), training(2, **spent)]
    (found,) = stragglers(states)
    assert found.cause == cause


@pytest.mark.parametrize(
    ("held_up", "cause"),
    [
        ({"queued": 0.4}, "it shares its CPUs"),
        ({"throttled": 0.4}, "its host throttles it"),
        ({"swap_bytes": 1 << 26}, "it swaps"),
        # All at once: what makes the others likely comes first.
        ({"queued": 0.4, "throttled": 0.4, "swap_bytes": 1}, "it swaps"),
        ({"queued": 0.4, "throttled": 0.4}, "its host throttles it"),
        # Too little to explain it.
        ({"queued": 0.05}, "it computes longer"),
    ],
)
def test_what_the_host_takes_explains_why_all_takes_longer(held_up, cause):
    states = [*usual(2), replace(training(2, computing=0.04), **held_up)]
    (found,) = stragglers(states)
    assert found.cause == cause


def test_what_is_no_part_of_a_step_is_no_reason():
    spent = {"computing": 0.015, "loading": 0.008, "saving": 0.017}
    seconds = training(2, **spent)
    (found,) = stragglers([*usual(2, computing=0.015), replace(seconds, own_seconds=0.023)])
    assert found.cause == "it loads data longer"


def test_ten_slow_steps_on_a_busy_host_are_not_yet_slow():
    # Between two looks it worked hardly more than the others; saving is no part of a step.
    hit = replace(training(2, computing=0.021, saving=0.02), own_seconds=0.04)
    assert stragglers([*usual(2), hit]) == []
    worst = slowest([*usual(2), hit])
    assert worst is not None
    assert not worst.is_slow


def test_what_all_suffer_from_alike_is_no_reason():
    states = [replace(each, queued=0.4) for each in [*usual(2), training(2, loading=0.04)]]
    (found,) = stragglers(states)
    assert found.cause == "it loads data longer"


def test_the_sentence_names_instance_host_times_and_reason():
    (found,) = stragglers([*usual(1), training(1, loading=0.04)])
    assert found.sentence == (
        "instance 1 on a is slow: 40 ms a step without waiting for others, the median is 20 ms: "
        "it loads data longer (80% of its time)"
    )


def test_only_the_instance_that_others_wait_for_is_accused():
    """Instance 0 is slower than the median one, and waits itself for instance 2."""
    spent = {0: {"computing": 0.0088}, 2: {"computing": 0.006, "other": 0.0600}}
    states = [
        training(index, step=0.066, **spent.get(index, {"computing": 0.0064})) for index in range(4)
    ]
    (found,) = stragglers(states)
    assert (found.instance, found.cause) == (2, "the program's own code takes longer")
    # Two that are about as slow hold up the others alike.
    states[0] = training(0, step=0.066, computing=0.060)
    assert [each.instance for each in stragglers([*states, *usual(2)])] == [2, 0]
    # One that waits for another costs much of a step all the same, as soon as that one is quicker.
    states[0] = training(0, step=0.066, computing=0.030)
    assert [each.instance for each in stragglers(states)] == [2, 0]


def test_of_instances_that_train_apart_nobody_waits_for_the_slowest():
    apart = [
        training(index, step=own, computing=own) for index, own in enumerate((0.02, 0.02, 0.04))
    ]
    assert stragglers(apart) == []


def test_many_instances_are_compared_in_a_number_of_calls_that_grows_with_theirs(calls):
    def made(count):
        fast, slow = {"computing": 0.02}, {"computing": 0.04}
        states = [training(i, **(slow if i % 2 and i > 1 else fast)) for i in range(count)]
        assert len(stragglers(states)) == count // 2 - 1
        return calls(lambda: stragglers(states))

    # 256 times as many if each were compared with each.
    assert made(1024) < 64 * made(64)


@pytest.mark.parametrize(
    "states",
    [
        [],
        usual(1),
        usual(4),
        [*usual(1), training(1, computing=0.0239)],  # less than a fifth more
        [*usual(1), training(1, computing=0.04, steps=9)],  # too few steps to say
        # More than a fifth, but nothing that anybody would notice.
        [training(0, step=0.001, computing=0.0002), training(1, step=0.001, computing=0.0006)],
    ],
)
def test_who_is_not_slow(states):
    assert stragglers(states) == []


def test_the_slowest_is_named_also_where_nobody_is_slow():
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
