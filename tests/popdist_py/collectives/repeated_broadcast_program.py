"""Broadcasts that all instances have agreed on before: the root goes on, and errors come later."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from jobs import join

import popdist_py
from popdist_py import barrier, broadcast

comm = join()
me, count = comm.instance_index, comm.num_instances
last = me == count - 1
SIZES = {"small": 3, "large": 200_000}
ARRAYS = {name: np.zeros(size) for name, size in SIZES.items()}


def send(root, name="small", times=1):
    for _ in range(times):
        broadcast(ARRAYS[name], root, name=name)


def agree():
    for root in range(count):
        for name in SIZES:
            send(root, name)


def check_values(steps):
    agree()
    for step in range(steps):
        root = 0 if step < steps // 2 else step % count
        name = "large" if step % 10 == 0 else "small"
        ARRAYS[name][:] = step if me == root else -1
        send(root, name)
        assert (ARRAYS[name] == step).all(), (step, me)
        ARRAYS[name][:] = -1  # what was sent is on its way
        if step % 7 == 0:
            assert popdist_py.all_reduce(step) == count * step


def check_the_root_goes_on():
    has_sent = comm.common_buffer(1)
    agree()
    barrier()
    deadline = time.monotonic() + 20
    while me and not has_sent[0]:
        assert time.monotonic() < deadline, "the root waits for the others"
        time.sleep(0.001)
    for step in range(5):
        ARRAYS["small"][:] = step if me == 0 else -1
        send(0)
        assert (ARRAYS["small"] == step).all()
    has_sent[0] = 1


CASES = {
    "another call": lambda: None if last else send(0),
    "much later": lambda: None if last else send(0, times=500),
    "the root makes another": lambda: None if me == 0 else send(0),
    "a large one": lambda: None if last else send(0, "large", times=9),
    "another root": lambda: send(2 if last else 0, times=500),
    "all are the root": lambda: (send(me, times=500), sys.exit("the roots never look")),
    "nobody is the root": lambda: send((me + 1) % count),
    "another size": lambda: send(1, "large" if last else "small", times=500),
    "after equal ones": lambda: (send(0, times=3), send(1) if last else send(0), send(2, times=9)),
}


def check_errors():
    for name, call in CASES.items():
        agree()
        try:
            call()
            barrier()
            raise AssertionError(f"{name}: no error")
        except popdist_py.CollectiveMismatchError as error:
            print(f"{name}: {error}")
        # All of them go on from here.
        assert popdist_py.all_reduce(1) == count
        check_values(10)


check_values(300)
check_the_root_goes_on()
check_errors()
print("done")
