"""Instances that call different collectives, all of which must raise an error."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
from jobs import ways

import popdist_py
from popdist_py import all_reduce, barrier, broadcast
from popdist_py.collectives.communicators import group_communicator
from popdist_py.collectives.within_host import host_group


def _frozen():
    array = np.ones(2)
    array.flags.writeable = False
    return array


CASES = {
    "shape": lambda: all_reduce(np.ones(3 if last else 2)),
    "large shape": lambda: all_reduce(np.ones(1_000_001 if last else 1_000_000)),
    "dtype": lambda: all_reduce(np.ones(2, np.float32 if last else np.float64)),
    "op": lambda: all_reduce(np.ones(2), "max" if last else "sum"),
    "name": lambda: all_reduce(1.0, name="loss" if last else "accuracy"),
    "call": lambda: barrier() if last else all_reduce(np.ones(1_000_000)),
    "small call": lambda: barrier() if last else all_reduce(np.ones(6)),
    "block": lambda: (
        all_reduce(np.ones(6), name="n")
        if last
        else popdist_py.reduce_scatter(np.ones(6), name="n")
    ),
    "root": lambda: broadcast(np.ones(2), root=int(last)),
    "keys": lambda: all_reduce({"a": 1, "b" if last else "c": 2}),
    "length": lambda: all_reduce([1] * (2 + last)),
    "gather": lambda: popdist_py.all_gather(np.ones(2 + last)),
    "nested": lambda: all_reduce(
        {"loss": {"a": 1, "b": [np.ones(2 + last)]}, **({"new": 1.0} if last else {})}, name="m"
    ),
    "text": lambda: all_reduce({"loss": "low" if last else 0.5}, name="metrics"),
    "text alone": lambda: all_reduce("low" if last else 0.5),
    "many": lambda: all_reduce({f"weight {i}": np.ones(2 + last) for i in range(9)}),
    "sent": lambda: broadcast({"a": np.ones(1)} if last else {"a": "text"}),
    "frozen": lambda: broadcast(_frozen() if last else np.ones(2)),
    "objects": lambda: popdist_py.all_gather_object(1, name="b" if last else "a"),
    "buffer": lambda: popdist_py.context.communicator().gradient_buffer(8 + last),
}


def messages():
    # A failed call of an earlier test in this process keeps its array for good.
    kept = set(host_group._exposed_arrays)
    found = {}
    for name, call in CASES.items():
        try:
            call()
            raise AssertionError(f"{name}: no error")
        except popdist_py.CollectiveMismatchError as error:
            found[name] = str(error)
        # The job continues, because all instances raised the error at the same call.
        assert all_reduce(1) == count
    assert set(host_group._exposed_arrays) == kept
    return found


def check_plans_that_are_forgotten():
    # The first instance knew one of the two calls, so it has now fewer plans than the last
    # instance. The two drop their plans at different calls. This must not change how an array is
    # reduced.
    all_reduce(1.0, name="old")
    with contextlib.suppress(popdist_py.CollectiveMismatchError):
        all_reduce(1.0, name="new" if last else "old")
    for step in range(24):
        large = np.full(1_500_003, me + 1.0)
        all_reduce(large, name="large")
        assert (large == count * (count + 1) / 2).all(), step
        all_reduce(1.0, name=f"step {step}")


def messages_by_way(*words):
    """Return the message of each case for each way of joining, ``A=1,B=2`` or an empty text."""
    global me, count, last
    found = {}
    for way, comm in ways(words):
        me, count = comm.instance_index, comm.num_instances
        last = me == count - 1
        found[way] = messages()
        with mock.patch.object(group_communicator, "_MAX_PLANS", 8):
            check_plans_that_are_forgotten()
    return found
