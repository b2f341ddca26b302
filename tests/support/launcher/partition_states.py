"""Pods of 16 IPUs in which a partition ``p`` is in some state when a job of 4 IPUs starts.

The job has 4 replicas of 1 IPU in 2 instances: 4 IPUs in 2 GCDs with 4 replicas.
"""

from __future__ import annotations

from dataclasses import replace

from popdist_py.pods.folder.pod_folders import make_pod, open_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest

FITTING = PartitionRequest(name="p", size=4, num_gcds=2, num_replicas=4)
# Above what the job needs.
ROOMY = PartitionRequest(name="p", size=8, reconfigurable=True)
STATES = {
    "absent": None,
    "fits, preconfigured": FITTING,
    "fits, reconfigurable": ROOMY,
    "too small": replace(FITTING, size=2, num_replicas=2),
    "other GCDs": replace(FITTING, num_gcds=4),
    "PENDING": FITTING,
    "ERROR": FITTING,
    "in use": FITTING,
    "half in use, reconfigurable": ROOMY,
    "other user's": FITTING,
    "other user's, other GCDs": replace(FITTING, num_gcds=4),
}
PENDING_SECONDS = 0.2
HOLDER = Holder(host="elsewhere", pid=4711, user="holder", program="other.py")


def pod_in_state(root, state, *, create_seconds=0.0):
    """Make the pod ``pod16`` below ``root``; return its store, which may hold IPUs."""
    root.mkdir(mode=0o700, exist_ok=True)
    seconds = PENDING_SECONDS if state == "PENDING" else create_seconds
    pod = replace(system_pod("POD16", "pod16"), create_seconds=seconds)
    make_pod(root, pod)
    store = open_pod(root, "pod16")
    request = STATES[state]
    if request is not None:
        owner = store.with_user("alice") if state.startswith("other user") else store
        owner.create_partition(request)
    if state == "ERROR":
        store.fail_partition("p", "a link is down")
    if "in use" in state:
        store.attach("p", 4, HOLDER)
    return store
