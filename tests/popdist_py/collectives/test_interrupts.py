"""A program may be interrupted within a collective call at any moment, and may continue."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import popdist_py
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


def _call_until_one_is_interrupted(seconds, ways):
    with mock.patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):
        import jobs
    found = {}
    with mock.patch.dict("os.environ", {"POPDIST_HANG_TIMEOUT": "2"}):
        for way, communicator in jobs.ways(ways, synchronises=False):
            _calls()
            if communicator.instance_index:
                found[way] = [_told(_call_for_ever)]
                continue
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(_Interrupted):
                _call_for_ever()
            found[way] = [_told(popdist_py.barrier), _told(lambda: popdist_py.all_reduce(1.0))]
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
        assert re.search(r"instance 0 .*(left|lost|did not arrive within 2 s)", of_second), (
            way,
            of_second,
        )
