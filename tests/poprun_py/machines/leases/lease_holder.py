"""Holds CPUs, or a place in the queue, until its input ends.

Words: the folder, ``hold`` or ``queue`` or ``look``, the CPUs, and the user whose process it shall
be; Python itself may be out of that user's reach. Prints what it sees: JSON.
"""

import json
import os
import pwd  # noqa: F401 (what is imported later must be read as the user)
import sys
from pathlib import Path

from poprun_py.machines.lease_book import opened, this_process
from poprun_py.machines.lease_texts import document
from poprun_py.machines.locked_files import LockedFolder
from poprun_py.machines.sysfs import parse_cpu_list

place, verb, cpus, *user = sys.argv[1:]
if user:
    os.chdir("/")
    os.setgroups([])
    os.setgid(int(user[0]))
    os.setuid(int(user[0]))
folder = LockedFolder(Path(place))
with opened(folder) as book:
    seen = {**document(book.holdings, book.waiters), "outer": document(book.outer, ())["jobs"]}
    seen["ahead"] = len(book.ahead_of(None))
    if verb == "hold":
        kept = book.take(this_process("holder"), parse_cpu_list(cpus), [0])
    elif verb == "queue":
        kept = book.queue(this_process("waiter"))
print(json.dumps(seen), flush=True)
if verb != "look":
    sys.stdin.read()
    kept.close()
