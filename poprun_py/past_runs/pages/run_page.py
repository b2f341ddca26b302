"""The HTML page that shows one run, and its file ``report.html``.

Any value of a report may be missing, because another version of the launcher may have written the
report. The modules that draw charts are imported only if a run has measured values.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.errors import counted, plural
from popdist_py.html_pages.page import (
    Alert,
    Badge,
    Code,
    Details,
    Fact,
    Facts,
    Links,
    Part,
    Section,
    Sentence,
    Table,
    load_templates,
    page,
)
from poprun_py.display.formatting import bytes_text, duration_text, iso_date_text, iso_time
from poprun_py.errors import UsageError
from poprun_py.options.run_labels import label_lines
from poprun_py.past_runs.doubts import doubts_of_runs
from poprun_py.past_runs.recorded_run import (
    RecordedAttempt,
    RecordedRun,
    read_run,
    refusing_damage,
    seconds_since_epoch,
)
from poprun_py.past_runs.run_conditions import conditions_of
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_file import plan_from_json
from poprun_py.planning.user_program import short_name
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import RESTART_PARTS

if TYPE_CHECKING:
    from poprun_py.past_runs.pages.timeline_excerpt import Excerpt

# The exit code of a job that wrote a checkpoint because it was asked to stop.
_CHECKPOINT: Final = 75

_WITHOUT_STEPS: Final = (
    "No training steps were recorded. Calls of PopTorch models and steps of torch's optimizers are "
    "recorded, and other programs can call popdist_py.heartbeat.step()."
)
# The names that the page shows for quantities of the plan, such as ``num_ilds``.
_NAMES: Final = {
    "num_replicas": "replicas",
    "num_instances": "instances",
    "num_local_replicas": "replicas of an instance",
    "ipus_per_replica": "IPUs of a replica",
    "num_ilds": "IPU-Link domains",
}


def prepare_page() -> None:
    """Import the modules and compile the templates of every page of a run.

    ``write_page`` does the same. A launcher calls this function earlier, while it has to wait.
    """
    from poprun_py.planning.views import command_text, plan_pictures, plan_tree  # noqa: F401

    load_templates()


def write_page(files: RunFiles, path: Path | None = None) -> Path:
    """Write the HTML page of a run to ``path``, by default its ``report.html``; return the path.

    Only the user who writes the page can read its file. An existing file is replaced atomically.

    Raises:
        UsageError: The report of the run cannot be read.
        OSError: The HTML page cannot be written.
    """
    path = files.page if path is None else path
    write_whole(path, page_text(files, path.parent) + "\n")
    return path


def page_text(files: RunFiles, page_folder: Path | None = None) -> str:
    """Read a run, which may not have ended yet, and return its HTML page.

    Links on the page are relative to ``page_folder``, by default the folder of the run.

    Raises:
        UsageError: The report of the run cannot be read, or has missing or impossible values.
    """
    run = read_run(files)
    excerpt = None
    if files.timeline.is_file():
        from poprun_py.past_runs.pages.timeline_excerpt import read_excerpt

        excerpt = read_excerpt(files.timeline)
    address = ""
    if page_folder is not None and page_folder.resolve() != files.folder.resolve():
        from urllib.parse import quote

        relative = os.path.relpath(files.folder.resolve(), page_folder.resolve())
        address = f"{quote(os.fsencode(relative))}/"
    with refusing_damage(files):
        return run_page(run, iso_time(time.time()), excerpt, address)


def run_page(
    run: RecordedRun, made_at: str, excerpt: Excerpt | None = None, folder: str = ""
) -> str:
    """Return the HTML page of a run, which may not have ended yet.

    Args:
        run: The run.
        made_at: The time at which the page is made, in ISO format.
        excerpt: A few steps of the run's timeline; None without a timeline.
        folder: The relative link from the page to the run's folder, with a slash at the end; empty
            if the page is in this folder.
    """
    views = (attempt.last_view() for attempt in reversed(run.attempts))
    view = next((each for each in views if each is not None), None)
    facts, sections = _measured(run, view)
    if any(attempt.devices for attempt in run.attempts):
        from poprun_py.past_runs.pages.resource_sections import device_section

        sections.append(device_section(run))
    plan, planned = _read_plan(run)
    sections.append(_placement_section(plan))
    if excerpt is not None:
        from poprun_py.past_runs.pages.timeline_excerpt import timeline_section

        sections.append(timeline_section(excerpt, run.files.timeline))
    sections += [
        _attempts_section(run, folder),
        _rerun_section(run, plan, planned),
        _environment_section(run),
    ]
    if view is not None and view.program:
        program = view.program
    else:
        program = short_name(tuple(map(str, run.report.get("program") or ("program",))))
    return page(
        f"{program}: {run.run_id}",
        sections,
        lead=_lead(run, made_at),
        badge=_badge(run),
        opening=[*_opening(run, view, folder), Facts([*facts, *_size(run)])],
        footer=f"Made {iso_date_text(made_at)} from {run.files.folder}",
    )


def _measured(run: RecordedRun, view: JobView | None) -> tuple[list[Fact], list[Section]]:
    """Return the facts at the top of the page and the page sections with measured values."""
    is_observed = view is not None and any(s.num_steps or any(s.seconds) for s in view.instances)
    if not is_observed and not any(
        a.steps or a.values or len(a.observations) > 1 for a in run.attempts
    ):
        return [], [Section("Training", (Sentence(_why_no_steps(run)),))]
    from poprun_py.past_runs.pages import phase_sections, resource_sections, training_sections

    began, since = phase_sections.training_began_at(run), training_sections.TRAINING_BEGAN
    if began is None:
        began, since = run.began_at or 0.0, "the run began"
    times = training_sections.step_times(run)
    training = training_sections.training_section(run, began)
    if not times:
        training = Section(training.title, (*training.parts, Sentence(_why_no_steps(run))))
    facts = training_sections.training_facts(run, times, view)
    return [*facts, *phase_sections.training_fact(run, view)], [
        training,
        training_sections.step_time_section(times),
        resource_sections.activity_section(view, phase_sections.phase_chart(run, view)),
        resource_sections.resource_section(run, began, since),
    ]


def _why_no_steps(run: RecordedRun) -> str:
    """Return a sentence that says why a run has no training steps."""
    reason = run.attempts[-1].report.get("no_steps") if run.attempts else None
    if not isinstance(reason, str):
        return _WITHOUT_STEPS
    return f"No training steps were recorded: {reason}."


def _badge(run: RecordedRun) -> Badge:
    if run.is_running:
        return Badge("Running", "going")
    code: Any = run.report.get("exit_code")
    if code == 0:
        return Badge("Completed", "good")
    if code == _CHECKPOINT:
        return Badge("Stopped at a checkpoint", "half")
    cause = run.attempts[-1].report.get("cause") if run.attempts else None
    words = str(cause or "failed").replace("_", " ")
    return Badge(words[0].upper() + words[1:], "bad")


def _lead(run: RecordedRun, made_at: str) -> str:
    report, is_running, began = run.report, run.is_running, run.began_at
    ended = seconds_since_epoch(made_at if is_running else report.get("ended_at"))
    words = []
    if not is_running and report.get("exit_code") not in (0, _CHECKPOINT):
        words.append(f"with exit code {report.get('exit_code')}")
    if began is not None and ended is not None:
        took = duration_text(max(0.0, ended - began))
        words.append(f"{'for' if is_running else 'after'} {took}")
    return f"{' '.join(words)}; began {iso_date_text(report.get('began_at'))}."


def _opening(run: RecordedRun, view: JobView | None, folder: str) -> list[Part]:
    parts: list[Part] = [*map(Sentence, label_lines(run.report)), *_failure_parts(run, folder)]
    if view is not None and view.worst is not None and view.worst.is_slow:
        parts.append(Alert(f"{view.worst.sentence[0].upper()}{view.worst.sentence[1:]}."))
    # Conditions such as other load change times, so they are shown before the times.
    for doubt in doubts_of_runs([conditions_of(run.attempts[-1])]) if run.attempts else ():
        reason = doubt.to_json()["reason"]
        parts.append(Alert(f"{reason[0].upper()}{reason[1:]}."))
    if run.is_running:
        parts.append(
            Alert(
                "The run has not ended, or its launcher was killed. "
                "The page shows what is known so far."
            )
        )
    return parts


def _size(run: RecordedRun) -> list[Fact]:
    plan: Mapping[str, Any] = run.report["plan"]
    hosts = run.attempts[-1].report.get("hosts") if run.attempts else None
    where = ""
    if isinstance(hosts, list) and hosts:
        where = f"on {', '.join(map(str, hosts[:3]))}{', ...' if len(hosts) > 3 else ''}"
    facts = [Fact("instances", str(plan["num_instances"]), where)]
    replicas, per_replica = plan.get("num_replicas"), plan.get("ipus_per_replica")
    if isinstance(replicas, int) and isinstance(per_replica, int):
        each = f"{counted(per_replica, 'IPU')} each"
        facts.append(Fact("replicas", str(replicas), f"{each}, {replicas * per_replica} in total"))
    restarts = len(run.attempts) - 1
    if restarts > 0:
        facts.append(Fact("attempts", str(restarts + 1), f"{restarts} after a failure or stop"))
    return facts


# --- sections about the attempts -----------------------------------------------------------------


def _failure_parts(run: RecordedRun, folder: str = "") -> list[Part]:
    report = run.report
    last = (_reports(run) or [{}])[-1]
    if last.get("cause") is None if run.is_running else report.get("exit_code") in (0, None):
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


def _attempts_section(run: RecordedRun, folder: str = "") -> Section:
    attempts = _reports(run)
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
    good = (None, "completed", "checkpoint", "hosts")
    failed = frozenset(i for i, each in enumerate(attempts) if each.get("cause") not in good)
    *earlier, last = attempts
    parts: list[Part] = [Table("Attempts", titles, rows, failed)]
    parts += [*_host_changes(attempts), *_restarts(attempts), *_instances(run, folder, last)]
    for each in earlier:
        if tables := _instances(run, folder, each):
            parts.append(Details(f"Instances of attempt {_text(each.get('number'))}", tables))
    return Section("Attempts" if len(attempts) > 1 else "Attempt and instances", tuple(parts))


def _host_changes(attempts: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return a table with each change of the hosts, and what the change cost."""
    rows, is_deterministic = [], True
    for each in attempts:
        change, cost = each.get("host_change"), each.get("restart")
        if not isinstance(change, dict):
            continue
        known: Mapping[str, Any] = cost if isinstance(cost, dict) else {}
        instances = [_text(change.get(key)) for key in ("num_instances_before", "num_instances")]
        rows.append(
            (
                _text(each.get("number")),
                iso_date_text(each.get("began_at")),
                *(", ".join(map(str, change.get(key) or ())) or "-" for key in ("lost", "joined")),
                " to ".join(instances),
                *(_text(known.get(key)) for key in ("seconds", "num_repeated_steps")),
            )
        )
        is_deterministic = is_deterministic and change.get("is_deterministic") is True
    if not rows:
        return []
    titles = ("attempt", "began", "lost", "joined", "instances", "seconds", "steps computed again")
    reason = "The number of replicas stayed the same, so the results have the same bits"
    bits = (
        ""
        if is_deterministic
        else " with deterministic reduction, and agree up to rounding without it"
    )
    return [Table("Changes of hosts", titles, rows), Sentence(f"{reason}{bits}.")]


def _restarts(attempts: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return a table with the duration of each restart until the next training step."""
    costs = {
        _text(each.get("number")): each["restart"]
        for each in attempts
        if isinstance(each.get("restart"), dict)
    }
    if not costs:
        return []
    keys = ("seconds", *RESTART_PARTS, "num_repeated_steps")
    rows = [(number, *(_text(cost.get(key)) for key in keys)) for number, cost in costs.items()]
    titles = ("attempt", "all", *RESTART_PARTS.values(), "steps computed again")
    text = (
        "The table shows the duration of each restart, from the failure to the end of the next "
        "training step:"
    )
    return [Sentence(text), Table("Restarts", titles, rows)]


def _outputs(run: RecordedRun, folder: str, attempt: Mapping[str, Any], instance: object) -> Links:
    number = attempt.get("number")
    of_attempt = next((each.outputs for each in run.attempts if each.number == number), {})
    names = of_attempt.get(instance, ()) if isinstance(instance, int) else ()
    return Links([(name.partition(".")[2], f"{folder}attempt-{number}/{name}") for name in names])


def _instances(run: RecordedRun, folder: str, attempt: Mapping[str, Any]) -> list[Table]:
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


def _environment_section(run: RecordedRun) -> Section:
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
        *_load_rows(run),
        ("files of the run", str(run.files.folder)),
    ]
    parts: list[Part] = [Table("Environment", ("what", "value"), rows)]
    parts += [Sentence(problem) for problem in run.problems]
    return Section("Environment", tuple(parts))


def _load_rows(run: RecordedRun) -> list[tuple[str, str]]:
    at_start = run.attempts[-1].report.get("machine_at_start") if run.attempts else None
    if not isinstance(at_start, dict):
        return []
    load, num_cpus = at_start.get("load"), at_start.get("num_cpus")
    return [("load average at the start", f"{load}; the machine has {num_cpus} CPUs")]


# --- plan of a run, and commands that repeat it -------------------------------------------------


def _read_plan(run: RecordedRun) -> tuple[LaunchPlan | None, RecordedAttempt | None]:
    """Return the last recorded plan, without values of --env, and the attempt with this plan."""
    for attempt in reversed(run.attempts):
        if attempt.plan is None:
            continue
        try:
            bare = [{**each, "user_env": {}} for each in attempt.plan["instances"]]
            return plan_from_json({**attempt.plan, "instances": bare}, {}), attempt
        except (UsageError, KeyError, TypeError):
            return None, attempt
    return None, None


def _placement_section(plan: LaunchPlan | None) -> Section:
    if plan is None:
        return Section("Placement", ())
    from poprun_py.planning.views.plan_pictures import host_pictures, legend
    from poprun_py.planning.views.plan_tree import plan_tree

    tree = plan_tree(plan)
    parts = (Sentence(f"{tree.headline}."), host_pictures(tree), Sentence(legend(tree)))
    return Section("Placement", parts)


def _rerun_section(
    run: RecordedRun, plan: LaunchPlan | None, attempt: RecordedAttempt | None
) -> Section:
    if attempt is None:
        words = run.report.get("program")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return Section("Run it again", ())
        return Section("Run it again", (Sentence("The program was:"), Code(shlex.join(words))))
    from poprun_py.planning.views.command_text import launch_command

    path = run.files.folder / f"attempt-{attempt.number}" / "plan.json"
    parts: list[Part] = [
        Sentence("To run the same plan again, type in any folder:"),
        Code(f"poprun-py --from-plan {shlex.quote(str(path))}"),
    ]
    if plan is not None:
        if any(each.get("user_env") for each in (attempt.plan or {}).get("instances", ())):
            parts.append(
                Sentence(
                    "The values of --env are not shown: set these environment variables first."
                )
            )
        parts += [
            Sentence("To change some of the options, type:"),
            Code(launch_command(replace(plan.config, from_plan=None))),
        ]
    return Section("Run it again", tuple(parts))


def _reports(run: RecordedRun) -> list[Mapping[str, Any]]:
    return [each for each in run.report.get("attempts") or () if isinstance(each, dict)]


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return duration_text(value) if isinstance(value, float) else str(value)
