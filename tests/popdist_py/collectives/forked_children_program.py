"""Instances that fork a child, whose calls are refused; run by test_background.py.

Every argument is a way of joining, as variables ``A=1,B=2`` or an empty text.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from jobs import ways

import popdist_py


def calls_that_a_child_makes():
    return [
        lambda: popdist_py.all_reduce(np.full(3, 100.0)),
        lambda: popdist_py.all_reduce(np.ones(1_000_000)),
        lambda: popdist_py.all_reduce({"a": 1}),
        lambda: popdist_py.all_reduce(1, async_op=True).wait(),
        lambda: popdist_py.all_gather_object(me),
        lambda: popdist_py.gather(np.ones(2)),
        lambda: popdist_py.reduce_scatter(np.ones(2 * count)),
        popdist_py.synchronize,
        lambda: popdist_py.execute_on_instances(range(count), popdist_py.all_reduce, 1),
        # This group was not used before.
        lambda: popdist_py.execute_on_instances(range(1, count), popdist_py.barrier),
        lambda: comm.gradient_buffer(8),
    ]


def be_the_child():
    calls = calls_that_a_child_makes()
    # The new group has all instances but instance 0.
    expected = len(calls) - (me == 0 or count == 2) if count > 1 else 0
    refused = 0
    for call in calls:
        try:
            call()
        except popdist_py.ForkedProcessError:
            refused += 1
    before.wait()
    # The child exits normally, and must not release the resources of its parent.
    sys.exit(7 if refused == expected else f"{refused} calls were refused, not {expected}")


for way, comm in ways(sys.argv[1:]):
    me, count = comm.instance_index, comm.num_instances
    before = popdist_py.all_reduce(np.ones(3), async_op=True)
    popdist_py.all_reduce(1)
    child = os.fork()
    if child == 0:
        be_the_child()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert popdist_py.all_reduce(np.full(3, me + 1.0)).tolist() == [count * (count + 1) / 2] * 3
    print(f"[{way}] {type(comm).__name__} of {count} goes on")
