"""What the kernel says of the instances' bindings, compared with the plan, in sentences.

Pure: reports in, sentences out. The reports come from the wrappers (``binding.read_back``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from poprun_py.errors import StartError
from poprun_py.instance import binding
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan

Log = Callable[[str], None]


def check_binding(
    planned: LaunchPlan, started: Mapping[int, Mapping[str, Any]], log: Log, warn: Log
) -> None:
    """Log what every instance runs on, and warn where it is not what was planned.

    Args:
        planned: the launch.
        started: what each instance's wrapper reported after starting its program, by index.
        log: takes one line for each instance.
        warn: takes one line for each difference.

    Raises:
        StartError: there is a difference and --strict-binding was given.
    """
    problems = []
    for index, report in sorted(started.items()):
        in_effect = report.get("found", {})
        differences = binding.differences(_planned_binding(planned.instances[index]), in_effect)
        log(f"instance {index} has PID {report.get('pid')}: {binding_sentence(in_effect)}")
        problems += [f"instance {index} {text}" for text in differences]
    if problems and planned.config.strict_binding:
        raise StartError(f"{problems[0]} (--strict-binding)")
    for problem in problems:
        warn(problem)


def _planned_binding(instance: InstancePlan) -> dict[str, Any]:
    """Return the binding of the plan, leaving out what the user set differently."""
    threads = dict(instance.env).get("OMP_NUM_THREADS")
    own = "OMP_NUM_THREADS" in dict(instance.user_env)
    return {
        "cpus": instance.placement.cpus,
        "memory_nodes": instance.placement.memory_nodes,
        "threads": int(threads) if threads and not own else 0,
    }


def binding_sentence(in_effect: Mapping[str, Any]) -> str:
    """Describe what ``binding.read_back`` found."""
    if in_effect.get("ended"):
        return "ended before its binding was read"
    cpus = binding.named("CPU", in_effect.get("cpus"))
    policy = in_effect.get("memory_policy") or "unknown"
    nodes = in_effect.get("memory_nodes")
    on = f" on {binding.named('node', nodes)}" if nodes else ""
    threads = {None: "unknown", 0: "not set"}.get(
        in_effect.get("omp_num_threads"), in_effect.get("omp_num_threads")
    )
    others = "".join(
        f", {name} {value}" for name, value in in_effect.get("other_threads", {}).items()
    )
    return f"{cpus}, memory policy {policy}{on}, OMP_NUM_THREADS {threads}{others}"
