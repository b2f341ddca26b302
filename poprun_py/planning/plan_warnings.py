"""Warnings about a launch plan: idle hosts, uneven placements and options without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import counted, plural
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_origins import COMMAND_LINE, PYTHON
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.instance_variables import PLANNED_THREADS
from poprun_py.planning.launch_plan import LaunchPlan

# The maximum number of hosts that the warning about idle hosts names.
_MOST_NAMED = 8
# Threads are uneven if the instance with the most threads has over 1.5 times as many threads, and
# at least two threads more, than the instance with the fewest threads.
_UNEVEN = 1.5


def plan_warnings(planned: LaunchPlan, *, is_launched: bool = False) -> tuple[str, ...]:
    """Return the warnings about a plan, with one warning for all hosts with the same problem.

    If ``is_launched`` is True, there is no warning about a refused IPU partition, because the
    launch of the plan decides again whether the job gets IPUs.
    """
    config, topology, partition = planned.config, planned.topology, planned.partition
    warnings = []
    if planned.refusal:
        warnings.append(f"this plan can be shown but not launched: {planned.refusal}")
    if partition is not None and partition.is_refused and not is_launched:
        may_wait = partition.busy and config.wait_for_resources is not None
        if not may_wait:
            warnings.append(f"this plan can be shown but not launched: {partition.reason}")
    if topology.idle_hosts:
        idle = ", ".join(host.name for host in topology.idle_hosts[:_MOST_NAMED])
        more = ", ..." if len(topology.idle_hosts) > _MOST_NAMED else ""
        warnings.append(
            f"{config.shown('num_instances')} leaves {len(topology.idle_hosts)} of "
            f"{len(topology.hosts) + len(topology.idle_hosts)} hosts idle: {idle}{more}"
        )
    # An IPU-Link domain of a plan has more than 64 IPUs only if one instance has more than 64
    # IPUs.
    if topology.ipus_per_ild > LINK_DOMAIN_IPUS:
        warnings.append(
            f"{config.shown('num_instances')}: one instance has {topology.ipus_per_ild} IPUs, but "
            f"an IPU-Link domain has only {LINK_DOMAIN_IPUS} IPUs, so this job cannot run on real "
            f"IPUs; start at least {-(-topology.num_ipus // LINK_DOMAIN_IPUS)} instances"
        )
    return (*warnings, *_of_all_hosts(planned), *unused_option_warnings(planned))


# --- warnings about placements ------------------------------------------------------------------


def _of_all_hosts(planned: LaunchPlan) -> list[str]:
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


def placement_warnings(
    machine: Machine,
    placements: Sequence[Placement],
    *,
    user_threads: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return warnings about the placements of the instances of one host.

    ``user_threads`` contains the thread counts that the user set in variables such as
    MKL_NUM_THREADS. If the user set OMP_NUM_THREADS, the value of OMP_NUM_THREADS replaces the
    planned thread count of every instance.
    """
    cpus = sum(len(core.cpus) for core in machine.usable_cores)
    by_variable = [{PLANNED_THREADS: placement.threads, **user_threads} for placement in placements]
    threads = [max(counts.values()) for counts in by_variable] or [0]
    warnings = []
    if len(placements) > cpus:
        warnings.append(
            f"{len(placements)} instances share {counted(cpus, 'CPU')}, so at most "
            f"{counted(cpus, 'instance')} {plural('run', 2 if cpus == 1 else 1)} at the same time"
        )
    if sum(threads) > cpus and max(threads) > 1:
        warnings.append(
            f"the instances have {sum(threads)} compute threads on {counted(cpus, 'CPU')}; set "
            f"{max(by_variable[0], key=lambda name: by_variable[0][name])} to at most "
            f"{max(1, cpus // len(placements))}"
        )
    elif machine.quota_cpus is not None and sum(threads) > machine.quota_cpus:
        warnings.append(
            f"the instances have {sum(threads)} compute threads, but the CPU quota is "
            f"{counted(machine.cpu_quota or 0, 'CPU', 'g')}, so the kernel stops the threads again "
            "and again; start fewer instances, or raise the quota"
        )
    if max(threads) > max(_UNEVEN * min(threads), min(threads) + 1):
        warnings.append(
            f"the instances have from {min(threads)} to {max(threads)} compute threads, so fast "
            "instances wait for the slowest; --process-placement spreadcores divides the cores "
            "evenly"
        )
    return tuple(warnings)


# --- warnings about options without effect ------------------------------------------------------


class _Unused(NamedTuple):
    """A group of options that have no effect in a plan for the same reason.

    Attributes:
        names: The field names of the options in ``LaunchConfig``.
        reason: The end of the warning, which explains why the options have no effect.
        neutral: The values of the options for which no warning is needed.
        of_one_job: Whether an option causes a warning only if the user gave it for this job, but
            not if a configuration file or an environment variable sets it for all jobs.
    """

    names: tuple[str, ...]
    reason: str
    neutral: tuple[object, ...] = (None, False)
    of_one_job: bool = True


def _unused_for_ipus(planned: LaunchPlan) -> Iterator[_Unused]:
    if planned.partition is None:
        yield _Unused(
            ("vipu_server_host", "vipu_server_port", "vipu_server_timeout"),
            "the IPUs are emulated without a V-IPU server, and these values only go into the "
            "variables IPUOF_VIPU_API_* of the instances",
            of_one_job=False,
        )
        yield _Unused(
            ("vipu_partition",),
            "the IPUs are emulated without a partition, and only IPUOF_VIPU_API_PARTITION_ID, "
            "gc-info and gc-monitor show the name",
            of_one_job=False,
        )
        yield _Unused(
            (
                *("vipu_partition_attempts", "vipu_cluster", "vipu_allocation", "sync_type"),
                *("update_partition", "reset_partition", "remove_partition"),
            ),
            "the IPUs are emulated, and no partition is made or changed",
            of_one_job=False,
        )
    elif planned.config.pod != "server":
        yield _Unused(
            ("vipu_server_host", "vipu_server_port"),
            f"the job uses the pod {planned.partition.where}; to use the server that these "
            "options name, add --pod server",
        )
    yield _Unused(
        ("synchronise_poplar_sdk",), "the IPUs are emulated without a Poplar SDK", of_one_job=False
    )
    yield _Unused(
        ("distribute_ssh_key",),
        "poprun-py does not copy ssh keys; copy a key with ssh-copy-id HOST",
        of_one_job=False,
    )


def _unused_on_hosts(planned: LaunchPlan) -> Iterator[_Unused]:
    config = planned.config
    if not planned.spans_hosts:
        yield _Unused(
            (
                *("host_subnet", "ssh_args", "ssh_config", "no_check", "sync"),
                *("synchronise_python_venv", "allow_fewer_hosts", "wait_for_hosts"),
            ),
            "all instances run on this machine",
        )
    elif config.max_restarts == 0:
        restarting = ("allow_fewer_hosts", "wait_for_hosts")
        yield _Unused(restarting, "a job is only restarted if --max-restarts is given")
    if config.numa_aware is not None:
        yield _Unused(("process_placement",), f"{config.shown('numa_aware')} takes precedence")
    if planned.topology.instances_per_host == 1 and config.cores_per_instance is None:
        yield _Unused(
            ("process_placement", "numa_aware"),
            "a single instance on a host may use all cores of the host; --cores-per-instance "
            "limits the cores",
            neutral=(None, False, "disabled", "spreadnuma"),
        )
    if None not in planned.machines and not any(p.placement.cpus for p in planned.instances):
        yield _Unused(("strict_binding",), "no instance is bound to CPUs")
    if config.is_given("smt") and all(
        machine is not None and all(len(core.cpus) == 1 for core in machine.usable_cores)
        for machine in planned.machines
    ):
        yield _Unused(("smt",), "no core has more than one hardware thread")


def _unused_by_mpi_and_views(planned: LaunchPlan) -> Iterator[_Unused]:
    config = planned.config
    if "ob1" not in planned.command:
        yield _Unused(
            ("mpi_fast_start",),
            "this option only affects Open MPI on hosts without a faster network than TCP",
        )
    if "async_mpi_finalize" not in planned.command:
        yield _Unused(
            ("allow_run_as_root",), "this MPI always allows root to start jobs", neutral=(True,)
        )
    if config.timeline is None:
        yield _Unused(("timeline_size",), "--timeline is not given")
    # A job that Python code starts keeps its output in files even without --output-dir.
    if config.output_dir is None and config.origin("log_limit").source == COMMAND_LINE:
        yield _Unused(("log_limit",), "--output-dir is not given")
    if config.export_config is None and config.export_plan is None:
        yield _Unused(("overwrite_config",), "neither --export-config nor --export-plan is given")
    is_needless = config.export_config != "-" and config.export_plan is None
    if is_needless and config.print_topology == "no":
        yield _Unused(
            ("run",), "the job runs without this option, too; the option is meant for --export-plan"
        )
    if config.export_plan == "-":
        yield _Unused(
            ("print_topology",),
            "--export-plan - prints the plan to standard output",
            neutral=("no",),
        )


def unused_option_warnings(planned: LaunchPlan) -> tuple[str, ...]:
    """Return warnings about the options that the user gave and that have no effect in the plan."""
    config = planned.config
    reported: set[str] = set()
    sentences = []
    for find in (_unused_for_ipus, _unused_on_hosts, _unused_by_mpi_and_views):
        for unused in find(planned):
            names = [name for name in unused.names if name not in reported]
            names = [name for name in names if _is_noticed(config, name, unused)]
            reported.update(names)
            if names:
                given = ", ".join(config.named(name) for name in names)
                verb = "have" if len(names) > 1 else "has"
                sentences.append(f"{given} {verb} no effect: {unused.reason}")
    return tuple(sentences)


def _is_noticed(config: LaunchConfig, name: str, unused: _Unused) -> bool:
    if not config.is_given(name) or getattr(config, name) in unused.neutral:
        return False
    is_for_this_job = config.origin(name).source in (COMMAND_LINE, PYTHON)
    return is_for_this_job or not unused.of_one_job
