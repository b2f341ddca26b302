"""Python stacks of all instances: collected, which are the same, who waits for whom, how shown.

Nothing is sent here, and the clock is an argument; of the system only source files are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from popdist_py.errors import plural
from poprun_py.display.texts import ranges_text
from poprun_py.running.supervise.job import StackGroup

_MOST_SOURCE = 60  # characters of a line
# Instances answer within milliseconds; one that does not is overwhelmed, or its host is.
_ANSWER_SECONDS = 3.0

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Where an instance stands when it waits for the others: by file of the library, or by its line.
# Importing mpi4py.MPI starts MPI, which may wait, too; popdist_mpi_finder wraps that import.
_WAITING_FILE = re.compile(
    r"popdist_py/(collective|torch_backend|horovod)|/torch/distributed/|/mpi4py/"
    r"|/popdist_mpi_finder\.py$"
)
_WAITING_LINE = re.compile(
    r"\b((i?barrier|i?all_?reduce|i?all_?gather|i?broadcast|i?bcast|i?reduce|recv|sendrecv|"
    r"synchronize|stopRequested)\w*|wait(all|any|some)?|[bsr]?send|i?all_?to_?all[vw]?|m?probe"
    # but not waitpid; and whatever is asked of a communicator, or of MPI
    r"|(?:(?<=\bcomm\.)|(?<=_comm\.)|(?<=\bCOMM_WORLD\.)|(?<=\bMPI\.))\w+)\(",
    re.IGNORECASE,
)
_MPI_START = re.compile(r"\bfrom mpi4py import\b.*\bMPI\b|\bimport mpi4py\.MPI\b")
# Sockets and pipes have methods of the same names, which wait for a server or a child process.
# In Python's own modules, calls of these names never wait for another instance.
_SOCKET_LINE = re.compile(
    r"(\bs|(sock|conn|client|server|pipe|reader|writer|channel|request)\w*)\.(recv|send)\w*\(",
    re.IGNORECASE,
)
_PYTHON_FILE = re.compile(r"/lib/python\d[^/]*/(?!(site|dist)-packages/)")
# The frames of an import, between the importing line and the module's own code.
_IMPORT_FILE = "<frozen importlib"
# faulthandler's text for a thread that runs no Python.
_NO_FRAME = "<no Python frame>"
# The main thread's outermost function is one of these until the program ends.
_PROGRAM_FUNCTIONS = ("<module>", "_run_module_as_main")
# Calls that wait for one other instance; all others wait for all of them.
_MESSAGE = re.compile(r"i?m?(recv|send|probe)\w*|i?[bsr]send", re.IGNORECASE)
# Where DistributedDataParallel waits, in C++; and where backward computes.
_BACKWARD_FILE = re.compile(r"/torch/autograd/")
# Files that are none of the user's, of whom a line tells little.
_LIBRARY_FILE = re.compile(r"/lib/python\d|/(site|dist)-packages/|/p(opdist|oprun)_py/|^<")
_WAITING_FRAMES = 4

Processes = list[dict[str, Any]]


@dataclass(slots=True)
class StackRequest:
    """One collection: who has yet to answer, and the answers; None for an instance without one.

    ``reply`` takes the stacks when it is over.
    """

    waiting: set[int]
    deadline: float
    reply: Callable[[tuple[StackGroup, ...]], None]
    answers: dict[int, Processes | None] = field(default_factory=dict)


class StackRequests:
    """The collections of one run that are under way."""

    def __init__(self) -> None:
        self._open: list[StackRequest] = []

    def begin(
        self,
        members: Iterable[int],
        now: float,
        reply: Callable[[tuple[StackGroup, ...]], None],
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
        answers: For each instance the ``processes`` of its wrapper's answer; None if none came.
    """
    alike: dict[str, list[int]] = {}
    for index, processes in sorted(answers.items()):
        alike.setdefault(_normal_text(processes), []).append(index)
    # Sources are read once for all instances that stand in the same place.
    groups: dict[tuple[str, bool], list[int]] = {}
    for bare, members in alike.items():
        text = _with_sources(bare)
        groups.setdefault((text, _waits(text)), []).extend(members)
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


def odd_instances(
    hung: tuple[int, ...], done: Mapping[int, tuple[int, int]], groups: tuple[StackGroup, ...]
) -> tuple[int, ...]:
    """Return those of the ``hung`` instances of a job without steps that the others wait for.

    One that does not wait at all is to blame; else one that may wait for others within backward,
    then one that waits for a message, and at last one in a collective. Among those, the ones that
    have ``done`` the fewest collectives, and of these the ones whose stacks the fewest share.
    """
    all_hung = frozenset(hung)
    oddness: dict[int, tuple[int, tuple[int, int], int]] = {}
    for group in groups:
        members = all_hung.intersection(group.instances)
        blame = _blame(group) if group.has_stack else 0
        oddness.update((i, (blame, done.get(i, (0, 0)), len(members))) for i in members)
    if not oddness:
        return hung
    oddest = min(oddness.values())
    return tuple(index for index in sorted(oddness) if oddness[index] == oddest)


def _blame(group: StackGroup) -> int:
    """Return 0 for instances that do not wait, and more the more others they may wait for."""
    if not group.waits:
        innermost = next(iter(_main_frames(group.text)), None)
        return int(innermost is not None and bool(_BACKWARD_FILE.search(innermost.file)))
    return 2 if _MESSAGE.fullmatch(_waited_in(_main_frames(group.text))) else 3


def place(group: StackGroup) -> str:
    """Return where the main thread stands: ``waiting in Barrier (train.py:31)``."""
    frames = _main_frames(group.text)
    if not frames:
        return "its process is stopped" if _STATES["T"] in group.text else ""
    own = _own_frame(frames)
    where = f"{own.file.rpartition('/')[2]}:{own.line}"
    if group.waits:
        return f"waiting in {_waited_in(frames)} ({where})"
    source = own.source if len(own.source) <= _MOST_SOURCE else f"{own.source[:_MOST_SOURCE]}..."
    return f"at {where}: {source}" if source else f"at {where}"


def _waited_in(frames: Sequence[_Frame]) -> str:
    """Return the name of the call that waits: as the user's line has it, or the library's."""
    own = _own_frame(frames)
    for source in (own.source, frames[0].source):
        if found := _WAITING_LINE.search(source):
            return found[1]
    return frames[max(0, frames.index(own) - 1)].function


def _own_frame(frames: Sequence[_Frame]) -> _Frame:
    """Return the innermost frame of the user's own code, else the innermost."""
    return next((each for each in frames if not _LIBRARY_FILE.search(each.file)), frames[0])


def render_groups(groups: tuple[StackGroup, ...]) -> str:
    """Return one paragraph for each group of equal stacks."""
    paragraphs = []
    for group in groups:
        waits = ", waiting for others" if group.waits else ""
        names = ranges_text(group.instances)
        head = (
            f"{plural('instance', len(group.instances))} {names} ({len(group.instances)}){waits}:"
        )
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
        parts.append(title + text)
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


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str
    source: str  # its line; empty where the file cannot be read


def _main_frames(text: str) -> list[_Frame]:
    """Return the frames of the program's main thread, the innermost first."""
    program = text.partition("\nprocess 1, ")[0]
    lines = program.rpartition("(most recent call first):")[2].splitlines()
    frames = []
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if frame := _FRAME.match(line):
            source = "" if _FRAME.match(following) else following.strip()
            frames.append(_Frame(frame["file"], int(frame["line"]), frame["function"], source))
    return frames


def _waits(text: str) -> bool:
    """Tell whether the main thread of the program stands in a call that waits for others."""
    frames = [each for each in _main_frames(text) if not each.file.startswith(_IMPORT_FILE)]
    if frames and _is_waiting_line(frames[0]):
        return True
    return any(_WAITING_FILE.search(each.file) for each in frames[:_WAITING_FRAMES])


def _is_waiting_line(frame: _Frame) -> bool:
    """Tell whether the line waits for other instances, and not for a socket or a child process."""
    if _PYTHON_FILE.search(frame.file) or _SOCKET_LINE.search(frame.source):
        return False
    return bool(_WAITING_LINE.search(frame.source) or _MPI_START.search(frame.source))


def is_ending(group: StackGroup) -> bool:
    """Tell whether the interpreter of these instances is ending: it joins threads or runs atexit.

    The outermost frame is then no longer the program's. A very deep stack is cut and does not show
    its outermost frame: it counts as not ending.
    """
    program = group.text.partition("\nprocess 1, ")[0].rstrip()
    frames = _main_frames(program)
    if not frames:
        return program.endswith(_NO_FRAME)
    return not program.endswith("...") and frames[-1].function not in _PROGRAM_FUNCTIONS
