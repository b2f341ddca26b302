"""How long OpenMP threads of a program spin while they wait for one another.

By default GNU's OpenMP, which torch's wheels bring, lets a waiting thread look 300,000 times before
it sleeps: some 16 ms on processors where the pause instruction takes 140 cycles. If the machine is
busy, that is time in which the thread that it waits for does not run.

Importing this module is enough. It is imported when Python starts, so it imports nothing that is
not there by then.
"""

import os

# The runtime reads these when torch is imported. A program or user that sets one of them decides.
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# About a millisecond. Alone on a machine a step is as fast as with the runtime's own count, and
# twice as fast as with 100 or 1000, which wake a thread in every operation. Beside eight busy
# processes on two cores it is five times as fast as with the runtime's.
# benchmarks/thread_waiting.py measures this.
SPIN_COUNT = "30000"

# A later import of torch loads the runtime, which reads the variable then.
if not any(name in os.environ for name in _OF_THE_USER):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
