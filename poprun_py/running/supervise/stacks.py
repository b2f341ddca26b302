"""Collection, grouping and text of the Python stacks of all instances.

The stacks also tell which instances wait for others, and which instances the others wait for. The
methods take the current time as an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from popdist_py.errors import plural
from poprun_py.display.formatting import ranges_text
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.launch_result import StackGroup

if TYPE_CHECKING:
    from poprun_py.running.supervise.control_channel import ControlChannel

_MAX_SOURCE_LENGTH = 60
# Instances answer within milliseconds, unless they or their hosts are overloaded.
_ANSWER_SECONDS = 3.0

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Files and source lines of calls that wait for other instances. Importing mpi4py.MPI starts
# MPI, which may also wait; popdist_mpi_finder wraps that import.
_WAITING_FILE = re.compile(
    r"popdist_py/(collective|torch_backend|horovod)|/torch/distributed/|/mpi4py/"
    r"|/popdist_mpi_finder\.py$"
)
_WAITING_LINE = re.compile(
    r"\b((i?barrier|i?all_?reduce|i?all_?gather|i?broadcast|i?bcast|i?reduce|recv|sendrecv|"
    r"synchronize|stopRequested)\w*|wait(all|any|some)?|[bsr]?send|i?all_?to_?all[vw]?|m?probe"
    # The pattern does not match waitpid. The next line adds all methods of communicators and of
    # MPI.
    r"|(?:(?<=\bcomm\.)|(?<=_comm\.)|(?<=\bCOMM_WORLD\.)|(?<=\bMPI\.))\w+)\(",
    re.IGNORECASE,
)
_MPI_START = re.compile(r"\bfrom mpi4py import\b.*\bMPI\b|\bimport mpi4py\.MPI\b")
# Methods of sockets and pipes with the same names, such as recv. They wait for a server or a child
# process, not for an instance. In Python's own modules, calls with these names never wait for
# another instance.
_SOCKET_LINE = re.compile(
    r"(\bs|(sock|conn|client|server|pipe|reader|writer|channel|request)\w*)\.(recv|send)\w*\(",
    re.IGNORECASE,
)
_PYTHON_FILE = re.compile(r"/lib/python\d[^/]*/(?!(site|dist)-packages/)")
# The beginning of the file names in Python's own frames between an import statement and the
# imported module.
_IMPORT_FILE = "<frozen importlib"
# faulthandler's text for a thread that is not running Python.
_NO_FRAME = "<no Python frame>"
# The outermost frame of the main thread is one of these until the program ends.
_PROGRAM_FUNCTIONS = ("<module>", "_run_module_as_main")
# Calls that wait for one other instance. All other waiting calls wait for all instances.
_MESSAGE = re.compile(r"i?m?(recv|send|probe)\w*|i?[bsr]send", re.IGNORECASE)
# Files whose code runs the backward pass of a model. The pass computes or, in
# DistributedDataParallel, waits in C++.
_BACKWARD_FILE = re.compile(r"/torch/autograd/")
# Files outside the user's own code, whose lines tell the user little.
_LIBRARY_FILE = re.compile(r"/lib/python\d|/(site|dist)-packages/|/p(opdist|oprun)_py/|^<")
_WAITING_FRAMES = 4

Processes = list[dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Collection:
    missing: set[int]  # the instances that have not answered yet
    deadline: float  # when the launcher stops waiting for stacks of instances
    reply: Callable[[tuple[StackGroup, ...]], None]
    answers: dict[int, Processes | None] = field(default_factory=dict)


class StackCollector:
    """Collects the stacks of all running instances, perhaps for several callers at a time."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._collections: list[_Collection] = []

    def collect(self, reply: Callable[[tuple[StackGroup, ...]], None], now: float) -> None:
        """Request the stacks of every instance; ``reply`` gets them later, in groups."""
        peers = self._control.peers.values()
        members = sorted(p.index for p in peers if p.instance_end is None and p.started)
        self._collections.append(_Collection(set(members), now + _ANSWER_SECONDS, reply))
        for index in members:
            self._control.send_to(index, control_protocol.DUMP_STACKS, None)

    def take(self, index: int, processes: Processes | None) -> None:
        """Record an instance's answer; ``processes`` is None if its wrapper has ended."""
        for collection in self._collections:
            if index in collection.missing:
                collection.missing.discard(index)
                collection.answers[index] = processes

    def next_deadline(self) -> float:
        """Return the time when a collection ends; inf for never."""
        ends = (each.deadline if each.missing else float("-inf") for each in self._collections)
        return min(ends, default=float("inf"))

    def on_time(self, now: float) -> None:
        """End each collection that is complete, or has reached its deadline."""
        if now < self.next_deadline():
            return
        ended = [each for each in self._collections if not each.missing or now >= each.deadline]
        self._collections = [each for each in self._collections if each not in ended]
        for each in ended:
            each.answers.update(dict.fromkeys(each.missing))
            each.reply(group_stacks(each.answers))


def group_stacks(answers: Mapping[int, Any]) -> tuple[StackGroup, ...]:
    """Return groups of instances with equal stacks, the smallest groups first.

    ``answers`` has the ``processes`` in each wrapper's answer; None if a wrapper did not answer.
    """
    alike: dict[str, list[int]] = {}
    for index, processes in sorted(answers.items()):
        alike.setdefault(_normal_text(processes), []).append(index)
    # Source files are read once for all instances with equal stacks.
    groups: dict[tuple[str, bool], list[int]] = {}
    for bare, members in alike.items():
        text = _with_sources(bare)
        groups.setdefault((text, _waits(text)), []).extend(members)
    return tuple(
        StackGroup(instances=tuple(members), text=text, waits=waits)
        for (text, waits), members in sorted(groups.items(), key=lambda g: (g[0][1], len(g[1])))
    )


def blocking_by_steps(
    hung: tuple[int, ...], done: Mapping[int, tuple[int, int]], groups: tuple[StackGroup, ...]
) -> tuple[int, ...]:
    """Return the instances that the ``hung`` instances are waiting for.

    The candidates are the hung instances that do not wait in a collective. If all hung instances
    wait, the candidates are the other instances that do not wait, because one of these may have
    made its last step a moment later. The result is the candidates with the fewest steps.

    ``done`` has each instance's number of training steps, and of other calls since the last step.
    """
    waiting = {index for group in groups if group.waits for index in group.instances}
    others = [index for group in groups if not group.waits for index in group.instances]
    suspects = [index for index in hung if index not in waiting] or others or list(hung)
    fewest = min(done.get(index, (0, 0)) for index in suspects)
    return tuple(index for index in suspects if done.get(index, (0, 0)) == fewest)


def blocking_by_stacks(
    hung: tuple[int, ...], done: Mapping[int, tuple[int, int]], groups: tuple[StackGroup, ...]
) -> tuple[int, ...]:
    """Return the ``hung`` instances that the others are waiting for, in a job without steps.

    An instance that does not wait at all comes first. Then come instances in a backward pass,
    instances that wait for a message, and instances in a collective. Among instances that are equal
    in this, the fewest collectives in ``done`` decide, and then the rarest stacks.
    """
    all_hung = frozenset(hung)
    rank: dict[int, tuple[int, tuple[int, int], int]] = {}
    for group in groups:
        members = all_hung.intersection(group.instances)
        waiting = _waiting_rank(group) if group.has_stack else 0
        rank.update((i, (waiting, done.get(i, (0, 0)), len(members))) for i in members)
    if not rank:
        return hung
    first = min(rank.values())
    return tuple(index for index in sorted(rank) if rank[index] == first)


def _waiting_rank(group: StackGroup) -> int:
    """Return a rank from 0, for instances that do not wait, to 3, if they wait for all others."""
    if not group.waits:
        innermost = next(iter(_main_frames(group.text)), None)
        return int(innermost is not None and bool(_BACKWARD_FILE.search(innermost.file)))
    return 2 if _MESSAGE.fullmatch(_waiting_call(_main_frames(group.text))) else 3


def stack_place(group: StackGroup) -> str:
    """Return where the main thread is, such as ``waiting in Barrier (train.py:31)``."""
    frames = _main_frames(group.text)
    if not frames:
        return "its process is stopped" if _STATES["T"] in group.text else ""
    own = _own_frame(frames)
    where = f"{own.file.rpartition('/')[2]}:{own.line}"
    if group.waits:
        return f"waiting in {_waiting_call(frames)} ({where})"
    source = own.source
    if len(source) > _MAX_SOURCE_LENGTH:
        source = f"{source[:_MAX_SOURCE_LENGTH]}..."
    return f"at {where}: {source}" if source else f"at {where}"


def _waiting_call(frames: Sequence[_Frame]) -> str:
    """Return the name of the waiting call, from the user's source line or from the library."""
    own = _own_frame(frames)
    for source in (own.source, frames[0].source):
        if found := _WAITING_LINE.search(source):
            return found[1]
    return frames[max(0, frames.index(own) - 1)].function


def _own_frame(frames: Sequence[_Frame]) -> _Frame:
    """Return the innermost frame of the user's own code; if it has none, the innermost frame."""
    return next((each for each in frames if not _LIBRARY_FILE.search(each.file)), frames[0])


def groups_text(groups: tuple[StackGroup, ...]) -> str:
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
    """Return an instance's stacks as text, without thread addresses, so that equal stacks match."""
    if processes is None:
        return "no answer from the instance's wrapper"
    parts = []
    for number, process in enumerate(processes):
        title = f"process {number}, started by the program:\n" if number else ""
        text = process["text"].strip("\n")
        if not text:
            reason = _STATES.get(process["state"], "no Python program, or one that is ending")
            text = f"no Python stack ({reason})"
        text = re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", "thread", text)
        parts.append(title + text)
    return "\n".join(parts)


_STATES = {"T": "the process is stopped", "t": "the process is being traced", "Z": "it has ended"}


def _with_sources(text: str) -> str:
    """Return stacks with the source line of every frame whose file is readable on this host."""
    import linecache  # imported here because few jobs need it

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
    source: str  # the source line; empty if the file cannot be read


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
    """Tell whether the main thread of the program is in a call that waits for other instances."""
    frames = [each for each in _main_frames(text) if not each.file.startswith(_IMPORT_FILE)]
    if frames and _is_waiting_line(frames[0]):
        return True
    return any(_WAITING_FILE.search(each.file) for each in frames[:_WAITING_FRAMES])


def _is_waiting_line(frame: _Frame) -> bool:
    """Tell whether a line waits for other instances, not for a socket or a child process."""
    if _PYTHON_FILE.search(frame.file) or _SOCKET_LINE.search(frame.source):
        return False
    return bool(_WAITING_LINE.search(frame.source) or _MPI_START.search(frame.source))


def is_ending(group: StackGroup) -> bool:
    """Tell whether the interpreters of these instances join threads or run atexit functions.

    In an interpreter that does so, the outermost frame no longer belongs to the program. The text
    of a very deep stack does not contain the outermost frame, so the instance does not count as
    ending.
    """
    program = group.text.partition("\nprocess 1, ")[0].rstrip()
    frames = _main_frames(program)
    if not frames:
        return program.endswith(_NO_FRAME)
    return not program.endswith("...") and frames[-1].function not in _PROGRAM_FUNCTIONS
