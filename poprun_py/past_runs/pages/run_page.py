"""The HTML page that shows one run, and its file ``report.html``.

The sections of the page answer an engineer's questions: how did the run end, how fast was the run,
which instance was slow, what used time and memory, which instance ran on which host, and which
command repeats the run?
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.errors import counted, plural
from poprun_py.display.formatting import (
    duration_text,
    iso_date_text,
    iso_time,
    milliseconds_text,
    number_text,
)
from poprun_py.display.page import (
    Alert,
    Badge,
    Fact,
    Facts,
    Part,
    Section,
    Sentence,
    page,
)
from poprun_py.past_runs.pages.attempt_sections import (
    attempts_section,
    environment_section,
    failure_parts,
    placement_section,
    read_plan,
    rerun_section,
)
from poprun_py.past_runs.recorded_run import (
    DAMAGE_ERRORS,
    RecordedAttempt,
    RecordedRun,
    damaged_report,
    read_run,
    seconds_since_epoch,
)
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.user_program import short_name
from poprun_py.running.watch.job_view import JobView

if TYPE_CHECKING:
    from poprun_py.past_runs.pages.timeline_excerpt import Excerpt
    from poprun_py.past_runs.pages.training_sections import StepTimes

# The exit code of a job that wrote a checkpoint because it was asked to stop.
_CHECKPOINT: Final = 75

_WITHOUT_STEPS: Final = (
    "No training steps were recorded. PopTorch models record them, and other programs can call "
    "popdist_py.heartbeat.step()."
)


def write_page(files: RunFiles, path: Path | None = None) -> Path:
    """Write the page of a run to ``path``, by default ``report.html`` in the run's folder.

    Only the user can read the page. An existing page is replaced atomically.

    Returns:
        The path of the page.

    Raises:
        UsageError: The report of the run cannot be read.
        OSError: The page cannot be written.
    """
    path = files.page if path is None else path
    write_whole(path, page_text(files, path.parent) + "\n")
    return path


def page_text(files: RunFiles, page_folder: Path | None = None) -> str:
    """Read a run, which may not have ended yet, and return its page.

    Args:
        files: The files of the run.
        page_folder: The folder in which the page will be stored, by default the folder of the run.
            Links on the page are relative to this folder.

    Raises:
        UsageError: The report cannot be read, or has missing or impossible values.
    """
    run = read_run(files)
    excerpt = None
    if files.timeline.is_file():
        from poprun_py.past_runs.pages.timeline_excerpt import read_excerpt

        excerpt = read_excerpt(files.timeline)
    address = _relative_address(files.folder, page_folder)
    try:
        return run_page(run, iso_time(time.time()), excerpt, address)
    except DAMAGE_ERRORS as error:
        raise damaged_report(files, error) from None


def _relative_address(run: Path, page_folder: Path | None) -> str:
    """Return the address of the run's folder relative to the page, with a slash at its end."""
    if page_folder is None or page_folder.resolve() == run.resolve():
        return ""
    from urllib.parse import quote

    return f"{quote(os.fsencode(os.path.relpath(run.resolve(), page_folder.resolve())))}/"


def run_page(
    run: RecordedRun, made_at: str, excerpt: Excerpt | None = None, folder: str = ""
) -> str:
    """Return the page of a run, which may not have ended yet.

    Args:
        run: The run.
        made_at: The current time in ISO format.
        excerpt: A few steps of the run's timeline; None without a timeline.
        folder: The address of the run's folder relative to the page; it ends with a slash.
    """
    began = seconds_since_epoch(run.report.get("began_at"))
    if began is None:
        began = min((r.at for a in run.attempts for r in a.steps), default=0.0)
    views = (attempt.last_view() for attempt in reversed(run.attempts))
    view = next((each for each in views if each is not None), None)
    times, measured = _measured(run, began, view)
    plan, planned = read_plan(run)
    return page(
        f"{_program(run, view)}: {run.run_id}",
        (
            *measured,
            _devices(run),
            placement_section(plan),
            _timeline(run, excerpt),
            attempts_section(run, folder),
            rerun_section(run, plan, planned),
            environment_section(run),
        ),
        lead=_lead(run, made_at),
        badge=_badge(run),
        opening=_opening(run, view, times, folder),
        footer=f"Made {iso_date_text(made_at)} from {run.files.folder}",
    )


def _measured(
    run: RecordedRun, began: float, view: JobView | None
) -> tuple[list[StepTimes], list[Section]]:
    """Return the step times of the instances, and the page sections with measured values."""
    is_observed = view is not None and any(s.num_steps or any(s.seconds) for s in view.instances)
    if not is_observed and not any(
        a.steps or a.values or len(a.observations) > 1 for a in run.attempts
    ):
        # The modules that draw charts are not imported for a job without measurements.
        return [], [Section("Training", (Sentence(_WITHOUT_STEPS),))]
    from poprun_py.past_runs.pages.resource_sections import activity_section, resource_section
    from poprun_py.past_runs.pages.training_sections import (
        step_time_section,
        step_times,
        training_section,
    )

    times = step_times(run)
    training = training_section(run, began)
    if not times:
        training = Section(training.title, (*training.parts, Sentence(_WITHOUT_STEPS)))
    return times, [
        training,
        step_time_section(times),
        activity_section(view),
        resource_section(run, began),
    ]


def _devices(run: RecordedRun) -> Section:
    if not any(attempt.devices for attempt in run.attempts):
        return Section("Emulated IPUs", ())
    from poprun_py.past_runs.pages.resource_sections import device_section

    return device_section(run)


def _timeline(run: RecordedRun, excerpt: Excerpt | None) -> Section:
    if excerpt is None:
        return Section("Timeline", ())
    from poprun_py.past_runs.pages.timeline_excerpt import timeline_section

    return timeline_section(excerpt, run.files.timeline)


def _program(run: RecordedRun, view: JobView | None) -> str:
    """Return the name of the program, such as its script."""
    if view is not None and view.program:
        return view.program
    return short_name(tuple(map(str, run.report.get("program") or ("program",))))


def _badge(run: RecordedRun) -> Badge:
    if run.report.get("state") == "running":
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
    """Return the page's first line, with the exit code, the duration and the start of the run."""
    report = run.report
    is_running = report.get("state") == "running"
    began = seconds_since_epoch(report.get("began_at"))
    ended = seconds_since_epoch(made_at if is_running else report.get("ended_at"))
    words = []
    if not is_running and report.get("exit_code") not in (0, _CHECKPOINT):
        words.append(f"with exit code {report.get('exit_code')}")
    if began is not None and ended is not None:
        took = duration_text(max(0.0, ended - began))
        words.append(f"{'for' if is_running else 'after'} {took}")
    return f"{' '.join(words)}; began {iso_date_text(report.get('began_at'))}."


def _opening(
    run: RecordedRun, view: JobView | None, times: list[StepTimes], folder: str
) -> list[Part]:
    parts: list[Part] = failure_parts(run, folder)
    if view is not None and view.worst is not None and view.worst.is_slow:
        parts.append(Alert(f"{view.worst.sentence[0].upper()}{view.worst.sentence[1:]}."))
    if run.report.get("state") == "running":
        parts.append(
            Alert(
                "The run has not ended, or its launcher was killed. "
                "The page shows what is known so far."
            )
        )
    parts.append(Facts([*_speed(run, view), *_steps(times, view), *_size(run)]))
    return parts


def _speed(run: RecordedRun, view: JobView | None) -> list[Fact]:
    """Return the samples per second of all instances in the last attempt, to show on the page."""
    trained = [attempt for attempt in run.attempts if attempt.steps]
    rate, note = (_samples_per_second(trained[-1]), "") if trained else (0.0, "")
    if not rate and view is not None:
        rate = view.samples_per_second
    if not rate:
        return []
    if trained and (total := sum(r.samples * r.every for a in trained for r in a.steps)):
        note = f"{number_text(total)} {plural('sample', total)} in total"
    return [Fact("samples/s in total", number_text(rate), note)]


def _samples_per_second(attempt: RecordedAttempt) -> float:
    """Return the sum of the instances' mean speeds, without first steps, which are not timed."""
    samples: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for record in attempt.steps:
        if 0 < record.seconds < math.inf:
            samples[record.instance] = samples.get(record.instance, 0) + record.samples
            seconds[record.instance] = seconds.get(record.instance, 0.0) + record.seconds
    return sum(samples[i] / seconds[i] for i in samples)


def _steps(times: list[StepTimes], view: JobView | None) -> list[Fact]:
    """Return the median step time and the slowest instance, to show on the page."""
    facts = _recorded_steps(times) if times else []
    if len(times) < 2 and view is not None and (last := view.worst) is not None:
        facts.append(_slowest(last.instance, last.own_seconds, last.median_seconds, last.is_slow))
    return facts


def _recorded_steps(times: list[StepTimes]) -> list[Fact]:
    from poprun_py.past_runs.pages.training_sections import slow_instances
    from poprun_py.running.watch.instance_state import median

    middle = median([each.median for each in times])
    p95 = milliseconds_text(max(each.p95 for each in times))
    facts = [Fact("step time, median", milliseconds_text(middle), f"95th percentile {p95}")]
    if len(times) > 1:
        worst = max(times, key=lambda each: each.own_median)
        usual = median([each.own_median for each in times])
        is_slow = worst.instance in slow_instances(times)
        facts.append(_slowest(worst.instance, worst.own_median, usual, is_slow))
    return facts


def _slowest(instance: int, own: float, usual: float, is_slow: bool) -> Fact:
    name = f"instance {instance}"
    note = (
        f"{milliseconds_text(own)} a step without waiting, median instance "
        f"{milliseconds_text(usual)}"
    )
    if not is_slow:
        return Fact("slowest", "none stands out", f"{name}: {note}")
    return Fact("slowest", name, note)


def _size(run: RecordedRun) -> list[Fact]:
    plan: Mapping[str, Any] = run.report["plan"]
    hosts = run.attempts[-1].report.get("hosts") if run.attempts else None
    facts = [Fact("instances", str(plan["num_instances"]))]
    if isinstance(hosts, list) and hosts:
        names = ", ".join(map(str, hosts[:3])) + (", ..." if len(hosts) > 3 else "")
        facts[0] = Fact("instances", str(plan["num_instances"]), f"on {names}")
    replicas, per_replica = plan.get("num_replicas"), plan.get("ipus_per_replica")
    if isinstance(replicas, int) and isinstance(per_replica, int):
        each = f"{counted(per_replica, 'IPU')} each"
        facts.append(Fact("replicas", str(replicas), f"{each}, {replicas * per_replica} in total"))
    restarts = len(run.attempts) - 1
    if restarts > 0:
        facts.append(Fact("attempts", str(restarts + 1), f"{restarts} after a failure or stop"))
    return facts
