"""What is questionable about a plan, in sentences. Pure: a plan in, sentences out."""

from __future__ import annotations

from poprun_py.planning.cpu_placement import placement_warnings
from poprun_py.planning.launch_plan import LaunchPlan

__all__ = ["plan_warnings"]

_MOST_NAMED = 8


def plan_warnings(planned: LaunchPlan) -> tuple[str, ...]:
    """Return what is questionable about a plan, one sentence each; equal hosts are said once."""
    warnings: dict[str, None] = {}
    if planned.refusal:
        warnings[f"this can be looked at, not launched: {planned.refusal}"] = None
    topology = planned.topology
    if topology.idle_hosts:
        idle = ", ".join(host.name for host in topology.idle_hosts[:_MOST_NAMED])
        more = ", ..." if len(topology.idle_hosts) > _MOST_NAMED else ""
        warnings[
            f"--num-instances {topology.num_instances} leaves {len(topology.idle_hosts)} of "
            f"{len(topology.hosts) + len(topology.idle_hosts)} hosts idle: {idle}{more}"
        ] = None
    share = topology.instances_per_host
    for index, machine in enumerate(planned.machines):
        if machine is None:
            continue
        placements = [p.placement for p in planned.instances[index * share : (index + 1) * share]]
        where = f"{topology.hosts[index].name}: " if len(planned.machines) > 1 else ""
        for sentence in placement_warnings(machine, placements, user_threads=planned.user_threads):
            warnings[where + sentence] = None
    return tuple(warnings)
