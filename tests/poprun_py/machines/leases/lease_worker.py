"""Takes and returns leases at random, and prints each core that another process holds as well.

The arguments are the folder of the leases, a folder with a file ``N`` for each CPU N, the number of
operations, and a seed. The worker locks the file of each CPU that it has leased, so that a core
with two leases is found without trusting the leases.
"""

import contextlib
import fcntl
import os
import random
import sys
from pathlib import Path

from poprun_py.machines.lease_files import LeaseFolder
from poprun_py.machines.leases import OvertakenError, open_table, this_job


def main(place: str, cores: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    folder = LeaseFolder(Path(place))
    files = [os.open(path, os.O_RDWR) for path in sorted(Path(cores).iterdir())]
    me = this_job("worker")
    place = None
    for _ in range(count):
        wanted = chance.randint(1, len(files))
        lease = None
        with contextlib.suppress(OvertakenError), open_table(folder) as table:
            free = sorted(set(range(len(files))) - table.held_cpus)
            if wanted <= len(free) and not table.ahead_of(place):
                cpus = chance.sample(free, wanted)
                lease = table.take(me, cpus, [0])
            elif place is None and chance.random() < 0.5:
                place = table.join_queue(me)
        if lease is None:
            if place is not None and chance.random() < 0.3:
                place.close()
                place = None
            print("busy", flush=True)
            continue
        if place is not None:
            place.close()
            place = None
        for cpu in cpus:
            try:
                fcntl.flock(files[cpu], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("twice", cpu, os.pread(files[cpu], 20, 0).decode(), flush=True)
            os.pwrite(files[cpu], f"{os.getpid():<20}".encode(), 0)
        for cpu in cpus:
            fcntl.flock(files[cpu], fcntl.LOCK_UN)
        lease.close()
        print("had", flush=True)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
