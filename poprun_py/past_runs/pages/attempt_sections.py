"""Page sections about the attempts of a run, with failures, instances, placement and environment.

Any value of a report may be missing, because another version of the launcher may have written the
report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from popdist_py.errors import plural
from poprun_py.display.formatting import bytes_text, duration_text, iso_date_text
from poprun_py.display.page import (
    Alert,
    Code,
    Details,
    Links,
    Part,
    Section,
    Sentence,
    Table,
)
from poprun_py.errors import UsageError
from poprun_py.past_runs.recorded_run import RecordedAttempt, RecordedRun
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_file import plan_from_json

# The names that the page shows for quantities of the plan, such as ``num_ilds``.
_NAMES: Final = {
    "num_replicas": "replicas",
    "num_instances": "instances",
    "num_local_replicas": "replicas of an instance",
    "ipus_per_replica": "IPUs of a replica",
    "num_ilds": "IPU-Link domains",
}


def failure_parts(run: RecordedRun, folder: str = "") -> list[Part]:
    """Return page parts that say why a run failed, with tracebacks, stderr and stacks of instances.

    ``folder`` is the address of the run's folder relative to the page; it ends with a slash.
    """
    report = run.report
    last = (_attempts(run) or [{}])[-1]
    is_running = report.get("state") == "running"
    if last.get("cause") is None if is_running else report.get("exit_code") in (0, None):
        return []
    reason = str(last.get("reason") or report.get("reason") or "")
    parts: list[Part] = []
    first = last.get("first_failure")
    if isinstance(first, dict):
        parts += _first_failure(first, reason)
        if links := _outputs(run, folder, last, first.get("index")).links:
            parts.append(Links(links, "Its whole output: "))
    elif reason:
        parts.append(Alert(reason, is_failure=report.get("exit_code") != 0))
    stacks = [each for each in last.get("stacks") or () if isinstance(each, dict)]
    if stacks:
        texts = "\n\n".join(map(_stack_text, stacks))
        parts.append(Details("What the instances were doing", (Code(texts),)))
    return parts


def _first_failure(first: Mapping[str, Any], reason: str) -> list[Part]:
    """Return the cause, the traceback and the stderr of the instance that failed first."""
    traceback = str(first.get("traceback") or "").rstrip()
    error = traceback.rpartition("\n")[2]
    why = first.get("diagnosis") or error or first.get("ended_by") or reason
    where = first.get("host") or "this host"
    alert = f"{first.get('name', 'an instance')} on {where} failed first: {why}"
    parts: list[Part] = [Alert(alert, is_failure=True)]
    if traceback:
        parts.append(Code(traceback))
    stderr = first.get("stderr")
    lines = "\n".join(map(str, stderr)) if isinstance(stderr, list) else ""
    if lines and lines.strip() != traceback.strip():
        shown = Code(lines)
        parts.append(Details("The end of its stderr", (shown,)) if traceback else shown)
    return parts


def _stack_text(stack: Mapping[str, Any]) -> str:
    instances = stack.get("instances") or ()
    waits = f": {stack['waits']}" if stack.get("waits") else ""
    title = f"{plural('instance', len(instances))} {', '.join(map(str, instances))}{waits}"
    return f"{title}\n{stack.get('text', '')}"


def attempts_section(run: RecordedRun, folder: str = "") -> Section:
    """Return a section with a table of the attempts, and tables of their instances."""
    attempts = _attempts(run)
    if not attempts:
        return Section("Attempts", (Sentence("No attempt has begun."),))
    rows = [
        (
            _text(each.get("number")),
            iso_date_text(each.get("began_at")),
            _text(each.get("seconds")),
            str(each.get("cause") or "running").replace("_", " "),
            *(_text(each.get(key)) for key in ("exit_code", "resumed_step", "reason")),
        )
        for each in attempts
    ]
    titles = ("attempt", "began", "seconds", "ended", "exit code", "continued from step", "why")
    good = (None, "completed", "checkpoint")
    failed = frozenset(i for i, each in enumerate(attempts) if each.get("cause") not in good)
    *earlier, last = attempts
    parts: list[Part] = [Table("Attempts", titles, rows, failed), *_instances(run, folder, last)]
    for each in earlier:
        if tables := _instances(run, folder, each):
            parts.append(Details(f"Instances of attempt {_text(each.get('number'))}", tables))
    return Section("Attempts" if len(attempts) > 1 else "Attempt and instances", tuple(parts))


def _outputs(run: RecordedRun, folder: str, attempt: Mapping[str, Any], instance: object) -> Links:
    """Return links to the output files of an instance in an attempt."""
    number = attempt.get("number")
    of_attempt = next((each.outputs for each in run.attempts if each.number == number), {})
    names = of_attempt.get(instance, ()) if isinstance(instance, int) else ()
    return Links([(name.rpartition(".")[2], f"{folder}attempt-{number}/{name}") for name in names])


def _instances(run: RecordedRun, folder: str, attempt: Mapping[str, Any]) -> list[Table]:
    """Return a table of the instances of an attempt; no table if the report has no instances."""
    instances = [each for each in attempt.get("instances") or () if isinstance(each, dict)]
    first = attempt.get("first_failure")
    failed = first.get("index") if isinstance(first, dict) else None
    titles = ("instance", "host", "process", "ended by", "steps", "inference calls", "peak memory")
    keys = ("host", "pid", "ended_by", "training_step", "inference_calls")
    rows: list[tuple[str | Links, ...]] = [
        (
            str(each.get("name") or each.get("index")),
            *(_text(each.get(key)) for key in keys),
            bytes_text(each["max_rss_bytes"]) if each.get("max_rss_bytes") else "-",
            _outputs(run, folder, attempt, each.get("index")),
        )
        for each in instances
    ]
    marked = frozenset(i for i, each in enumerate(instances) if each.get("index") == failed)
    return [Table("Instances", (*titles, "output"), rows, marked)] if rows else []


def environment_section(run: RecordedRun) -> Section:
    """Return a section with the program, its folder, the job's size and installed versions."""
    report = run.report
    plan, launcher, versions = (
        each if isinstance(each := report.get(key), dict) else {}
        for key in ("plan", "launcher", "versions")
    )
    rows = [
        ("program", " ".join(map(str, report.get("program") or ()))),
        ("folder", _text(report.get("folder"))),
        ("launcher", f"{_text(launcher.get('host'))}, process {_text(launcher.get('pid'))}"),
        *((_NAMES.get(name, name), _text(value)) for name, value in plan.items()),
        *((name, _text(value)) for name, value in versions.items()),
        ("files of the run", str(run.files.folder)),
    ]
    parts: list[Part] = [Table("Environment", ("what", "value"), rows)]
    parts += [Sentence(problem) for problem in run.problems]
    return Section("Environment", tuple(parts))


# --- plan of a run, and commands that repeat it -------------------------------------------------


def read_plan(run: RecordedRun) -> tuple[LaunchPlan | None, RecordedAttempt | None]:
    """Return the last recorded plan, without values of --env, and the attempt that recorded it."""
    for attempt in reversed(run.attempts):
        if attempt.plan is None:
            continue
        try:
            bare = [{**each, "user_env": {}} for each in attempt.plan["instances"]]
            return plan_from_json({**attempt.plan, "instances": bare}, {}), attempt
        except (UsageError, KeyError, TypeError):
            return None, attempt
    return None, None


def placement_section(plan: LaunchPlan | None) -> Section:
    """Return a section with pictures of the hosts and their instances, replicas and IPUs."""
    if plan is None:
        return Section("Placement", ())
    from poprun_py.planning.views.plan_pictures import host_pictures, legend
    from poprun_py.planning.views.plan_tree import plan_tree

    tree = plan_tree(plan)
    parts = (Sentence(f"{tree.headline}."), host_pictures(tree), Sentence(legend(tree)))
    return Section("Placement", parts)


def rerun_section(
    run: RecordedRun, plan: LaunchPlan | None, attempt: RecordedAttempt | None
) -> Section:
    """Return a section with commands that run the job of ``plan`` and ``attempt`` again."""
    import shlex

    if attempt is None:
        words = run.report.get("program")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return Section("Run it again", ())
        return Section("Run it again", (Sentence("The program was:"), Code(shlex.join(words))))
    from poprun_py.planning.views.command_text import launch_command

    path = run.files.folder / f"attempt-{attempt.number}" / "plan.json"
    parts: list[Part] = [
        Sentence("The same plan, from any folder:"),
        Code(f"poprun-py --from-plan {shlex.quote(str(path))}"),
    ]
    if plan is not None:
        if any(each.get("user_env") for each in (attempt.plan or {}).get("instances", ())):
            parts.append(Sentence("Values of --env are not shown: set these variables first."))
        parts += [
            Sentence("With options, to change some of them:"),
            Code(launch_command(replace(plan.config, from_plan=None))),
        ]
    return Section("Run it again", tuple(parts))


# --- reading values of a report -----------------------------------------------------------------


def _attempts(run: RecordedRun) -> list[Mapping[str, Any]]:
    return [each for each in run.report.get("attempts") or () if isinstance(each, dict)]


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return duration_text(value) if isinstance(value, float) else str(value)
