"""Collection, grouping and text of the Python stacks of all instances.

The stacks also show which instances wait for other instances, and for which instances they wait.
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
# Wrappers answer a request for stacks within milliseconds, unless their hosts are overloaded.
_ANSWER_SECONDS = 3.0

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Patterns of files and source lines of calls that wait for other instances. The import of
# mpi4py.MPI starts MPI and may also wait; popdist_mpi_sockets wraps this import.
_WAITING_FILE = re.compile(
    r"popdist_py/((public_)?collectives|torch_backend|horovod)|/torch/distributed/|/mpi4py/"
    r"|/popdist_mpi_sockets\.py$"
)
_WAITING_LINE = re.compile(
    r"\b((i?barrier|i?all_?reduce|i?all_?gather|i?broadcast|i?bcast|i?reduce|recv|sendrecv|"
    r"synchronize|stopRequested)\w*|wait(all|any|some)?|[bsr]?send|i?all_?to_?all[vw]?|m?probe"
    # The lines above do not match waitpid. The next line matches every method of a communicator and
    # of the module MPI.
    r"|(?:(?<=\bcomm\.)|(?<=_comm\.)|(?<=\bCOMM_WORLD\.)|(?<=\bMPI\.))\w+)\(",
    re.IGNORECASE,
)
_MPI_START = re.compile(r"\bfrom mpi4py import\b.*\bMPI\b|\bimport mpi4py\.MPI\b")
# Sockets and pipes have methods with the same names as MPI's, such as recv. These methods wait for
# a server or a child process, not for an instance. In Python's own modules, calls with these names
# never wait for another instance.
_SOCKET_LINE = re.compile(
    r"(\bs|(sock|conn|client|server|pipe|reader|writer|channel|request)\w*)\.(recv|send)\w*\(",
    re.IGNORECASE,
)
_PYTHON_FILE = re.compile(r"/lib/python\d[^/]*/(?!(site|dist)-packages/)")
# The frames of Python's import system, between an import statement and the imported module, have
# file names that begin with this text.
_IMPORT_FILE = "<frozen importlib"
# The text that faulthandler writes for a thread that is not running Python code.
_NO_FRAME = "<no Python frame>"
# Until a program ends, the outermost frame of its main thread is in one of these functions.
_PROGRAM_FUNCTIONS = ("<module>", "_run_module_as_main")
# Calls that wait for one other instance. All other waiting calls wait for all instances.
_MESSAGE = re.compile(r"i?m?(recv|send|probe)\w*|i?[bsr]send", re.IGNORECASE)
# Files whose code runs the backward pass of a model. A backward pass either computes or, with
# DistributedDataParallel, waits for other instances in C++.
_BACKWARD_FILE = re.compile(r"/torch/autograd/")
# Files outside the user's own code, whose lines tell the user little.
_LIBRARY_FILE = re.compile(r"/lib/python\d|/(site|dist)-packages/|/p(opdist|oprun)_py/|^<")
_WAITING_FRAMES = 4

Processes = list[dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Collection:
    missing: set[int]  # the instances that have not answered yet
    deadline: float  # when the launcher stops waiting for answers
    reply: Callable[[tuple[StackGroup, ...]], None]
    answers: dict[int, Processes | None] = field(default_factory=dict)


class StackCollector:
    """Collects the stacks of all running instances, perhaps for several callers at a time."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._collections: list[_Collection] = []

    def collect(self, reply: Callable[[tuple[StackGroup, ...]], None], now: float) -> None:
        """Request the stacks of every instance; call ``reply`` with the groups of stacks later."""
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
        """Return the time when the next collection of stacks ends; inf without a collection."""
        ends = (each.deadline if each.missing else float("-inf") for each in self._collections)
        return min(ends, default=float("inf"))

    def on_time(self, now: float) -> None:
        """End each collection of stacks that is complete or has reached its deadline."""
        if now < self.next_deadline():
            return
        ended = [each for each in self._collections if not each.missing or now >= each.deadline]
        self._collections = [each for each in self._collections if each not in ended]
        for each in ended:
            each.answers.update(dict.fromkeys(each.missing))
            each.reply(group_stacks(each.answers))


def group_stacks(answers: Mapping[int, Any]) -> tuple[StackGroup, ...]:
    """Return groups of instances with equal stacks, sorted by whether they wait, then by size.

    ``answers`` maps an instance to the ``processes`` in its wrapper's answer, or to None.
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

    The candidates are the hung instances that do not wait for other instances. If all hung
    instances wait, the candidates are all instances that do not wait, because their last steps may
    be too recent for a hang. The result is the candidates with the fewest steps.

    ``done`` maps an instance to its numbers of training steps and of other calls since then.
    """
    waiting = {index for group in groups if group.waits for index in group.instances}
    others = [index for group in groups if not group.waits for index in group.instances]
    suspects = [index for index in hung if index not in waiting] or others or list(hung)
    fewest = min(done.get(index, (0, 0)) for index in suspects)
    return tuple(index for index in suspects if done.get(index, (0, 0)) == fewest)


def blocking_by_stacks(
    hung: tuple[int, ...], done: Mapping[int, tuple[int, int]], groups: tuple[StackGroup, ...]
) -> tuple[int, ...]:
    """Return the ``hung`` instances that other instances wait for, in a job without steps.

    The result is the instances that come first in this order: instances that do not wait, instances
    in a backward pass, instances that wait for a message, instances in a collective. Among equals,
    the instances with the fewest collectives in ``done`` come first, then the rarest stacks.
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
    """Return 0 if a group does not wait, 1 in a backward pass, 2 for a message, else 3."""
    if not group.waits:
        innermost = next(iter(_main_frames(group.text)), None)
        return int(innermost is not None and bool(_BACKWARD_FILE.search(innermost.file)))
    return 2 if _MESSAGE.fullmatch(_waiting_call(_main_frames(group.text))) else 3


def stack_place(group: StackGroup) -> str:
    """Return the place of the main thread, such as ``waiting in Barrier (train.py:31)``."""
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
    """Return the name of the call that waits for other instances, such as ``Barrier``."""
    own = _own_frame(frames)
    for source in (own.source, frames[0].source):
        if found := _WAITING_LINE.search(source):
            return found[1]
    return frames[max(0, frames.index(own) - 1)].function


def _own_frame(frames: Sequence[_Frame]) -> _Frame:
    """Return the innermost frame of the user's own code, or else the innermost of all frames."""
    return next((each for each in frames if not _LIBRARY_FILE.search(each.file)), frames[0])


def groups_text(groups: tuple[StackGroup, ...]) -> str:
    """Return text with one paragraph for each group of instances with equal stacks."""
    paragraphs = []
    for group in groups:
        waits = ", waiting for other instances" if group.waits else ""
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
            reason = _STATES.get(
                process["state"], "the process runs no Python program, or is ending"
            )
            text = f"no Python stack ({reason})"
        text = re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", "thread", text)
        parts.append(title + text)
    return "\n".join(parts)


_STATES = {
    "T": "the process is stopped",
    "t": "the process is being traced",
    "Z": "the process has ended",
}


def _with_sources(text: str) -> str:
    """Return stacks, with the source line of every frame whose file is readable on this host."""
    import linecache  # imported here, because few jobs need linecache

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
    """Tell whether a frame waits for other instances, not for a socket or a child process."""
    if _PYTHON_FILE.search(frame.file) or _SOCKET_LINE.search(frame.source):
        return False
    return bool(_WAITING_LINE.search(frame.source) or _MPI_START.search(frame.source))


def is_ending(group: StackGroup) -> bool:
    """Tell whether the programs of a group are ending: they join threads or run atexit functions.

    In an ending interpreter, the outermost frame does not belong to the program. The text of a very
    deep stack lacks the outermost frame, so programs with such stacks do not count as ending.
    """
    program = group.text.partition("\nprocess 1, ")[0].rstrip()
    frames = _main_frames(program)
    if not frames:
        return program.endswith(_NO_FRAME)
    return not program.endswith("...") and frames[-1].function not in _PROGRAM_FUNCTIONS
