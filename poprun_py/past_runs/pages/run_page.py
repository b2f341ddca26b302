"""The HTML page that shows one run, and its file ``report.html``.

The modules that draw charts are imported only for a run with something to draw.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.errors import counted
from poprun_py.display.formatting import (
    duration_text,
    iso_date_text,
    iso_time,
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

# The exit code of a job that wrote a checkpoint because it was asked to stop.
_CHECKPOINT: Final = 75

_WITHOUT_STEPS: Final = (
    "No training steps were recorded. PopTorch models record them, and other programs can call "
    "popdist_py.heartbeat.step()."
)


def write_page(files: RunFiles, path: Path | None = None) -> Path:
    """Write the page of a run to ``path``, by default to its ``report.html``; return the path.

    Only the user can read the page. An existing page is replaced atomically.

    Raises:
        UsageError: The report of the run cannot be read.
        OSError: The page cannot be written.
    """
    path = files.page if path is None else path
    write_whole(path, page_text(files, path.parent) + "\n")
    return path


def page_text(files: RunFiles, page_folder: Path | None = None) -> str:
    """Read a run, which may not have ended yet, and return its page.

    Links on the page are relative to ``page_folder``, by default the folder of the run.

    Raises:
        UsageError: The report cannot be read, or has missing or impossible values.
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
    try:
        return run_page(run, iso_time(time.time()), excerpt, address)
    except DAMAGE_ERRORS as error:
        raise damaged_report(files, error) from None


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
    views = (attempt.last_view() for attempt in reversed(run.attempts))
    view = next((each for each in views if each is not None), None)
    facts, sections = _measured(run, view)
    if any(attempt.devices for attempt in run.attempts):
        from poprun_py.past_runs.pages.resource_sections import device_section

        sections.append(device_section(run))
    plan, planned = read_plan(run)
    sections.append(placement_section(plan))
    if excerpt is not None:
        from poprun_py.past_runs.pages.timeline_excerpt import timeline_section

        sections.append(timeline_section(excerpt, run.files.timeline))
    sections += [
        attempts_section(run, folder),
        rerun_section(run, plan, planned),
        environment_section(run),
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
        return [], [Section("Training", (Sentence(_WITHOUT_STEPS),))]
    from poprun_py.past_runs.pages import resource_sections, training_sections

    began = run.began_at
    if began is None:
        began = min((r.at for a in run.attempts for r in a.steps), default=0.0)
    times = training_sections.step_times(run)
    training = training_sections.training_section(run, began)
    if not times:
        training = Section(training.title, (*training.parts, Sentence(_WITHOUT_STEPS)))
    return training_sections.training_facts(run, times, view), [
        training,
        training_sections.step_time_section(times),
        resource_sections.activity_section(view),
        resource_sections.resource_section(run, began),
    ]


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
    began = run.began_at
    ended = seconds_since_epoch(made_at if is_running else report.get("ended_at"))
    words = []
    if not is_running and report.get("exit_code") not in (0, _CHECKPOINT):
        words.append(f"with exit code {report.get('exit_code')}")
    if began is not None and ended is not None:
        took = duration_text(max(0.0, ended - began))
        words.append(f"{'for' if is_running else 'after'} {took}")
    return f"{' '.join(words)}; began {iso_date_text(report.get('began_at'))}."


def _opening(run: RecordedRun, view: JobView | None, folder: str) -> list[Part]:
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
