"""Filters for lists of runs: by state, name, tags and time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Final

from poprun_py.errors import UsageError
from poprun_py.options.option_types import TIME
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import RunSummary

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFilter:
    """Conditions that a run must meet to be listed.

    Attributes:
        states: The accepted states; empty for all.
        names: Shell patterns, such as ``lr-*``, one of which the name must match; empty for all.
        tags: Keys such as ``lr``, or keys with a shell pattern for the value such as ``lr=0.*``. A
            run must have all of them.
        since: The earliest start of a run, in seconds since the epoch; None for no limit.
    """

    states: frozenset[RunState] = frozenset()
    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    since: float | None = None

    @property
    def accepts_all(self) -> bool:
        """Whether the filter has no condition."""
        return self == RunFilter()

    def select(self, runs: Iterable[RunSummary]) -> list[RunSummary]:
        """Return the runs that meet all conditions, in the same order."""
        return [run for run in runs if self._accepts(run)]

    def _accepts(self, run: RunSummary) -> bool:
        if self.states and run.state not in self.states:
            return False
        if self.names and not any(fnmatchcase(run.name, pattern) for pattern in self.names):
            return False
        if self.since is not None and (run.began_at is None or run.began_at < self.since):
            return False
        return all(_has_tag(run, tag) for tag in self.tags)


def _has_tag(run: RunSummary, tag: str) -> bool:
    key, equals, pattern = tag.partition("=")
    value = run.tags.get(key)
    return value is not None and (not equals or fnmatchcase(value, pattern))


def parse_age(option: str, text: str) -> float:
    """Return the seconds in the value of an option such as ``30d``.

    Raises:
        UsageError: The text is not a time.
    """
    try:
        age = TIME.read(text)
    except ValueError:
        age = None
    if not TIME.accepts(age):
        raise UsageError(f"{option} {text!r}: expected {TIME.expected}")
    return float(age)


def parse_since(text: str, now: float) -> float:
    """Return the moment that --since names, as a time before ``now`` or as a date.

    Raises:
        UsageError: The text is neither a time nor a date.
    """
    if _DATE.fullmatch(text):
        try:
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            pass
    try:
        return now - parse_age("--since", text)
    except UsageError as error:
        raise UsageError(f"{error}; or a date such as 2026-01-31") from None
