"""How each attempt went, the first failure, the instances, and what is installed.

Pure: a report in, parts of a page out. Reports of other versions may lack any of it. Nothing here
reads files or writes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from popdist_py.errors import plural
from poprun_py.html.page import (
    Alert,
    Code,
    Folded,
    Links,
    Part,
    Section,
    Sentence,
    Table,
)
from poprun_py.past_runs.recorded_run import RecordedRun
from poprun_py.texts import bytes_text, duration_text, iso_date_text

# What a report calls them, and what people do.
_NAMES: Final = {
    "num_replicas": "replicas",
    "num_instances": "instances",
    "num_local_replicas": "replicas of an instance",
    "ipus_per_replica": "IPUs of a replica",
    "num_ilds": "IPU-Link domains",
}


def failure_parts(run: RecordedRun, folder: str = "") -> list[Part]:
    """Return what an engineer has to see first of a run that failed; ``folder`` as below."""
    report = run.report
    attempts = _attempts(run)
    last = attempts[-1] if attempts else {}
    if report.get("state") == "running":
        if last.get("cause") is None:
            return []
    elif report.get("exit_code") in (0, None):
        return []
    reason = str(last.get("reason") or report.get("reason") or "")
    parts: list[Part] = []
    first = last.get("first_failure")
    if isinstance(first, dict):
        traceback = str(first.get("traceback") or "")
        *_, error = traceback.rstrip().split("\n")
        why = first.get("diagnosis") or error or first.get("ended_by") or reason
        text = (
            f"{first.get('name', 'an instance')} on {first.get('host') or 'this host'} failed "
            f"first: {why}"
        )
        parts.append(Alert(text, is_failure=True))
        stderr = first.get("stderr")
        lines = "\n".join(map(str, stderr)) if isinstance(stderr, list) else ""
        if traceback:
            parts.append(Code(traceback.rstrip("\n")))
        if lines and lines.strip() != traceback.strip():
            shown = Code(lines)
            parts.append(Folded("The end of its stderr", (shown,)) if traceback else shown)
        if links := _outputs(run, folder, last, first.get("index")).links:
            parts.append(Links(links, "All that it wrote: "))
    elif reason:
        parts.append(Alert(reason, is_failure=report.get("exit_code") != 0))
    stacks = [each for each in last.get("stacks") or () if isinstance(each, dict)]
    if stacks:
        texts = (
            f"{plural('instance', len(each.get('instances') or ()))} "
            f"{', '.join(map(str, each.get('instances') or ()))}"
            f"{_waits(each)}\n{each.get('text', '')}"
            for each in stacks
        )
        parts.append(Folded("What the instances were doing", (Code("\n\n".join(texts)),)))
    return parts


def _waits(stack: Mapping[str, Any]) -> str:
    return f": {stack['waits']}" if stack.get("waits") else ""


def attempts_section(run: RecordedRun, folder: str = "") -> Section:
    """Return the attempts, and the instances of each.

    Args:
        run: whose.
        folder: the run's, as an address from where the page lies; it ends with a slash.
    """
    attempts = _attempts(run)
    if not attempts:
        return Section("Attempts", (Sentence("No attempt has begun."),))
    table = Table(
        "Attempts",
        ("attempt", "began", "seconds", "ended", "exit code", "went on from step", "why"),
        [
            (
                _text(each.get("number")),
                iso_date_text(each.get("began_at")),
                _text(each.get("seconds")),
                str(each.get("cause") or "running").replace("_", " "),
                _text(each.get("exit_code")),
                _text(each.get("resumed_step")),
                _text(each.get("reason")),
            )
            for each in attempts
        ],
        frozenset(
            index
            for index, each in enumerate(attempts)
            if each.get("cause") not in (None, "completed", "checkpoint")
        ),
    )
    *earlier, last = attempts
    parts: list[Part] = [table, *_instances(run, folder, last)]
    for each in earlier:
        if tables := list(_instances(run, folder, each)):
            parts.append(Folded(f"Instances of attempt {_text(each.get('number'))}", tables))
    return Section("Attempts" if len(attempts) > 1 else "Attempt and instances", tuple(parts))


def _outputs(run: RecordedRun, folder: str, attempt: Mapping[str, Any], instance: object) -> Links:
    """Return links to what an instance wrote in an attempt."""
    for each in run.attempts:
        if each.number == attempt.get("number") and isinstance(instance, int):
            names = each.outputs.get(instance, ())
            return Links(
                [
                    (name.rpartition(".")[2], f"{folder}attempt-{each.number}/{name}")
                    for name in names
                ]
            )
    return Links(())


def _instances(run: RecordedRun, folder: str, attempt: Mapping[str, Any]) -> Iterator[Part]:
    instances = [each for each in attempt.get("instances") or () if isinstance(each, dict)]
    if not instances:
        return
    first = attempt.get("first_failure")
    failed = first.get("index") if isinstance(first, dict) else None
    yield Table(
        "Instances",
        (
            "instance",
            "host",
            "process",
            "ended by",
            "steps",
            "inference calls",
            "most memory",
            "output",
        ),
        [
            (
                str(each.get("name") or each.get("index")),
                _text(each.get("host")),
                _text(each.get("pid")),
                _text(each.get("ended_by")),
                _text(each.get("training_step")),
                _text(each.get("inference_calls")),
                bytes_text(each["max_rss_bytes"]) if each.get("max_rss_bytes") else "-",
                _outputs(run, folder, attempt, each.get("index")),
            )
            for each in instances
        ],
        frozenset(i for i, each in enumerate(instances) if each.get("index") == failed),
    )


def environment_section(run: RecordedRun) -> Section:
    """Return the numbers of the plan, where it ran, and what is installed."""
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
    parts += [Sentence(trouble) for trouble in run.troubles]
    return Section("Environment", tuple(parts))


def _attempts(run: RecordedRun) -> list[Mapping[str, Any]]:
    return [each for each in run.report.get("attempts") or () if isinstance(each, dict)]


def _text(value: Any) -> str:
    """Return a value of a report in a cell."""
    if value is None or value == "":
        return "-"
    return duration_text(value) if isinstance(value, float) else str(value)
