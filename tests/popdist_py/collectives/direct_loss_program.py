"""The last instance ends after its last copy, before instance 0 reads or writes its memory.

The argument is the access that instance 0 makes late, ``read`` or ``write``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jobs import join

import popdist_py
from popdist_py.collectives.within_host import host_group

late = sys.argv[1]
comm = join()
host, sliced = comm._host, comm._sliced
sliced._is_read = lambda *_: True
me, last = comm.instance_index, comm.num_instances - 1
pids = comm.all_gather_object(os.getpid())
flags = comm.common_buffer(2)
is_late, is_done = flags[:1], flags[1:]
reduce, copy = sliced._all_reduce_directly, getattr(host, f"{late}_bytes")


def end(*_):
    while not is_late[0]:
        os.sched_yield()
    os._exit(0)


def meet(*arguments):
    is_done[0] = 1
    wait_for_all(*arguments)


def expect_last_meeting():
    if me == last:
        host.barrier._wait_for = end
    elif me == 1:
        host.barrier.wait_for_all = meet


def reduce_then_meet(*arguments):
    expect_last_meeting()
    reduce(*arguments)


def copy_late(position, *arguments):
    if position == last:
        while not is_done[0]:  # instance 1 must not notice the loss
            os.sched_yield()
        is_late[0] = 1
        assert select.select([ended], [], [], 30)[0]
    return copy(position, *arguments)


wait_for_all = host.barrier.wait_for_all
sliced._all_reduce_directly = reduce_then_meet
if me == 0:
    ended = os.pidfd_open(pids[last])
    setattr(host, f"{late}_bytes", copy_late)
calls = 0
try:
    x = np.full(60_000, me + 1.0)  # each owner reduces its slice in one part
    popdist_py.all_reduce(x, name="loss")
    assert (x == sum(range(1, last + 2))).all()
    assert not host_group._exposed_arrays
    calls = 1
    popdist_py.barrier()
except popdist_py.InstanceLostError as error:
    kept = len(host_group._exposed_arrays)
    print(f"after {calls} calls, {kept} kept: {error}", flush=True)
    if me:
        # The first instance to end would end the job before instance 0 gets its error.
        time.sleep(30)
    os.kill(os.getpid(), signal.SIGKILL)
