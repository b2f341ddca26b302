"""Check that the instances run on the CPUs and memory nodes that their launch plan requires.

The wrapper of each instance reads the actual binding from the kernel (``binding.read_back``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from poprun_py.display.formatting import numbered
from poprun_py.errors import StartError
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.instance_variables import PLANNED_THREADS
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.terminal import Log


def check_binding(
    planned: LaunchPlan, started: Mapping[int, Mapping[str, Any]], log: Log, warn: Log
) -> None:
    """Log the CPU and memory binding of every instance, and warn of differences from the plan.

    ``started`` maps the index of an instance to the report that its wrapper sent after starting the
    program.

    Raises:
        StartError: The binding of an instance differs from the plan, and --strict-binding is given.
    """
    problems = []
    for index, report in sorted(started.items()):
        instance, in_effect = planned.instances[index], report.get("found", {})
        # A thread count that the user set with --env is not compared with the planned count.
        is_users = PLANNED_THREADS in dict(instance.user_env)
        threads = 0 if is_users else int(dict(instance.env).get(PLANNED_THREADS) or 0)
        differences = binding_differences(replace(instance.placement, threads=threads), in_effect)
        log(f"instance {index} has PID {report.get('pid')}: {_binding_sentence(in_effect)}")
        problems += [f"instance {index} {text}" for text in differences]
    if problems and planned.config.strict_binding:
        raise StartError(f"{problems[0]}, which --strict-binding does not allow")
    for problem in problems:
        warn(problem)


def binding_differences(plan: Placement, actual: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference between an instance's planned and actual binding.

    If the process of the instance has ended, no differences are returned. If the plan does not set
    OMP_NUM_THREADS, ``plan.threads`` is 0. ``actual`` is the result of ``binding.read_back``.
    """
    sentences: list[str] = []
    if actual.get("ended"):
        return sentences
    cpus, nodes = sorted(plan.cpus), sorted(plan.memory_nodes)
    if cpus and actual.get("cpus") != cpus:
        sentences.append(
            f"runs on {_named('CPU', actual.get('cpus'))} instead of {_named('CPU', cpus)}"
        )
    policy = actual.get("memory_policy")
    if nodes and (policy != "bind" or actual.get("memory_nodes") != nodes):
        in_effect = actual.get("memory_nodes") or None
        shown = "an unreadable memory policy" if policy is None else f"the memory policy {policy}"
        on = f" on {_named('NUMA node', in_effect)}" if in_effect else ""
        sentences.append(
            f"has {shown}{on} instead of the memory policy bind on {_named('NUMA node', nodes)}"
        )
    threads, actual_threads = plan.threads, actual.get("omp_num_threads")
    # The thread count of a program that is ending cannot be read.
    if threads and actual_threads is not None and actual_threads != threads:
        sentences.append(
            f"runs with OMP_NUM_THREADS {actual_threads or 'not set'} instead of {threads}"
        )
    return sentences


def _binding_sentence(in_effect: Mapping[str, Any]) -> str:
    if in_effect.get("ended"):
        return "the process ended before its binding was read"
    cpus = _named("CPU", in_effect.get("cpus"))
    policy = in_effect.get("memory_policy") or "unknown"
    nodes = in_effect.get("memory_nodes")
    on = f" on {_named('NUMA node', nodes)}" if nodes else ""
    threads = {None: "unknown", 0: "not set"}.get(
        in_effect.get("omp_num_threads"), in_effect.get("omp_num_threads")
    )
    others = "".join(
        f", {name} {value}" for name, value in in_effect.get("other_threads", {}).items()
    )
    return f"{cpus}, memory policy {policy}{on}, OMP_NUM_THREADS {threads}{others}"


def _named(noun: str, numbers: Sequence[int] | None) -> str:
    return numbered(noun, numbers) if numbers else f"unknown {noun}s"
