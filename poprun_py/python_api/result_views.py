"""Text and HTML that describe the result of a job and of its instances."""

from __future__ import annotations

from dataclasses import replace

from popdist_py.environment import RESUME_EXIT_CODE
from popdist_py.errors import counted
from poprun_py.display.formatting import bytes_text
from poprun_py.display.page import Cell, Code, Details, Part, Sentence, Table, fragment
from poprun_py.launching.failure_report import (
    diagnosis,
    report_text,
    stderr_excerpt,
    traceback_of,
)
from poprun_py.running.supervise.job import InstanceResult, LaunchResult, describe

_COLUMNS = ("instance", "host", "PID", "how it ended", "steps", "peak memory")
_MOST_ROWS = 64


def result_text(result: LaunchResult) -> str:
    """Return the report that ``poprun-py`` prints about a failed job; else one sentence."""
    if result.exit_code == 0:
        return summary_of(result)
    first = result.first_failure
    if first is not None:
        # A user who prints the result may not have seen stderr, so the report repeats its last
        # lines.
        unseen = replace(first, had_last_word=False)
        others = (unseen if each == first else each for each in result.instances)
        result = replace(result, first_failure=unseen, instances=tuple(others))
    return report_text(result, _label).rstrip("\n") or summary_of(result)


def summary_of(result: LaunchResult) -> str:
    """Return one sentence that says how a job ended."""
    after = f" after {result.seconds:.1f} s" if result.seconds else ""
    instances = counted(len(result.instances), "instance")
    if result.exit_code == 0:
        restarts = f", {counted(result.restart_count, 'restart')}" if result.restart_count else ""
        run = f" (run {result.run_id})" if result.run_id else ""
        return f"{instances} ended well{after}{restarts}{run}"
    if result.exit_code == RESUME_EXIT_CODE:
        return f"{instances} stopped at a checkpoint{after}: launch it again to go on"
    if result.first_failure is not None and not (result.timed_out or result.hung):
        return instance_text(result.first_failure, verb="failed first")
    code = result.exit_code
    # As in a shell, the exit code of a job that a signal ended is 128 plus the signal's number.
    reason = result.explanation or describe(128 - code if 128 < code < 192 else code)
    return f"the job ended{after}: {reason}"


def result_html(result: LaunchResult) -> str:
    """Return HTML with the summary of a result and a table of its instances."""
    parts = result_parts(result, with_summary=False)
    return fragment(summary_of(result), parts, kind=_kind(result))


def result_parts(result: LaunchResult, *, with_summary: bool = True) -> list[Part]:
    """Return parts of an HTML page that describe a job's result."""
    first = result.first_failure
    parts: list[Part] = [Sentence(summary_of(result), _kind(result))] if with_summary else []
    if first is not None:
        parts += [Sentence(text) for text in (diagnosis(first), result.advice) if text]
        if excerpt := stderr_excerpt(first.stderr_tail):
            parts += [Sentence("the end of its stderr:"), Code("\n".join(excerpt))]
    shown = result.instances[:_MOST_ROWS]
    marked = (n for n, each in enumerate(shown) if first is not None and each.index == first.index)
    instances: list[Part] = [
        Table("Instances", _COLUMNS, list(map(_row, shown)), frozenset(marked))
    ]
    if len(result.instances) > len(shown):
        more = counted(len(result.instances) - len(shown), "more instance")
        instances.append(Sentence(f"and {more}"))
    if result.instances:
        parts += [Details("instances", instances)] if result.exit_code == 0 else instances
    for group in result.stacks:
        if group.has_stack:
            indices = ", ".join(map(str, group.instances))
            parts.append(Details(f"what instance {indices} was doing", [Code(group.text)]))
    return parts


def instance_text(result: InstanceResult, *, verb: str = "") -> str:
    """Return how an instance ended: ``instance 1 on h: exit code 3 (ValueError: no)``."""
    where = f"on {result.host}" if result.host else ""
    ended = " ".join(part for part in (_label(result.index), where, verb) if part)
    last = traceback_of(result.stderr_tail).rpartition("\n")[2].strip() if result.failed else ""
    why = last or (diagnosis(result) if result.failed else "")
    return f"{ended}: {_end(result)}{f' ({why})' if why else ''}"


def instance_html(result: InstanceResult) -> str:
    """Return HTML about one instance: a table row, and the end of its stderr if it failed."""
    parts: list[Part] = [Table("Instance", _COLUMNS, [_row(result)])]
    if result.failed and (excerpt := stderr_excerpt(result.stderr_tail)):
        parts.append(Code("\n".join(excerpt)))
    return fragment(instance_text(result), parts, kind="bad" if result.failed else "")


def _kind(result: LaunchResult) -> str:
    return "good" if result.exit_code == 0 else "bad"


def _label(index: int) -> str:
    return f"instance {index}"


def _end(result: InstanceResult) -> str:
    if result.code is None:
        return "it never reported its end"
    if result.code == RESUME_EXIT_CODE:
        return "stopped at a checkpoint"
    how = "ended well" if result.code == 0 else describe(result.code)
    return f"stopped, {how}" if result.was_stopped and result.code != 0 else how


def _row(result: InstanceResult) -> list[Cell | str]:
    kind = "bad" if result.failed else "good" if result.code == 0 else "warn"
    memory = bytes_text(result.max_rss_bytes) if result.max_rss_bytes else ""
    return [
        str(result.index),
        result.host,
        str(result.pid or ""),
        Cell(_end(result), kind),
        "" if result.step is None else str(result.step),
        memory,
    ]
