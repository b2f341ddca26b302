"""The other hosts of a job, beside the jobs there: planned around, waited for, leased at the start.

What is in front of the instances there takes the leases; nothing here reaches another host itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from poprun_py.console import Console, Log
from poprun_py.errors import StartError
from poprun_py.launching.leasing import limit_of
from poprun_py.machines.lease_messages import leases_text, refusal_text
from poprun_py.machines.leases import OtherJobs
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.job_placement import share_beside_jobs
from poprun_py.planning.topology import Topology

# A look is an ssh connection to every host.
LOOK_SECONDS = 3.0
Machines = tuple[Machine | None, ...]


class _Left(NamedTuple):
    """The machines with what is left of them; the hosts where that is too little."""

    machines: Machines
    placements: tuple[Placement, ...]
    crowded: tuple[int, ...]


def wait_for_hosts(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    placements: tuple[Placement, ...],
    other_jobs: Mapping[str, OtherJobs],
    look: Callable[[], Mapping[str, OtherJobs]],
    console: Console,
    progress: Log | None,
    began: float,
) -> Machines:
    """Return the machines to plan on, of the other hosts only what their jobs leave.

    Args:
        config: how to go on where the job does not fit: wait, share, or neither.
        topology: who is on which host.
        machines: the machine of each host.
        placements: where the instances are if the job is alone.
        other_jobs: the other jobs on the hosts, by name.
        look: asks for them again.
        console: takes what others hold, and what is questionable.
        progress: takes whom the job waits for, and at last an empty line.
        began: when the job began to wait, by the monotonic clock.

    Raises:
        StartError: others hold too much, or the time for waiting is over.
    """
    told = ""
    while True:
        left = _left(config, topology, machines, other_jobs)
        if not left.crowded or config.share_cores:
            break
        name = topology.hosts[left.crowded[0]].name
        waited, limit = time.monotonic() - began, limit_of(config)
        if waited >= limit:
            over = ""
            if config.wait_for_resources is not None:
                over = f"{config.shown('wait_for_resources')}: the time is over; "
            raise StartError(over + refusal_text(name, other_jobs[name]))
        whom = leases_text(other_jobs[name].leases) or "others come first"
        text = f"for CPUs of host {name}: {whom}"
        if progress is not None:
            progress(f"waiting {waited:.0f} s {text}")
        elif text != told:
            console.tell(f"waiting {text}")
        told = text
        time.sleep(min(LOOK_SECONDS, limit - waited))
        other_jobs = look()
    if told and progress is not None:
        progress("")
    _say(topology, other_jobs, left, placements, console)
    return left.machines


def left_by_others(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    other_jobs: Mapping[str, OtherJobs],
) -> Machines:
    """Return the machines to plan on, as ``wait_for_hosts`` does, without waiting.

    Raises:
        StartError: the jobs on some other host leave too little of it.
    """
    left = _left(config, topology, machines, other_jobs)
    if left.crowded and not config.share_cores:
        name = topology.hosts[left.crowded[0]].name
        raise StartError(refusal_text(name, other_jobs[name]))
    return left.machines


def _left(
    config: LaunchConfig,
    topology: Topology,
    machines: Machines,
    other_jobs: Mapping[str, OtherJobs],
) -> _Left:
    placements: tuple[Placement, ...] = ()
    crowded = []
    for index, host in enumerate(topology.hosts):
        found = other_jobs.get(host.name)
        if found is None or machines[index] is None:
            continue
        share = None
        if not found.queue:
            share = share_beside_jobs(config, topology, machines, found.held_cpus, index)
        if share is None:
            crowded.append(index)
        else:
            machines, placements = share.machines, share.placements
    return _Left(machines, placements, tuple(crowded))


def _say(
    topology: Topology,
    other_jobs: Mapping[str, OtherJobs],
    left: _Left,
    placements: tuple[Placement, ...],
    console: Console,
) -> None:
    """Say what others hold: at any verbosity only where it made a difference."""
    count = topology.instances_per_host
    for index, host in enumerate(topology.hosts):
        found = other_jobs.get(host.name)
        if found is None or not found.leases:
            continue
        holders = leases_text(found.leases)
        ours = slice(index * count, (index + 1) * count)
        if index in left.crowded:
            continue  # it is told by the host itself
        if left.placements[ours] != placements[ours]:
            console.tell(f"other jobs hold CPUs of host {host.name}: {holders}")
        else:
            console.log(f"other jobs hold CPUs of host {host.name}: {holders}")
