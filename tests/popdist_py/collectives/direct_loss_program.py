"""The last instance ends after its last copy, before instance 0 reads or writes its memory.

Arguments: the collective, and which of the two instance 0 does late, ``read`` or ``write``.
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

collective, late = sys.argv[1:]
comm = join()
host, sliced = comm._host, comm._sliced
sliced._is_read = lambda *_: True
me, last = comm.instance_index, comm.num_instances - 1
pids = comm.all_gather_object(os.getpid())
is_late = comm.common_buffer(1)
reduce, read, copy = sliced._all_reduce_directly, host.read, getattr(host, f"{late}_bytes")


def end(*_):
    while not is_late[0]:
        os.sched_yield()
    os._exit(0)


def reduce_and_end(*arguments):
    host.barrier._wait_for = end
    reduce(*arguments)


def read_and_end(*arguments):
    read(*arguments)
    host.barrier._wait_for = end


def copy_late(position, *arguments):
    if position == last:
        is_late[0] = 1
        assert select.select([ended], [], [], 30)[0]
    return copy(position, *arguments)


if me == last:
    sliced._all_reduce_directly, host.read = reduce_and_end, read_and_end
if me == 0:
    ended = os.pidfd_open(pids[last])
    setattr(host, f"{late}_bytes", copy_late)
calls = 0
try:
    if collective == "all_reduce":
        x = np.full(60_000, me + 1.0)  # each owner reduces its slice in one part
        popdist_py.all_reduce(x, name="loss")
        assert (x == sum(range(1, last + 2))).all()
    else:
        x = np.full(1_000_000, me + 1.0)
        popdist_py.broadcast(x, name="loss")
        assert (x == 1).all()
    assert not host_group._exposed_arrays
    calls = 1
    popdist_py.barrier()
except popdist_py.InstanceLostError as error:
    kept = len(host_group._exposed_arrays)
    print(f"after {calls} calls, {kept} kept: {error}", flush=True)
    if me:
        time.sleep(30)  # the first to end would end the job before instance 0 has heard
    os.kill(os.getpid(), signal.SIGKILL)
