"""What a terminal shows of a program in the end, and what two runs of it have in common."""

from __future__ import annotations

import itertools
import re

from tools.running.transcript import shown

__all__ = ["comparable", "visible"]

_NUMBER = re.compile(r" *-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_TAG = re.compile(r"\[1,(\d+)\]<std(?:out|err)>:")
# Shown while compiling, and a log line may follow on its line.
_COMPILING = re.compile(r"Graph compilation:[^\r\n\[]*\[[^\]]*\]")
# Bars on their way or that vanish, advice about 16 workers on two cores, and what was measured,
# which a model that an earlier program had too does not repeat.
_PASSING = re.compile(
    r"\d+%\|.*\| (?!(\d+)/\1 )|\?it/s|check_worker_number|UserWarning: This DataL"
    r"|^(\[1,\d+\]<std\w+>:)?\s*$|^batches: |replicas run with the back end"
)


def visible(output: str, *, compiling: bool = False) -> list[str]:
    """Return the lines that stay on a screen, those of each instance together.

    If a bar is drawn again when it is full, the last drawing stays. Bars of compilations are left
    out; with ``compiling``, their complete drawings stay, each on a line of its own.
    """

    def bar(drawn: re.Match[str]) -> str:
        return f"\n{drawn[0]}\n" if compiling and "100/100" in drawn[0] else ""

    lines = [line for line in shown(_COMPILING.sub(bar, output)) if not _PASSING.search(line)]
    lines = [
        line
        for line, after in itertools.pairwise([*lines, ""])
        if "%|" not in line or _without_numbers(line) != _without_numbers(after)
    ]

    def instance(line: str) -> int:
        tag = _TAG.match(line)
        return int(tag[1]) if tag else -1

    return sorted(lines, key=instance)


def comparable(lines: list[str], *, numbers_vary: bool) -> list[str]:
    """Return what two runs of a program have in common: lines, or lines without their numbers."""
    return [_without_numbers(line) for line in lines] if numbers_vary else lines


def _without_numbers(line: str) -> str:
    """Mark where numbers stand; a slow step of a bar is shown in other units."""
    return _NUMBER.sub(" #", line).replace("s/it", "it/s").rstrip()
