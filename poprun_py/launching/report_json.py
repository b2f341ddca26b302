"""The report of a run as JSON, with the plan, all attempts and the reasons of their ends.

This module neither reads nor writes files. failure_report.py writes the report as text for people.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py.display.formatting import iso_time
from poprun_py.launching.failure_report import (
    collateral_of,
    diagnosis,
    stderr_excerpt,
    traceback_of,
)
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.launch_result import (
    Collective,
    InstanceResult,
    LaunchResult,
    Progress,
    describe,
)

REPORT_VERSION = 2
_MOST_OF_REASON: Final = 200
# The keys of an attempt that a brief report keeps. The values of these keys do not grow with the
# number of instances.
_BRIEF: Final = {
    *("number", "folder", "restart_count", "hosts", "began_at", "ended_at"),
    *("exit_code", "cause", "seconds"),
}
_NOT_ENDED: Final = {"ended_at": None, "exit_code": None, "reason": "", "timeline": None}

Label = Callable[[int], str]


def run_report(
    plan: LaunchPlan,
    *,
    run_id: str,
    began_at: str,
    versions: Mapping[str, str],
    attempts: Sequence[Mapping[str, Any]],
    ending: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the report of a run of this launcher process.

    ``ending`` has the time, exit code and reason of the run's end, and the path of the timeline.
    ``ending`` is None for a run in progress.
    """
    topology = plan.topology
    return {
        "version": REPORT_VERSION,
        "run_id": run_id,
        "state": "running" if ending is None else "ended",
        "launcher": {"host": os.uname().nodename, "pid": os.getpid()},
        "began_at": began_at,
        **(_NOT_ENDED if ending is None else ending),
        "folder": plan.folder,
        "program": plan.config.program,
        "command": shlex.join(plan.command),
        "plan": {
            "num_replicas": topology.num_replicas,
            "num_instances": topology.num_instances,
            "num_local_replicas": topology.num_local_replicas,
            "ipus_per_replica": topology.ipus_per_replica,
            "num_ilds": topology.num_ilds,
            "network": plan.network,
        },
        "versions": versions,
        "attempts": attempts,
    }


def brief_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a short report that only tells how the run and its attempts ended."""
    return {
        **report,
        "reason": report["reason"][:_MOST_OF_REASON],
        "versions": {},
        "attempts": [
            {
                **{name: value for name, value in attempt.items() if name in _BRIEF},
                "reason": str(attempt.get("reason", ""))[:_MOST_OF_REASON],
                "instances": [],
            }
            for attempt in report["attempts"]
        ],
    }


def begun_attempt(
    plan: LaunchPlan, number: int, restart_count: int, began: float
) -> dict[str, Any]:
    """Return the report's entry for an attempt that has just begun.

    Attempts are numbered from 1. ``began`` is the start time in seconds since the epoch.
    """
    return {
        "number": number,
        "folder": f"attempt-{number}",
        "restart_count": restart_count,
        "hosts": [host.name for host in plan.topology.hosts],
        "began_at": iso_time(began),
        "ended_at": None,
        "exit_code": None,
        "cause": None,
    }


def ended_attempt(result: LaunchResult, label: Label, ended: float) -> dict[str, Any]:
    """Return the end of an attempt, with the results of all instances."""
    first = result.first_failure
    progress = [r.progress for r in result.instances if r.progress is not None]
    return {
        "ended_at": iso_time(ended),
        "exit_code": result.exit_code,
        "cause": _cause(result),
        "reason": result.explanation,
        "seconds": round(result.seconds, 3),
        "resumed_step": max((p.resumed for p in progress), default=0) or None,
        "first_failure": None if first is None else _instance_json(first, label),
        "collateral": [r.index for r in collateral_of(result)],
        "hung": list(result.hung),
        "stacks": [
            {"instances": list(g.instances), "waits": g.waits, "text": g.text}
            for g in result.stacks
        ],
        "instances": [_instance_json(r, label) for r in result.instances],
        "observation": None if result.view is None else result.view.to_json(),
    }


def refused_attempt(exit_code: int, reason: str, ended: float, cause: str) -> dict[str, Any]:
    """Return the end of an attempt whose programs did not run."""
    return {
        "ended_at": iso_time(ended),
        "exit_code": exit_code,
        "cause": cause,
        "reason": reason,
        "instances": [],
    }


def _cause(result: LaunchResult) -> str:
    """Return one word for the cause of an attempt's end, such as ``completed``."""
    if result.exit_code == 0:
        return "completed"
    if result.exit_code == RESUME_EXIT_CODE:
        return "checkpoint"
    return result.cause.name.lower() if result.cause is not None else "failed"


def _instance_json(instance: InstanceResult, label: Label) -> dict[str, Any]:
    return {
        "index": instance.index,
        "name": label(instance.index),
        "host": instance.host,
        "pid": instance.pid,
        "code": instance.code,
        "exit_code": instance.exit_code,
        "ended_by": None if instance.code is None else describe(instance.code),
        "ended_at": iso_time(instance.ended_ns / 1e9) if instance.ended_ns else None,
        **_progress_json(instance.progress),
        "last_collective": _collective_json(instance.collective),
        "was_stopped": instance.was_stopped,
        "max_rss_bytes": instance.max_rss_bytes,
        "memory_limit_bytes": instance.memory_limit_bytes,
        "oom_kills": instance.oom_kills,
        "diagnosis": diagnosis(instance) if instance.failed else "",
        "traceback": traceback_of(instance.stderr_tail) if instance.failed else "",
        "stderr": stderr_excerpt(instance.stderr_tail) if instance.failed else [],
    }


def _collective_json(last: Collective | None) -> dict[str, Any] | None:
    if last is None:
        return None
    seconds = round(last.seconds, 3) if last.goes_on else None
    return {"number": last.number, "name": last.name, "lasting_seconds": seconds}


def _progress_json(progress: Progress | None) -> dict[str, Any]:
    if progress is None:
        return {"training_step": None, "inference_calls": None, "resumed_step": None}
    return {
        "training_step": progress.step,
        "inference_calls": progress.calls,
        "resumed_step": progress.resumed or None,
    }
