"""One instance leaves, or stays away; the others wait for it. Arguments: how, in which call."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jobs import join

import popdist_py

how, size = sys.argv[1], int(sys.argv[2])
comm = join()
me, last = comm.instance_index, comm.num_instances - 1
popdist_py.barrier()
# More descriptors than select() can take.
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
if me == last:
    if how == "leaves":
        os._exit(0)
    time.sleep(30)  # it ends with the job, long before
start = time.monotonic()
try:
    popdist_py.all_reduce(np.ones(size), name="loss")
except popdist_py.InstanceLostError as error:
    print(f"after {time.monotonic() - start:.1f} s: {error}", flush=True)
    if me:
        time.sleep(30)  # the first to end would end the job before instance 0 has heard
    os.kill(os.getpid(), signal.SIGKILL)
