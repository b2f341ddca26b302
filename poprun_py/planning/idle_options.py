"""Options that were given and do nothing: which, and why. Pure: a plan in, sentences out.

Options of partitions do nothing without a pod. Others do nothing in some jobs; of these only what
was typed for this very job is worth a word, not what a file or a variable says for all jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from poprun_py.options.option_origins import COMMAND_LINE, PYTHON
from poprun_py.planning.launch_plan import LaunchPlan


def _always(_: LaunchPlan) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """Options that do nothing where ``applies``, and the ``reason``, after a colon.

    ``asks_nothing`` are values that ask for nothing: they do what they say. ``of_one_job``: it
    depends on the job.
    """

    names: tuple[str, ...]
    reason: str | Callable[[LaunchPlan], str]
    applies: Callable[[LaunchPlan], bool] = _always
    asks_nothing: tuple[object, ...] = (None, False)
    of_one_job: bool = False


def _has_no_pod(planned: LaunchPlan) -> bool:
    return planned.partition is None


def _stays_here(planned: LaunchPlan) -> bool:
    return not planned.spans_hosts


def _numa_aware_decides(planned: LaunchPlan) -> bool:
    return planned.config.numa_aware is not None


def _is_alone(planned: LaunchPlan) -> bool:
    """Tell whether each host has one instance that may use all of it."""
    is_whole = planned.config.cores_per_instance is None
    return planned.topology.instances_per_host == 1 and is_whole


def _is_unbound(planned: LaunchPlan) -> bool:
    return None not in planned.machines and not any(p.placement.cpus for p in planned.instances)


def _has_no_siblings(planned: LaunchPlan) -> bool:
    return all(
        machine is not None and all(len(core.cpus) == 1 for core in machine.usable_cores)
        for machine in planned.machines
    )


def _is_open_mpi(planned: LaunchPlan) -> bool:
    return "async_mpi_finalize" in planned.command


def _lacks_fast_start(planned: LaunchPlan) -> bool:
    return "ob1" not in planned.command


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
            f"the pod is {planned.partition.where if planned.partition else ''}; --pod server is "
            "the one of these options"
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
        reason="poprun-py leaves keys alone; copy one with ssh-copy-id HOST",
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
        applies=_numa_aware_decides,
        of_one_job=True,
    ),
    _Rule(
        names=("process_placement", "numa_aware"),
        reason="one instance alone on a host may use all of it; see --cores-per-instance",
        applies=_is_alone,
        asks_nothing=(None, False, "disabled", "spreadnuma"),
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
        applies=_lacks_fast_start,
        of_one_job=True,
    ),
    _Rule(
        names=("allow_run_as_root",),
        reason="this MPI lets root start jobs",
        applies=lambda planned: not _is_open_mpi(planned),
        asks_nothing=(True,),
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
        asks_nothing=("no",),
        of_one_job=True,
    ),
)


def idle_option_warnings(planned: LaunchPlan) -> tuple[str, ...]:
    """Return a sentence for each reason why options that were given do nothing."""
    said: dict[str, None] = {}
    sentences = []
    for rule in _RULES:
        names = [name for name in rule.names if name not in said and _is_idle(planned, name, rule)]
        said.update(dict.fromkeys(names))
        if names:
            given = [planned.config.named(name) for name in names]
            reason = rule.reason if isinstance(rule.reason, str) else rule.reason(planned)
            sentences.append(
                f"{', '.join(given)} {'have' if len(given) > 1 else 'has'} no effect: {reason}"
            )
    return tuple(sentences)


def _is_idle(planned: LaunchPlan, name: str, rule: _Rule) -> bool:
    config = planned.config
    if not config.is_given(name) or getattr(config, name) in rule.asks_nothing:
        return False
    is_for_this_job = config.origin(name).source in (COMMAND_LINE, PYTHON)
    return (is_for_this_job or not rule.of_one_job) and rule.applies(planned)
