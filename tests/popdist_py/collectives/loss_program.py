"""One instance leaves or does not make a call, while the others wait for it.

The arguments are the kind of loss and the call.
"""

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
# These are more descriptors than select() supports.
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
if me == last:
    if how == "leaves":
        os._exit(0)
    time.sleep(30)  # the job ends long before this sleep
start = time.monotonic()
try:
    popdist_py.all_reduce(np.ones(size), name="loss")
except popdist_py.InstanceLostError as error:
    print(f"after {time.monotonic() - start:.1f} s: {error}", flush=True)
    if me:
        # The first instance to end would end the job before instance 0 gets its error.
        time.sleep(30)
    os.kill(os.getpid(), signal.SIGKILL)
