"""What is questionable about a plan, in sentences. Pure: a plan in, sentences out."""

from __future__ import annotations

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from poprun_py.machines.host_list import compress
from poprun_py.planning.cpu_placement import placement_warnings
from poprun_py.planning.idle_options import idle_option_warnings
from poprun_py.planning.launch_plan import LaunchPlan

_MOST_NAMED = 8


def plan_warnings(planned: LaunchPlan, *, is_launched: bool = False) -> tuple[str, ...]:
    """Return what is questionable about a plan, one sentence each; equal hosts are said once.

    Whether a plan that is launched has its IPUs is decided then, not when it was made.
    """
    warnings: dict[str, None] = {}
    if planned.refusal:
        warnings[f"this can be looked at, not launched: {planned.refusal}"] = None
    partition = planned.partition
    waits = planned.config.wait_for_resources is not None
    if (
        partition is not None
        and partition.is_refused
        and not is_launched
        and not (partition.busy and waits)
    ):
        warnings[f"this can be looked at, not launched: {partition.reason}"] = None
    topology = planned.topology
    if topology.idle_hosts:
        idle = ", ".join(host.name for host in topology.idle_hosts[:_MOST_NAMED])
        more = ", ..." if len(topology.idle_hosts) > _MOST_NAMED else ""
        warnings[
            f"{planned.config.shown('num_instances')} leaves {len(topology.idle_hosts)} of "
            f"{len(topology.hosts) + len(topology.idle_hosts)} hosts idle: {idle}{more}"
        ] = None
    if topology.ipus_per_ild > LINK_DOMAIN_IPUS:
        # fewest_link_domains: only then a domain of more is planned.
        warnings[
            f"{planned.config.shown('num_instances')}: one instance drives "
            f"{topology.ipus_per_ild} IPUs, an IPU-Link domain has {LINK_DOMAIN_IPUS}, so no IPUs "
            f"run this job: they take at least {-(-topology.num_ipus // LINK_DOMAIN_IPUS)} "
            "instances"
        ] = None
    return (*warnings, *_placement_warnings(planned), *idle_option_warnings(planned))


def _placement_warnings(planned: LaunchPlan) -> list[str]:
    """Return what is questionable about placements, with the hosts of which it is said."""
    hosts, share = planned.topology.hosts, planned.topology.instances_per_host
    said_of: dict[str, list[str]] = {}
    for index, machine in enumerate(planned.machines):
        if machine is None:
            continue
        placements = [p.placement for p in planned.instances[index * share : (index + 1) * share]]
        for sentence in placement_warnings(machine, placements, user_threads=planned.user_threads):
            said_of.setdefault(sentence, []).append(hosts[index].name)
    if len(hosts) == 1:
        return list(said_of)
    return [f"{compress(names)}: {sentence}" for sentence, names in said_of.items()]
