"""Instances that call different collectives; every one of them must get the error that says so."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jobs import join

import popdist_py
from popdist_py import all_reduce, barrier, broadcast

me = join().instance_index
last = me == popdist_py.getNumInstances() - 1

CASES = {
    "shape": lambda: all_reduce(np.ones(3 if last else 2)),
    "large shape": lambda: all_reduce(np.ones(1_000_001 if last else 1_000_000)),
    "dtype": lambda: all_reduce(np.ones(2, np.float32 if last else np.float64)),
    "op": lambda: all_reduce(np.ones(2), "max" if last else "sum"),
    "name": lambda: all_reduce(1.0, name="loss" if last else "accuracy"),
    "call": lambda: barrier() if last else all_reduce(np.ones(1_000_000)),
    "root": lambda: broadcast(np.ones(2), root=int(last)),
    "keys": lambda: all_reduce({"a": 1, "b" if last else "c": 2}),
    "length": lambda: all_reduce([1] * (2 + last)),
    "gather": lambda: popdist_py.all_gather(np.ones(2 + last)),
    "buffer": lambda: popdist_py.context.communicator().gradient_buffer(8 + last),
}
for name, call in CASES.items():
    try:
        call()
        raise AssertionError(f"{name}: no error")
    except popdist_py.CollectiveMismatchError as error:
        print(f"{name}: {error}")
    # The job goes on: the error was raised everywhere, so everybody is at the same place.
    assert all_reduce(1) == popdist_py.getNumInstances()
