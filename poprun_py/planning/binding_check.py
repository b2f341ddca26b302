"""What the kernel says of the instances' bindings, compared with the plan, in sentences.

Pure: reports in, sentences out. The reports come from the wrappers (``binding.read_back``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from poprun_py.errors import StartError
from poprun_py.instance import binding
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan

__all__ = ["binding_sentence", "check_binding"]

Say = Callable[[str], None]


def check_binding(
    planned: LaunchPlan, started: Mapping[int, Mapping[str, Any]], tell: Say, warn: Say
) -> None:
    """Tell what every instance runs on, and warn where it is not what was planned.

    Args:
        planned: the launch.
        started: what each instance's wrapper reported after starting its program, by index.
        tell: takes one line for each instance.
        warn: takes one line for each difference.

    Raises:
        StartError: there is a difference and --strict-binding was given.
    """
    problems = []
    for index, report in sorted(started.items()):
        found = report.get("found", {})
        differences = binding.differences(_asked(planned.instances[index]), found)
        tell(f"instance {index} has PID {report.get('pid')}: {binding_sentence(found)}")
        problems += [f"instance {index} {text}" for text in differences]
    if problems and planned.config.strict_binding:
        raise StartError(f"{problems[0]} (--strict-binding)")
    for problem in problems:
        warn(problem)


def _asked(instance: InstancePlan) -> dict[str, Any]:
    """Return what the plan asked for, leaving out what the user set differently."""
    threads = dict(instance.env).get("OMP_NUM_THREADS")
    own = "OMP_NUM_THREADS" in dict(instance.user_env)
    return {
        "cpus": instance.placement.cpus,
        "memory_nodes": instance.placement.memory_nodes,
        "threads": int(threads) if threads and not own else 0,
    }


def binding_sentence(found: Mapping[str, Any]) -> str:
    """Describe what ``binding.read_back`` found."""
    if found.get("ended"):
        return "ended before its binding was read"
    cpus = binding.format_list(found["cpus"]) if found.get("cpus") else "unknown"
    policy = found.get("memory_policy") or "unknown"
    nodes = found.get("memory_nodes")
    on = f" on nodes {binding.format_list(nodes)}" if nodes else ""
    threads = {None: "unknown", 0: "not set"}.get(
        found.get("omp_num_threads"), found.get("omp_num_threads")
    )
    return f"CPUs {cpus}, memory policy {policy}{on}, OMP_NUM_THREADS {threads}"
