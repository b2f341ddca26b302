"""Warnings about a plan, such as idle hosts, uneven placements and options without effect.

Each warning is a sentence. The functions here only compute values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from poprun_py.machines.host_list import compress
from poprun_py.options.option_origins import COMMAND_LINE, PYTHON
from poprun_py.planning.cpu_placement import placement_warnings
from poprun_py.planning.launch_plan import LaunchPlan

# The warning about idle hosts names at most this many hosts.
_MOST_NAMED = 8


def plan_warnings(planned: LaunchPlan, *, is_launched: bool = False) -> tuple[str, ...]:
    """Return a warning for each problem of a plan. Hosts with the same problem share a warning.

    If ``is_launched`` is True, there is no warning about a refused partition, because the launch
    decides again whether the job gets its IPUs.
    """
    warnings: dict[str, None] = {}
    if planned.refusal:
        warnings[f"this plan can be shown, not launched: {planned.refusal}"] = None
    partition = planned.partition
    waits = planned.config.wait_for_resources is not None
    if (
        partition is not None
        and partition.is_refused
        and not is_launched
        and not (partition.busy and waits)
    ):
        warnings[f"this plan can be shown, not launched: {partition.reason}"] = None
    topology = planned.topology
    if topology.idle_hosts:
        idle = ", ".join(host.name for host in topology.idle_hosts[:_MOST_NAMED])
        more = ", ..." if len(topology.idle_hosts) > _MOST_NAMED else ""
        warnings[
            f"{planned.config.shown('num_instances')} leaves {len(topology.idle_hosts)} of "
            f"{len(topology.hosts) + len(topology.idle_hosts)} hosts idle: {idle}{more}"
        ] = None
    # An IPU-Link domain of the plan has more IPUs than a real domain only if one instance needs
    # more IPUs than a real domain has.
    if topology.ipus_per_ild > LINK_DOMAIN_IPUS:
        warnings[
            f"{planned.config.shown('num_instances')}: one instance drives "
            f"{topology.ipus_per_ild} IPUs, an IPU-Link domain has {LINK_DOMAIN_IPUS}, so real "
            "IPUs cannot run this job: start at least "
            f"{-(-topology.num_ipus // LINK_DOMAIN_IPUS)} instances"
        ] = None
    return (*warnings, *_placement_warnings(planned), *unused_option_warnings(planned))


def _placement_warnings(planned: LaunchPlan) -> list[str]:
    """Return warnings about placements, each with the names of the hosts that it concerns."""
    hosts, count = planned.topology.hosts, planned.topology.instances_per_host
    hosts_of: dict[str, list[str]] = {}
    for index, machine in enumerate(planned.machines):
        if machine is None:
            continue
        placements = [p.placement for p in planned.instances[index * count : (index + 1) * count]]
        for sentence in placement_warnings(machine, placements, user_threads=planned.user_threads):
            hosts_of.setdefault(sentence, []).append(hosts[index].name)
    if len(hosts) == 1:
        return list(hosts_of)
    return [f"{compress(names)}: {sentence}" for sentence, names in hosts_of.items()]


# --- warnings about options without effect ------------------------------------------------------


def _always(_: LaunchPlan) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """A rule about options that have no effect in some plans.

    Attributes:
        names: The options that the rule is about, as field names of ``LaunchConfig``.
        reason: The end of the warning, which explains why the options have no effect.
        applies: A function that tells whether the rule applies to a plan.
        neutral: The values with which an option changes nothing, so that no warning is needed.
        of_one_job: Whether the options are useful in other jobs. If so, the warning is only about
            options that the user gave for this job. Options from a configuration file or an
            environment variable apply to all jobs, so there is no warning about them.
    """

    names: tuple[str, ...]
    reason: str | Callable[[LaunchPlan], str]
    applies: Callable[[LaunchPlan], bool] = _always
    neutral: tuple[object, ...] = (None, False)
    of_one_job: bool = False


def _has_no_pod(planned: LaunchPlan) -> bool:
    return planned.partition is None


def _stays_here(planned: LaunchPlan) -> bool:
    return not planned.spans_hosts


def _has_whole_host(planned: LaunchPlan) -> bool:
    is_whole = planned.config.cores_per_instance is None
    return planned.topology.instances_per_host == 1 and is_whole


def _is_unbound(planned: LaunchPlan) -> bool:
    return None not in planned.machines and not any(p.placement.cpus for p in planned.instances)


def _has_no_siblings(planned: LaunchPlan) -> bool:
    return all(
        machine is not None and all(len(core.cpus) == 1 for core in machine.usable_cores)
        for machine in planned.machines
    )


_ONE_MACHINE = "all instances run on this machine"
_RULES = (
    _Rule(
        names=("vipu_server_host", "vipu_server_port", "vipu_server_timeout"),
        reason="IPUs are emulated, no V-IPU server is asked; instances only get the IPUOF_VIPU_API_"
        " variables",
        applies=_has_no_pod,
    ),
    _Rule(
        names=("vipu_server_host", "vipu_server_port"),
        reason=lambda planned: (
            f"the pod is {planned.partition.where if planned.partition else ''}; use --pod server "
            "for the server that these options name"
        ),
        applies=lambda planned: not _has_no_pod(planned) and planned.config.pod != "server",
        of_one_job=True,
    ),
    _Rule(
        names=("vipu_partition",),
        reason="IPUs are emulated, and only IPUOF_VIPU_API_PARTITION_ID, gc-info and gc-monitor "
        "show the name",
        applies=_has_no_pod,
    ),
    _Rule(
        names=(
            *("vipu_partition_attempts", "vipu_cluster", "vipu_allocation", "sync_type"),
            *("update_partition", "reset_partition", "remove_partition"),
        ),
        reason="IPUs are emulated, and no partition is made or changed",
        applies=_has_no_pod,
    ),
    _Rule(names=("synchronise_poplar_sdk",), reason="IPUs are emulated without a Poplar SDK"),
    _Rule(
        names=("distribute_ssh_key",),
        reason="poprun-py does not change keys; copy one with ssh-copy-id HOST",
    ),
    _Rule(
        names=(
            *("host_subnet", "ssh_args", "ssh_config", "no_check", "sync"),
            *("synchronise_python_venv", "allow_fewer_hosts"),
        ),
        reason=_ONE_MACHINE,
        applies=_stays_here,
        of_one_job=True,
    ),
    _Rule(
        names=("allow_fewer_hosts",),
        reason="a job is started again with --max-restarts only",
        applies=lambda planned: planned.spans_hosts and planned.config.max_restarts == 0,
        of_one_job=True,
    ),
    _Rule(
        names=("process_placement",),
        reason=lambda planned: f"{planned.config.shown('numa_aware')} decides",
        applies=lambda planned: planned.config.numa_aware is not None,
        of_one_job=True,
    ),
    _Rule(
        names=("process_placement", "numa_aware"),
        reason="one instance alone on a host may use all of it; see --cores-per-instance",
        applies=_has_whole_host,
        neutral=(None, False, "disabled", "spreadnuma"),
        of_one_job=True,
    ),
    _Rule(
        names=("strict_binding",),
        reason="no instance is bound",
        applies=_is_unbound,
        of_one_job=True,
    ),
    _Rule(
        names=("smt",),
        reason="no core has more than one hardware thread",
        applies=_has_no_siblings,
        of_one_job=True,
    ),
    _Rule(
        names=("mpi_fast_start",),
        reason="it is for Open MPI, on hosts without a faster network than TCP",
        applies=lambda planned: "ob1" not in planned.command,
        of_one_job=True,
    ),
    _Rule(
        names=("allow_run_as_root",),
        reason="this MPI lets root start jobs",
        applies=lambda planned: "async_mpi_finalize" not in planned.command,
        neutral=(True,),
        of_one_job=True,
    ),
    _Rule(
        names=("timeline_size",),
        reason="there is no --timeline",
        applies=lambda planned: planned.config.timeline is None,
        of_one_job=True,
    ),
    _Rule(
        names=("overwrite_config",),
        reason="there is no --export-config",
        applies=lambda planned: planned.config.export_config is None,
        of_one_job=True,
    ),
    _Rule(
        names=("run",),
        reason="the job runs anyway; it is for --export-plan",
        applies=lambda planned: (
            planned.config.export_plan is None and planned.config.print_topology == "no"
        ),
        of_one_job=True,
    ),
    _Rule(
        names=("print_topology",),
        reason="--export-plan - takes standard output",
        applies=lambda planned: planned.config.export_plan == "-",
        neutral=("no",),
        of_one_job=True,
    ),
)


def unused_option_warnings(planned: LaunchPlan) -> tuple[str, ...]:
    """Return a warning for each group of given options that have no effect in the plan."""
    reported: set[str] = set()
    sentences = []
    for rule in _RULES:
        names = [n for n in rule.names if n not in reported and _is_unused(planned, n, rule)]
        reported.update(names)
        if names:
            given = [planned.config.named(name) for name in names]
            reason = rule.reason if isinstance(rule.reason, str) else rule.reason(planned)
            sentences.append(
                f"{', '.join(given)} {'have' if len(given) > 1 else 'has'} no effect: {reason}"
            )
    return tuple(sentences)


def _is_unused(planned: LaunchPlan, name: str, rule: _Rule) -> bool:
    config = planned.config
    if not config.is_given(name) or getattr(config, name) in rule.neutral:
        return False
    is_for_this_job = config.origin(name).source in (COMMAND_LINE, PYTHON)
    return (is_for_this_job or not rule.of_one_job) and rule.applies(planned)
