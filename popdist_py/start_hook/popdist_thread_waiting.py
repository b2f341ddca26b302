"""The default of GOMP_SPINCOUNT, which limits how long waiting OpenMP threads spin.

PyTorch's wheels contain the OpenMP runtime of GNU. By default, a waiting thread of this runtime
spins 300,000 times. This takes about 16 ms on processors where the pause instruction takes 140
cycles. On a busy machine, a spinning thread takes a core from the thread that it waits for.

Importing this module sets the variable. Python imports this module at its start, so the module
imports only ``os``, which Python has already loaded.
"""

import os

# The OpenMP runtime reads these variables when torch is imported. A variable that a program or a
# user has set is kept.
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# This number of spins takes about a millisecond. On an idle machine, a training step is then as
# fast as with the runtime's default, and twice as fast as with 100 or 1000 spins. With so few
# spins, threads sleep and are woken in every operation. While eight other processes
# keep two cores busy, a step with this setting is five times as fast as with the runtime's default
# (measured by benchmarks/thread_waiting.py).
SPIN_COUNT = "30000"

if not any(name in os.environ for name in _OF_THE_USER):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
