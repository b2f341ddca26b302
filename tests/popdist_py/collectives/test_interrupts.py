"""Errors in the middle of a collective call: interrupts, numeric errors and full memory."""

from __future__ import annotations

import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.processes import wait_until

import popdist_py
from popdist_py.collectives.communicators import join
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.collectives.within_host.shared_window import WindowError
from popdist_py.errors import CollectiveMismatchError, InstanceLostError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

WAYS = ("", "TEST_WITHOUT_READING=1", "TEST_NUM_HOSTS=2", "POPDIST_SHARED_MEMORY=0")


class _Interrupted(BaseException):
    """The error that the program's own signal handler raises."""


def _interrupt(*_):
    raise _Interrupted


def _calls():
    """Make calls of all kinds and sizes."""
    for size in (1, 10_000, 1_000_000):
        array = np.ones(size, np.float32)
        popdist_py.all_reduce(array)
        popdist_py.broadcast(array)
        popdist_py.all_gather(array)
        popdist_py.all_gather_object({"size": size})
    popdist_py.barrier()


def _call_for_ever():
    while True:
        _calls()


def _told(call):
    """Return the message of a call's error, and the seconds until the error."""
    began = time.monotonic()
    with pytest.raises((InstanceLostError, CollectiveMismatchError)) as error:
        call()
    return str(error.value), time.monotonic() - began


def _ways(words, **options):
    with mock.patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):
        import jobs
    return jobs.ways(words, **options)


def _call_until_one_is_interrupted(seconds, ways):
    found = {}
    with mock.patch.dict("os.environ", {"POPDIST_HANG_TIMEOUT": "2"}):
        for way, communicator in _ways(ways, synchronises=False):
            _calls()
            if communicator.instance_index:
                found[way] = [_told(_call_for_ever)]
                continue
            signal.signal(signal.SIGALRM, _interrupt)
            # A second signal, if Python ignored the first one's error. This happens in the callback
            # of a weak reference, such as that of one of mock's classes.
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            with pytest.raises(_Interrupted):
                _call_for_ever()
            signal.setitimer(signal.ITIMER_REAL, 0)
            # The other instance makes neither of these calls. If the interrupt came between two
            # calls, a call that the other instance makes too, such as a barrier, could succeed.
            found[way] = [
                _told(lambda: popdist_py.reduce_scatter(np.ones(4))),
                _told(lambda: popdist_py.all_reduce(1.0)),
            ]
    return found


@pytest.mark.parametrize(
    ("seconds", "ways"),
    [
        (0.05, ("", "TEST_NUM_HOSTS=2")),
        *(pytest.param(0.011 * n, WAYS, marks=pytest.mark.sweep) for n in range(1, 8)),
    ],
    ids=str,
)
def test_its_later_calls_fail_at_once_and_the_others_learn_that_it_has_left(
    instances, seconds, ways
):
    first, second = instances.run(_call_until_one_is_interrupted, seconds, ways, count=2, limit=100)
    for way in ways:
        ((of_second, seconds_of_second),) = second[way]
        assert seconds_of_second < 10, way
        if "must make the same call" in of_second:  # the interrupt came between two calls
            assert first[way][0][0] == of_second
            continue
        for said, took in first[way]:
            assert "this instance left the group when its call" in said, way
            assert "was interrupted by _Interrupted" in said
            assert took < 0.5
        assert re.search(
            r"instance 0 .*(left|lost|did not make this call within 2 s)", of_second
        ), (
            way,
            of_second,
        )


def _after_errors_of_one_call(ways):
    """Return the errors of sums that overflow, and whether the sums after them are right."""
    found = {}
    for way, communicator in _ways(ways):
        found[way] = []
        for size in (10, 300_000, 700_000):
            for call in (popdist_py.all_reduce, popdist_py.reduce_scatter):
                # Only the first instance reduces these elements of a large array.
                array = np.where(np.arange(size) < 3, 3e38, 1).astype(np.float32)
                with np.errstate(over="raise"):
                    try:
                        call(array)
                    except FloatingPointError as error:
                        found[way].append(str(error))
                ones = np.ones(size, np.float32)
                assert (popdist_py.all_reduce(ones) == 2).all(), (way, size, call)
        with pytest.raises(WindowError):
            communicator.gradient_buffer(1 << 60)
        assert popdist_py.all_reduce(1) == 2
    return found


def test_numeric_errors_and_a_window_that_does_not_fit_end_no_group(instances):
    first, second = instances.run(_after_errors_of_one_call, WAYS)
    for way in WAYS:
        assert len(first[way]) == 6, way  # every call overflowed on the first instance
        assert all(text.startswith("overflow encountered in") for text in first[way]), way
    # The second instance does not reduce the first elements of a large array on the same host.
    assert len(second[""]) == 1
    assert len(second["POPDIST_SHARED_MEMORY=0"]) == 6


def _interrupted_between_two_leaves(call_names, folder):
    """Interrupt instance 0 before it sends the second leaf; return what the instances are told."""
    leaves, found = {"a": np.ones(3), "b": np.ones(3)}, []
    for name, (_, communicator) in zip(
        call_names, _ways([""] * len(call_names), synchronises=False), strict=True
    ):
        popdist_py.barrier()
        call, has_told = partial(getattr(popdist_py, name), leaves), folder / name
        if communicator.instance_index:
            with mock.patch.object(WaitLimits, "launcher_grace", 0.2):
                found.append(_told(call)[0])
            has_told.touch()
            continue
        effects = [mock.DEFAULT, _Interrupted]
        one_leaf = getattr(communicator, name)
        with (
            mock.patch.object(communicator, name, wraps=one_leaf, side_effect=effects),
            pytest.raises(_Interrupted),
        ):
            call()
        found.append(_told(lambda: popdist_py.all_reduce(np.ones(3)))[0])
        wait_until(has_told.exists, 60)
    return found


def test_an_interrupt_between_two_leaves_is_one_within_the_call(instances, tmp_path):
    names = ("all_reduce", "broadcast")
    first, second = instances.run(_interrupted_between_two_leaves, names, tmp_path)
    for name, own, of_other in zip(names, first, second, strict=True):
        assert own.endswith(f"left the group when its call {name} was interrupted by _Interrupted")
        assert of_other.startswith(f"{name}(")
        assert re.search(r"instance 0 \(process \d+\) has left the group$", of_other)


_LEAVES = ("", "TEST_NUM_HOSTS=3", "TEST_NUM_HOSTS=2", "POPDIST_SHARED_MEMORY=0")


def _left_by_one(folder):
    """Let instance 1 leave in each way, and then instance 0 abort; return what each is told."""
    found = {}
    with mock.patch.object(WaitLimits, "launcher_grace", 0.2):
        for way, communicator in _ways(_LEAVES, synchronises=False):
            popdist_py.barrier()
            me = communicator.instance_index
            if me == 1:
                _be_interrupted(communicator)
            found[way] = [_told(popdist_py.barrier), _told(lambda: popdist_py.all_reduce(1))]
            _wait_for_each(folder / f"told {way}", me)
        for _, communicator in _ways(("TEST_NUM_HOSTS=2",), synchronises=False):
            popdist_py.barrier()
            me = communicator.instance_index
            if me == 0:
                communicator._limits.abort_reason = "it was aborted"
            if me != 1:
                found["aborted"] = _told(popdist_py.barrier)
            _wait_for_each(folder / "aborted", me)
    return found


def _be_interrupted(communicator):
    with (
        mock.patch.object(communicator._host, "next_turn", side_effect=_Interrupted),
        pytest.raises(_Interrupted),
    ):
        popdist_py.barrier()


def _wait_for_each(folder, instance):
    """Return when all three instances are here: one that ends its part would be lost too."""
    folder.mkdir(exist_ok=True)
    (folder / str(instance)).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 3, 60)


def _of_groups(folder):
    """Interrupt instance 1 in a call of a group of two instances, and all in a join of another."""
    popdist_py.init()
    me, told = popdist_py.getInstanceIndex(), []
    joins = mock.patch.object(join, "join_group", wraps=join.join_group)
    with mock.patch.object(WaitLimits, "launcher_grace", 0.2), joins as join_group:
        in_group = partial(popdist_py.execute_on_instances, {0, 1})
        in_group(popdist_py.barrier)
        if me == 1:
            in_group(lambda: _be_interrupted(popdist_py.context.communicator()))
        if me != 2:
            told += [_told(partial(in_group, popdist_py.barrier))[0] for _ in range(2)]
        join_group.side_effect = _Interrupted
        for error in (_Interrupted, InstanceLostError):
            if me:
                with pytest.raises(error) as raised:
                    popdist_py.execute_on_instances({1, 2}, popdist_py.barrier)
                told.append(str(raised.value))
        _wait_for_each(folder, me)
    popdist_py.barrier()  # the job itself goes on
    popdist_py.context.finalize()
    return told, join_group.call_count


def _of_groups_without_tcp():
    """Join a group of a job whose hosts do not reach one another, and one without instance 2."""
    in_group, found = popdist_py.execute_on_instances, []
    for _, communicator in _ways(("TEST_NUM_HOSTS=3,TEST_WITHOUT_SOCKETS=1",)):
        me = communicator.instance_index
        place = mock.patch.object(join, "place_of_this_process", return_value=f"host {me}")
        with place, mock.patch.object(join, "connect") as connect:
            found.append(in_group({0, 1}, popdist_py.all_reduce, me + 1))
        found.append(connect.called)
        if me == 0:
            with mock.patch.dict("os.environ", {"POPDIST_HANG_TIMEOUT": "0.3"}):
                found.append(_told(partial(in_group, {0, 2}, popdist_py.barrier))[0])
    return found


def test_a_group_tries_tcp_only_if_its_job_uses_it_and_waits_a_limited_time(instances):
    first, second, third = instances.run(_of_groups_without_tcp, count=3)
    late = "instance 2 did not make this call within 0.3 s (POPDIST_HANG_TIMEOUT)"
    assert first == [3, False, f"execute_on_instances({{0, 2}}): {late}"]
    assert second == [3, False]
    assert third == [None, False]


def test_the_others_name_the_instance_that_left_and_a_group_is_joined_once(instances, tmp_path):
    own = "this instance left the group when its call barrier was interrupted by _Interrupted"
    told = instances.run(_left_by_one, tmp_path, count=3)
    for way in _LEAVES:
        assert {text for text, _ in told[1][way]} == {own}
    on_this_host, elsewhere = (
        r"instance 1 \(process \d+\) has left the group$",
        "instance 1 on another host was lost$",
    )
    for me, way, expected in (
        (0, "", on_this_host),
        (2, "", on_this_host),
        (0, "TEST_NUM_HOSTS=3", elsewhere),
        (2, "TEST_NUM_HOSTS=3", elsewhere),
        (0, "TEST_NUM_HOSTS=2", on_this_host),
        (2, "TEST_NUM_HOSTS=2", elsewhere),
        (0, "POPDIST_SHARED_MEMORY=0", elsewhere),
        (2, "POPDIST_SHARED_MEMORY=0", elsewhere),
    ):
        for text, seconds in told[me][way]:
            assert re.search(expected, text), (me, way, text)
            assert seconds < 30  # the time-out is longer
    assert told[0]["aborted"][0] == "barrier(): it was aborted"
    assert re.search("instance 0 on another host was lost$", told[2]["aborted"][0])

    groups = instances.run(_of_groups, tmp_path / "groups", count=3)
    again = "execute_on_instances({1, 2}): this instance cannot join the group again"
    (first, joins_of_first), (second, joins_of_second), (third, joins_of_third) = groups
    assert joins_of_first == 1
    assert all("instance 1 (process " in text and "has left the group" in text for text in first)
    assert second[:2] == [own, own]
    assert joins_of_second == 2
    assert joins_of_third == 1
    for texts in (second[2:], third):
        assert texts[1].startswith(again)
