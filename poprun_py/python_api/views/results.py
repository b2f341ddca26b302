"""How a job ended, for people: the report of the command, and a table in a notebook."""

from __future__ import annotations

from dataclasses import replace

from popdist_py.environment import RESUME_EXIT_CODE
from popdist_py.errors import counted
from poprun_py.errors import JobFailedError, LaunchError, TimeLimitError
from poprun_py.python_api.views.frame import Cell, block, details, framed, heading, note, table
from poprun_py.running.supervise.job import InstanceResult, LaunchResult, describe
from poprun_py.running.supervise.result_text import (
    diagnosis,
    report_text,
    stderr_excerpt,
    traceback_of,
)

_COLUMNS = ("instance", "host", "PID", "how it ended", "steps", "peak memory")
# What --output-dir keeps in full.
_MOST_ROWS = 64


def result_text(result: LaunchResult) -> str:
    """Return one line where all went well, else the report as the command prints it."""
    if result.exit_code == 0:
        return sentence(result)
    return _report(result) or sentence(result)


def _report(result: LaunchResult) -> str:
    """Return the report with the end of stderr, which need not be on the reader's screen."""
    first = result.first_failure
    if first is not None:
        whole = replace(first, had_last_word=False)
        others = (whole if each == first else each for each in result.instances)
        result = replace(result, first_failure=whole, instances=tuple(others))
    return report_text(result, _label).rstrip("\n")


def sentence(result: LaunchResult) -> str:
    """Return how a job ended, in one line."""
    after = f" after {result.seconds:.1f} s" if result.seconds else ""
    who = counted(len(result.instances), "instance")
    if result.exit_code == 0:
        restarts = f", {counted(result.restart_count, 'restart')}" if result.restart_count else ""
        run = f" (run {result.run_id})" if result.run_id else ""
        return f"{who} ended well{after}{restarts}{run}"
    if result.exit_code == RESUME_EXIT_CODE:
        return f"{who} stopped at a checkpoint{after}: launch it again to go on"
    if result.first_failure is not None and not (result.timed_out or result.hung):
        return instance_text(result.first_failure, verb="failed first")
    reason = result.explanation or _described_exit(result.exit_code)
    return f"the job ended{after}: {reason}"


def _described_exit(code: int) -> str:
    """Return an exit code as a shell shows it, or the signal that it stands for."""
    return describe(128 - code if 128 < code < 192 else code)


def error_of(result: LaunchResult) -> LaunchError:
    """Return the error of a job that did not end well, with the report as a note."""
    is_limit = result.timed_out or bool(result.hung)
    error = (TimeLimitError if is_limit else JobFailedError)(sentence(result), result)
    if report := _report(result):
        error.add_note(report)
    return error


def result_html(result: LaunchResult) -> str:
    """Return how every instance ended, and of the first failure the end of its stderr."""
    return framed(heading(sentence(result), _kind(result)), *result_parts(result, is_told=True))


def result_parts(result: LaunchResult, *, is_told: bool = False) -> list[str]:
    """Return what follows the heading; ``is_told``: that is the sentence already."""
    is_good = result.exit_code == 0
    first = result.first_failure
    parts = [] if is_told else [note(sentence(result), _kind(result))]
    if first is not None:
        parts += [note(diagnosis(first)), note(result.advice)]
        if excerpt := stderr_excerpt(first.stderr_tail):
            parts += [note("the end of its stderr:"), block("\n".join(excerpt))]
    shown = result.instances[:_MOST_ROWS]
    marked = [n for n, each in enumerate(shown) if first is not None and each.index == first.index]
    instances = table(_COLUMNS, map(_row, shown), marked)
    if len(result.instances) > len(shown):
        instances += note(f"and {counted(len(result.instances) - len(shown), 'more instance')}")
    if result.instances:
        parts.append(details("instances", instances) if is_good else instances)
    for group in result.stacks:
        if group.has_stack:
            who = ", ".join(map(str, group.instances))
            parts.append(details(f"what instance {who} was doing", block(group.text)))
    return parts


def instance_text(result: InstanceResult, *, verb: str = "") -> str:
    """Return how an instance ended: ``instance 1 on h: exit code 3 (ValueError: no)``."""
    ended = " ".join(part for part in (_label(result.index), _where(result), verb) if part)
    last = traceback_of(result.stderr_tail).rpartition("\n")[2].strip() if result.failed else ""
    why = last or (diagnosis(result) if result.failed else "")
    return f"{ended}: {_end(result)}{f' ({why})' if why else ''}"


def instance_html(result: InstanceResult) -> str:
    """Return how an instance ended, as a row, with the end of its stderr if it failed."""
    excerpt = stderr_excerpt(result.stderr_tail) if result.failed else []
    return framed(
        heading(instance_text(result), "bad" if result.failed else ""),
        table(_COLUMNS, [_row(result)]),
        block("\n".join(excerpt)) if excerpt else "",
    )


def _kind(result: LaunchResult) -> str:
    return "good" if result.exit_code == 0 else "bad"


def _label(index: int) -> str:
    return f"instance {index}"


def _where(result: InstanceResult) -> str:
    return f"on {result.host}" if result.host else ""


def _end(result: InstanceResult) -> str:
    """Return how it ended, in a word or two."""
    if result.code is None:
        return "it never reported its end"
    if result.code == RESUME_EXIT_CODE:
        return "stopped at a checkpoint"
    how = "ended well" if result.code == 0 else describe(result.code)
    return f"stopped, {how}" if result.was_stopped and result.code != 0 else how


def _row(result: InstanceResult) -> list[Cell | str]:
    kind = "bad" if result.failed else "good" if result.code == 0 else "warn"
    memory = f"{result.max_rss_bytes / 2**20:,.0f} MiB" if result.max_rss_bytes else ""
    return [
        Cell(text=str(result.index), is_number=True),
        result.host,
        Cell(text=str(result.pid or ""), is_number=True),
        Cell(text=_end(result), kind=kind),
        Cell(text="" if result.step is None else str(result.step), is_number=True),
        Cell(text=memory, is_number=True),
    ]
