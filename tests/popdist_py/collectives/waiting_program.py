"""Instance 0 works for a second while the others wait, and the program prints their CPU time."""

from __future__ import annotations

import time

import popdist_py

popdist_py.init()
popdist_py.barrier()
start, used = time.perf_counter(), time.process_time()
if popdist_py.getInstanceIndex() == 0:
    while time.process_time() - used < 1:
        pass
popdist_py.barrier()
print(f"{time.process_time() - used:.3f} {time.perf_counter() - start:.3f}")
