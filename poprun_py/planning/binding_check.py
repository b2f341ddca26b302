"""Check that the instances run on the CPUs and memory nodes of the plan.

The wrapper of each instance reads the actual binding from the kernel (``binding.read_back``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poprun_py.display.formatting import numbered, ranges_text
from poprun_py.errors import StartError
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan

Log = Callable[[str], None]


def check_binding(
    planned: LaunchPlan, started: Mapping[int, Mapping[str, Any]], log: Log, warn: Log
) -> None:
    """Log the binding of every instance, and warn of each difference from the plan.

    ``started`` maps the index of an instance to the report that its wrapper sent after starting the
    program.

    Raises:
        StartError: A binding differs from the plan, and --strict-binding is given.
    """
    problems = []
    for index, report in sorted(started.items()):
        in_effect = report.get("found", {})
        differences = binding_differences(_planned_binding(planned.instances[index]), in_effect)
        log(f"instance {index} has PID {report.get('pid')}: {_binding_sentence(in_effect)}")
        problems += [f"instance {index} {text}" for text in differences]
    if problems and planned.config.strict_binding:
        raise StartError(f"{problems[0]} (--strict-binding)")
    for problem in problems:
        warn(problem)


def _planned_binding(instance: InstancePlan) -> dict[str, Any]:
    """Return the planned binding. A thread count that the user set with --env is left out."""
    threads = dict(instance.env).get("OMP_NUM_THREADS")
    is_users = "OMP_NUM_THREADS" in dict(instance.user_env)
    return {
        "cpus": instance.placement.cpus,
        "memory_nodes": instance.placement.memory_nodes,
        "threads": int(threads) if threads and not is_users else 0,
    }


def binding_differences(plan: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each difference between a planned and an actual binding.

    No sentences are returned if the process has ended.

    Args:
        plan: The planned ``cpus`` and ``memory_nodes``; empty if the plan does not restrict them.
            ``threads`` is the planned OMP_NUM_THREADS; 0 or None if the plan does not set it.
        actual: The actual binding, as returned by ``binding.read_back``.
    """
    sentences: list[str] = []
    if actual.get("ended"):
        return sentences
    cpus = sorted(plan.get("cpus") or ())
    if cpus and actual.get("cpus") != cpus:
        sentences.append(
            f"runs on {_named('CPU', actual.get('cpus'))} instead of {ranges_text(cpus)}"
        )
    nodes = sorted(plan.get("memory_nodes") or ())
    policy = actual.get("memory_policy")
    if nodes and (policy != "bind" or actual.get("memory_nodes") != nodes):
        in_effect = actual.get("memory_nodes") or None
        shown = "cannot be read" if policy is None else f"is {policy}"
        on = f" on {_named('node', in_effect)}" if in_effect else ""
        sentences.append(f"memory policy {shown}{on} instead of bind on {_named('node', nodes)}")
    threads, actual_threads = plan.get("threads"), actual.get("omp_num_threads")
    # A thread count that could not be read, because the program is ending, is not a difference.
    if threads and actual_threads is not None and actual_threads != threads:
        sentences.append(f"OMP_NUM_THREADS is {actual_threads or 'not set'} instead of {threads}")
    return sentences


def _binding_sentence(in_effect: Mapping[str, Any]) -> str:
    if in_effect.get("ended"):
        return "ended before its binding was read"
    cpus = _named("CPU", in_effect.get("cpus"))
    policy = in_effect.get("memory_policy") or "unknown"
    nodes = in_effect.get("memory_nodes")
    on = f" on {_named('node', nodes)}" if nodes else ""
    threads = {None: "unknown", 0: "not set"}.get(
        in_effect.get("omp_num_threads"), in_effect.get("omp_num_threads")
    )
    others = "".join(
        f", {name} {value}" for name, value in in_effect.get("other_threads", {}).items()
    )
    return f"{cpus}, memory policy {policy}{on}, OMP_NUM_THREADS {threads}{others}"


def _named(noun: str, numbers: Sequence[int] | None) -> str:
    return numbered(noun, numbers) if numbers else f"{noun}s unknown"
