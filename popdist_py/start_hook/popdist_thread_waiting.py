"""The default of GOMP_SPINCOUNT, which limits how long waiting OpenMP threads spin.

Torch's wheels contain GNU's OpenMP. Its own default is 300,000 spins, or about 16 ms on processors
where the pause instruction takes 140 cycles. On a busy machine, a spinning thread takes a core from
the thread that it waits for.

Importing this module sets the variable. Python imports it at its start, so it imports only ``os``,
which is loaded by then.
"""

import os

# The OpenMP runtime reads these variables when torch is imported. A variable that a program or a
# user has set is kept.
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# About a millisecond. Alone on a machine, a training step is as fast as with the runtime's default,
# and twice as fast as with 100 or 1000 spins, where threads sleep and are woken in every operation.
# Beside eight busy processes on two cores, a step is five times as fast as with the runtime's
# default. benchmarks/thread_waiting.py measures this.
SPIN_COUNT = "30000"

# The runtime reads the variable when torch is imported later.
if not any(name in os.environ for name in _OF_THE_USER):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
