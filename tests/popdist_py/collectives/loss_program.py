"""One instance leaves, or stays away; the others wait for it. Arguments: how, size, which call."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jobs import join

import popdist_py

how, size, call = sys.argv[1], int(sys.argv[2]), sys.argv[3]
comm = join()
me, last = comm.instance_index, comm.num_instances - 1
x = np.ones(size)
CALLS = {
    "all_reduce": lambda: popdist_py.all_reduce(x, name="loss"),
    "broadcast from it": lambda: popdist_py.broadcast(x, last, name="loss"),
    # The root goes on until there is no room for more.
    "broadcast to it": lambda: [popdist_py.broadcast(x, 0, name="loss") for _ in range(999)],
}
if call != "all_reduce":
    popdist_py.broadcast(x, last if call == "broadcast from it" else 0, name="loss")
popdist_py.barrier()
if me == last:
    if how == "leaves":
        os._exit(0)
    time.sleep(30)  # it ends with the job, long before
start = time.monotonic()
try:
    CALLS[call]()
except popdist_py.InstanceLostError as error:
    print(f"after {time.monotonic() - start:.1f} s: {error}", flush=True)
    if me:
        time.sleep(30)  # the first to end would end the job before instance 0 has heard
    os.kill(os.getpid(), signal.SIGKILL)
