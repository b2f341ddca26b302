"""The default of GOMP_SPINCOUNT, which limits how long waiting OpenMP threads spin.

PyTorch's wheels contain the OpenMP runtime of GNU. By default, a waiting thread of GNU's runtime
spins 300,000 times. These spins take about 16 ms on processors where the pause instruction takes
140 cycles. On a busy machine, a spinning thread takes a core from the thread that it waits for.

Importing this module sets GOMP_SPINCOUNT. To keep the start of Python fast, this module imports
only ``os``, which Python has already loaded.
"""

import os

# The OpenMP runtime reads these variables when torch is imported. If one of them is already set,
# GOMP_SPINCOUNT is not changed.
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Spinning 30,000 times takes about a millisecond. On an idle machine, a training step with 30,000
# spins is as fast as with the OpenMP runtime's default. With only 100 or 1000 spins, threads sleep
# and are woken in every operation, and a training step takes twice as long. While eight other
# processes keep two cores busy, a training step with 30,000 spins is five times as fast as with the
# OpenMP runtime's default. The script benchmarks/thread_waiting.py measures such times.
SPIN_COUNT = "30000"

if not any(name in os.environ for name in _OF_THE_USER):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
