"""The report for the user about a job that failed, hung or was stopped.

The report first describes the instance that failed first, then the instances that failed as a
consequence. run_folder.py writes the same facts about a failure to a JSON file.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from popdist_py.environment import COMPILING, INFERENCE, RESUME_EXIT_CODE, TRAINING
from popdist_py.errors import plural
from poprun_py.display.formatting import bytes_text, date_text, ranges_text
from poprun_py.running.screen.traceback_parsing import normal_line
from poprun_py.running.supervise.launch_result import (
    Cause,
    Collective,
    InstanceResult,
    LaunchResult,
    Progress,
    describe,
)
from poprun_py.running.supervise.stacks import groups_text, stack_place
from poprun_py.terminal import command_name

_TAIL_LINES = 20
_MOST_LINES = 60
# The exit codes of instances that the supervisor stopped with SIGTERM, SIGKILL or SIGINT.
_STOPPED_CODES = (143, 137, 130)
_TRACEBACK = re.compile(
    r"^(?:Traceback \(most recent call last\):"
    r"|  \+ Exception Group Traceback \(most recent call last\):|Fatal Python error: )",
    re.M,
)
# Matches Python's error message for a program with a syntax error, which has no traceback.
_NOT_PYTHON = re.compile(r'^  File "[^"\n]*", line \d+\n(?:    .*\n)*\w*Error: ', re.M)
_CHAIN = "The above exception was the direct cause|During handling of the above exception"
_CHAINED = re.compile(rf"\n(?:{_CHAIN})")
# Matches the last line of a Python traceback, which is not indented and precedes an empty line. If
# the traceback of a chained exception follows, the line is not the last one.
_LAST_LINE = re.compile(rf"^(?! |{_CHAIN}).*(?=\n\n(?!{_CHAIN}))", re.M)

Label = Callable[[int], str]


def report_text(result: LaunchResult, label: Label, *, repeats_stderr: bool = False) -> str:
    """Return the report on a run's failure, hang or stop; empty if there is nothing to report.

    Args:
        result: The result of the run.
        label: A function that returns an instance's name, such as ``instance 1 (replicas 4-7)``.
        repeats_stderr: Whether to include the end of the failed instance's stderr even if the
            launcher's stderr already ends with these lines.
    """
    if result.exit_code == RESUME_EXIT_CODE:
        return _line(
            "the job stopped at a checkpoint; run the same command again to resume the job"
        )
    text = ""
    if result.hung:
        text += "".join(_line(_hang_sentence(result, index, label)) for index in result.hung)
    elif result.first_failure is not None:
        first = result.first_failure
        text += _first_failure(first, label, repeats_stderr=repeats_stderr)
        text += _indent(result.advice)
    elif result.timed_out:
        text += _line(f"error: {result.reason}: all instances were ended")
    elif result.cause is Cause.SIGNAL and result.exit_code in (130, 143):
        text += _killed(result)
    elif result.exit_code not in (0, 130, 143) or result.cause is Cause.MPIRUN_ENDED:
        text += _line(f"error: {result.explanation or 'the exit code of an instance is not known'}")
    if any(group.has_stack for group in result.stacks):
        text += _line("the Python stacks of the instances:") + _indent(
            groups_text(result.stacks), ""
        )
    return text + _collateral(result)


def traceback_of(stderr: str) -> str:
    """Return the last Python traceback in ``stderr``, including its chained exceptions."""
    start = _traceback_start(stderr)
    if start is None:
        return ""
    text = "\n".join(stderr[start:].splitlines())
    last = _LAST_LINE.search(text)
    return (text if last is None else text[: last.end()]).rstrip()


def _traceback_start(stderr: str) -> int | None:
    """Return the index at which the last traceback and its chained exceptions begin, or None."""
    matches = list(_TRACEBACK.finditer(stderr)) or list(_NOT_PYTHON.finditer(stderr))
    if not matches:
        return None
    starts = [match.start() for match in matches]
    first = len(starts) - 1
    while first > 0 and _CHAINED.search(stderr, starts[first - 1], starts[first]):
        first -= 1
    return starts[first]


def stderr_excerpt(stderr: str) -> list[str]:
    """Return the last 20 lines of ``stderr``, or up to 60 to include the last traceback."""
    lines = _drawn_lines(stderr)
    start = _traceback_start(stderr)
    explaining = len(_drawn_lines(stderr[start:])) if start is not None else 0
    return lines[-min(max(_TAIL_LINES, explaining), _MOST_LINES) :]


def _drawn_lines(stderr: str) -> list[str]:
    """Return the lines of ``stderr`` that are not empty, with progress bars in their last state."""
    drawn = (line.rstrip().rpartition("\r")[2] for line in stderr.split("\n"))
    return [line for line in drawn if line]


def diagnosis(instance: InstanceResult) -> str:
    """Return the reason if an instance vanished, was killed or ran out of memory; else no text."""
    peak = bytes_text(instance.max_rss_bytes)
    limit = instance.memory_limit_bytes
    of_limit = f", limit {bytes_text(limit)}" if limit else ""
    if instance.was_lost:
        return (
            "the instance and its wrapper process vanished: both were killed, or the host was lost"
        )
    if instance.oom_kills > 0:
        return f"out of memory: the kernel killed the instance (peak memory {peak}{of_limit})"
    if "MemoryError" in traceback_of(instance.stderr_tail).rpartition("\n")[2]:
        return f"out of memory: an allocation failed (peak memory {peak}{of_limit})"
    if instance.code == -9 and not instance.max_rss_bytes:
        return "the instance ended because its wrapper process was killed from outside the job"
    if instance.code == -9:
        return (
            "the instance was killed from outside the job; it had not reached a memory limit (peak "
            f"memory {peak}{of_limit})"
        )
    return ""


# --- parts of the failure report --------------------------------------------------------------


def _first_failure(first: InstanceResult, label: Label, *, repeats_stderr: bool) -> str:
    text = _line(
        f"{label(first.index)} on {first.host or 'its host'} failed first: "
        f"{describe(first.code) if first.code is not None else 'its exit code is not known'}"
    )
    facts = [date_text(first.ended_ns / 1e9, milliseconds=True), f"PID {first.pid}"]
    if place := _place(first):
        facts.append(place)
    text += _indent(", ".join(facts))
    text += _indent(diagnosis(first))
    excerpt = stderr_excerpt(first.stderr_tail)
    if excerpt and (repeats_stderr or not first.had_last_word):
        text += _indent("the end of the instance's stderr:") + _indent("\n".join(excerpt), "  | ")
    return text


def _hang_sentence(result: LaunchResult, index: int, label: Label) -> str:
    instance = result.instances[index]
    host = instance.host or "its host"
    where = ", ".join(filter(None, (f"hangs: {result.reason}", *_hung_places(result, instance))))
    return f"{label(index)} on {host} {where}"


def _hung_places(result: LaunchResult, instance: InstanceResult) -> list[str]:
    """Return texts that say where an instance hangs.

    For an instance that counts steps, one text names the current step. If the instance does not
    count its steps itself, the texts name the last collective operation and the source lines of the
    stacks.
    """
    progress = instance.progress
    steps = [_step_place(progress)] if progress is not None and progress.counts else []
    if steps and not (progress and progress.is_automatic):
        return steps
    last = instance.collective
    stacks = [group for group in result.stacks if instance.index in group.instances]
    lines = [] if last is not None and last.goes_on else [stack_place(each) for each in stacks]
    if last is not None and (last.goes_on or not steps):
        steps.append(_collective_place(last))
    places = [*steps, *lines]
    return places if any(places) else [_place(instance)]


def _place(instance: InstanceResult) -> str:
    """Return a text that names an instance's current step or collective; empty if unknown."""
    progress, collective = instance.progress, instance.collective
    is_counted = progress is not None and progress.counts
    places = []
    if progress is not None and (is_counted or collective is None):
        places.append(_step_place(progress))
    if collective is not None and (collective.goes_on or not is_counted):
        places.append(_collective_place(collective))
    return ", ".join(places)


def _collective_place(last: Collective) -> str:
    """Describe an instance's last collective, such as ``in all_reduce number 2 for 14 s``."""
    if last.goes_on:
        return f"in {last.name} number {last.number} for {last.seconds:.0f} s"
    return f"after its {_ordinal(last.number)} collective ({last.name})"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _step_place(progress: Progress) -> str:
    step, calls = progress.step, progress.calls
    if progress.doing == TRAINING:
        return f"in training step {step + 1}"
    if progress.doing == INFERENCE:
        return f"in {_call(calls + 1, step)}"
    doing = "while compiling, " if progress.doing == COMPILING else ""
    if calls:
        return f"{doing}after {_call(calls, step)}"
    if progress.has_begun:
        return f"{doing}after training step {step}"
    resumed = f" (resumed from training step {step})" if step else ""
    return f"{doing}before its first step{resumed}"


def _call(number: int, step: int) -> str:
    return f"inference call {number}" + (f" after training step {step}" if step else "")


def collateral_of(result: LaunchResult) -> list[InstanceResult]:
    """Return the instances that failed or were stopped after the first failed instance."""
    first = result.first_failure
    return [r for r in result.instances if r.code not in (0, None, RESUME_EXIT_CODE) and r != first]


def _killed(result: LaunchResult) -> str:
    """Return a line that names the instances that had to be killed when the user ended the job."""
    members = [r for r in result.instances if r.code == -9 and r.was_stopped and not r.was_lost]
    if not members:
        return ""
    were = "was" if len(members) == 1 else "were"
    return _line(f"{_named(members, result)} {were} still running, and {were} killed")


def _collateral(result: LaunchResult) -> str:
    first = result.first_failure
    if first is None:
        return ""
    trace = _normal_traceback(first)
    by_end: dict[str, list[InstanceResult]] = {}
    for other in collateral_of(result):
        assert other.code is not None
        if other.was_stopped and other.exit_code in _STOPPED_CODES:
            how = "stopped"
        elif trace and _normal_traceback(other) == trace:
            how = "failed with the same traceback"
        else:
            how = "failed later"
        by_end.setdefault(f"{how}, {describe(other.code)}", []).append(other)
    return "".join(_line(f"{_named(members, result)}: {how}") for how, members in by_end.items())


def _normal_traceback(instance: InstanceResult) -> list[str]:
    lines = traceback_of(instance.stderr_tail).splitlines()
    return [normal_line(line, instance.index, instance.host, instance.pid) for line in lines]


def _named(members: list[InstanceResult], result: LaunchResult) -> str:
    """Name instances, such as ``instances 0-2, 5``; if the job has several hosts, add hosts."""
    spans = ranges_text([r.index for r in members]).split(",")
    hosts = list(dict.fromkeys(r.host for r in members if r.host))
    several_hosts = len({r.host for r in result.instances if r.host}) > 1
    where = f" ({_short(hosts)})" if hosts and several_hosts else ""
    return f"{plural('instance', len(members))} {_short(spans)}{where}"


def _short(words: list[str]) -> str:
    shown = ", ".join(words[:8])
    return shown if len(words) <= 8 else f"{shown} and {len(words) - 8} more"


def _line(sentence: str) -> str:
    return f"{command_name()}: {sentence}\n"


def _indent(text: str, lead: str = "  ") -> str:
    return "".join(f"{lead}{line}\n" for line in text.splitlines())
