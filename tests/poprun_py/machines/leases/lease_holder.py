"""Holds CPUs, or a place in the queue, until the end of its input; prints the leases as JSON.

The arguments are the folder, ``hold`` (or ``hold-shared``, ``hold-shareable``), ``queue`` or
``look``, the CPUs, and optionally the user id to change to.
"""

import json
import os
import pwd  # noqa: F401 (the user may not be able to read Python's files)
import sys
from pathlib import Path

from poprun_py.machines.lease_files import LeaseFolder
from poprun_py.machines.lease_messages import leases_json
from poprun_py.machines.leases import open_table, this_job
from poprun_py.machines.machine import parse_cpu_list

place, verb, cpus, *user = sys.argv[1:]
if user:
    os.chdir("/")
    os.setgroups([])
    os.setgid(int(user[0]))
    os.setuid(int(user[0]))
folder = LeaseFolder(Path(place))
with open_table(folder) as table:
    seen = {
        **leases_json(table.leases, table.queue),
        "outer": leases_json(table.outer_leases, ())["jobs"],
    }
    seen["ahead"] = len(table.ahead_of(None))
    if verb.startswith("hold"):
        kinds = {"is_shared": verb == "hold-shared", "is_shareable": verb == "hold-shareable"}
        kept = table.take(this_job("holder"), parse_cpu_list(cpus), [0], **kinds)
    elif verb == "queue":
        kept = table.join_queue(this_job("waiter"))
print(json.dumps(seen), flush=True)
if verb != "look":
    sys.stdin.read()
    kept.close()
