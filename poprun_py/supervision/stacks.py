"""Python stacks of all instances: collected, which are the same, who waits for whom, how shown.

Nothing is sent here, and the clock is an argument; of the system only source files are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from poprun_py.instance import binding
from poprun_py.supervision.job import StackGroup

__all__ = [
    "StackRequest",
    "StackRequests",
    "group_stacks",
    "missing_instances",
    "render_groups",
]

# Instances answer within milliseconds; one that does not is overwhelmed, or its host is.
_ANSWER_SECONDS = 3.0

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Where an instance stands when it waits for the others: by file of the library, or by its line.
_WAITING_FILE = re.compile(r"popdist_py/collective|/torch/distributed/|/mpi4py/")
_WAITING_LINE = re.compile(
    r"\b((barrier|i?all_?reduce|i?all_?gather|i?broadcast|i?bcast|i?reduce|recv|sendrecv|"
    r"synchronize|stopRequested)\w*|wait(all|any|some)?)\(",  # but not waitpid
    re.IGNORECASE,
)

Processes = list[dict[str, Any]]


@dataclass(slots=True)
class StackRequest:
    """One collection: who has yet to answer, and the answers; None for an instance without one.

    ``reply`` takes the stacks for who inspects the job; without it the job is about to stop.
    """

    waiting: set[int]
    deadline: float
    reply: Callable[[str], None] | None = None
    answers: dict[int, Processes | None] = field(default_factory=dict)


class StackRequests:
    """The collections of one run that are under way."""

    def __init__(self) -> None:
        self._open: list[StackRequest] = []

    def begin(
        self, members: Iterable[int], now: float, reply: Callable[[str], None] | None = None
    ) -> None:
        """Begin a collection from the instances that are being asked."""
        self._open.append(StackRequest(set(members), now + _ANSWER_SECONDS, reply))

    def take(self, index: int, processes: Processes | None) -> None:
        """Take an instance's answer; None if it will give none."""
        for request in self._open:
            if index in request.waiting:
                request.waiting.discard(index)
                request.answers[index] = processes

    def next_deadline(self) -> float:
        """Return when a collection is over; inf for never."""
        return min(
            (request.deadline if request.waiting else float("-inf") for request in self._open),
            default=float("inf"),
        )

    def on_time(self, now: float) -> list[StackRequest]:
        """Return the collections that are complete, or whose time is over; each once."""
        over: list[StackRequest] = []
        left: list[StackRequest] = []
        for request in self._open:
            (left if request.waiting and now < request.deadline else over).append(request)
        self._open = left
        for request in over:
            request.answers.update(dict.fromkeys(request.waiting))
        return over


def group_stacks(answers: Mapping[int, Any]) -> tuple[StackGroup, ...]:
    """Group instances by their stacks; the fewest instances first, for they are the odd ones.

    Args:
        answers: for each instance the ``processes`` of its wrapper's answer; None if none came.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, processes in sorted(answers.items()):
        text = _normal_text(processes)
        groups.setdefault((text, _waits(text)), []).append(index)
    return tuple(
        StackGroup(instances=tuple(members), text=text, waits=waits)
        for (text, waits), members in sorted(groups.items(), key=lambda g: (g[0][1], len(g[1])))
    )


def missing_instances(
    hung: tuple[int, ...], done: Mapping[int, tuple[int, int]], groups: tuple[StackGroup, ...]
) -> tuple[int, ...]:
    """Return those whom the ``hung`` instances wait for.

    One that does not wait in a collective is to blame: one of the hung, else another, which made
    its last step a moment later. Among those, and where all wait, the ones that have ``done`` the
    fewest training steps, and other calls since.
    """
    waiting = {index for group in groups if group.waits for index in group.instances}
    others = [index for group in groups if not group.waits for index in group.instances]
    suspects = [index for index in hung if index not in waiting] or others or list(hung)
    fewest = min(done.get(index, (0, 0)) for index in suspects)
    return tuple(index for index in suspects if done.get(index, (0, 0)) == fewest)


def render_groups(groups: tuple[StackGroup, ...]) -> str:
    """Return one paragraph for each group of equal stacks."""
    paragraphs = []
    for group in groups:
        plural = "s" if len(group.instances) > 1 else ""
        waits = ", waiting for others" if group.waits else ""
        names = binding.format_list(group.instances)
        head = f"instance{plural} {names} ({len(group.instances)}){waits}:"
        paragraphs.append("\n".join([head, *("  " + line for line in group.text.splitlines())]))
    return "\n".join(paragraphs) + ("\n" if paragraphs else "")


def _normal_text(processes: Any) -> str:
    """Return an instance's stacks without what differs between equal ones: ids and addresses."""
    if processes is None:
        return "no answer from the instance's wrapper"
    parts = []
    for number, process in enumerate(processes):
        title = f"process {number}, started by the program:\n" if number else ""
        text = process["text"].strip("\n")
        if not text:
            why = _STATES.get(process["state"], "no Python program, or one that is ending")
            text = f"no Python stack ({why})"
        text = re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", "thread", text)
        parts.append(title + _with_sources(text))
    return "\n".join(parts)


_STATES = {"T": "the process is stopped", "t": "the process is being traced", "Z": "it has ended"}


def _with_sources(text: str) -> str:
    """Add the source line to every frame whose file can be read here."""
    import linecache  # few jobs need it

    lines = []
    for line in text.splitlines():
        lines.append(line)
        frame = _FRAME.match(line)
        source = linecache.getline(frame["file"], int(frame["line"])).strip() if frame else ""
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def _waits(text: str) -> bool:
    """Tell whether the main thread of the program stands in a call that waits for others."""
    program = text.partition("\nprocess 1, ")[0]
    main_thread = program.rpartition("(most recent call first):")[2].splitlines()
    seen = 0
    for line in main_thread:
        frame = _FRAME.match(line)
        if frame:
            seen += 1
            if seen > 4:
                break
            if _WAITING_FILE.search(frame["file"]):
                return True
        elif seen == 1 and _WAITING_LINE.search(line):
            return True
    return False
