"""The description of a job that the supervisor runs, with its command, hosts, limits and files."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from popdist_py.environment import CALL, CALL_FILES, RUN_FILE_MIB, RUN_FILES, TIMELINE
from poprun_py.instance.control_protocol import LOST_AFTER_SECONDS

if TYPE_CHECKING:
    from poprun_py.running.watch.records import Recorder

# The limit for a timeline's files is this many times the size of the spans, because traces of
# torch.profiler are sent as well.
_MOST_SENT: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlace:
    """The folder for one kind of files, which are named ``instance-N.NAME``.

    Attributes:
        variable: The environment variable that gives a program the path up to ``instance-N``.
        names: The pattern that NAME has to match.
        most_bytes: The maximum total size of the files that an instance on another host may send.
        value_start: The text before the path in the value of the environment variable ``variable``.
    """

    folder: Path
    variable: str
    names: re.Pattern[str]
    most_bytes: int
    value_start: str = ""

    def prefix(self, instance: int) -> Path:
        """Return the beginning of the paths of an instance's files."""
        return self.folder / f"instance-{instance}"


def place_of_run(folder: Path) -> FilePlace:
    """Return the place for recorded values and device documents in the folder of an attempt."""
    names = re.compile(r"values\.jsonl|device\.json")
    most = 2 * RUN_FILE_MIB << 20  # two files
    return FilePlace(folder=folder, variable=RUN_FILES, names=names, most_bytes=most)


def place_of_spans(folder: Path, instance_bytes: int) -> FilePlace:
    """Return the place for a timeline's files, with ``instance_bytes`` of spans per instance."""
    return FilePlace(
        folder=folder,
        variable=TIMELINE,
        value_start=f"{instance_bytes}:",
        names=re.compile(r"\d+\.spans|ended|torch-\d+-\d+\.json"),
        most_bytes=_MOST_SENT * instance_bytes,
    )


def place_of_call(folder: Path, restart_count: int) -> FilePlace:
    """Return the place for the results of a called function, in the folder of the call.

    The size of the results of a function is not limited.
    """
    return FilePlace(
        folder=folder / f"attempt-{restart_count}",
        variable=CALL_FILES,
        names=re.compile(r"result|failure"),
        most_bytes=sys.maxsize,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command that starts all instances.

    Attributes:
        variables: For each instance, the environment variables that are sent over the control
            channel, so that no command line shows them; the value None unsets a variable.
        words_for: Returns the words of the command that starts only some of the instances, under
            wrappers that may run any instance later; None if there is no such command.
        stdin_instance: The instance that reads standard input.
        end_signal: The signal that makes mpirun clean up and end. mpirun blocks the other signals
            that end processes.
    """

    words: tuple[str, ...]
    # ``environ`` and ``variables`` contain secrets, so the repr() of a command omits them.
    environ: Mapping[str, str] = field(repr=False)
    variables: tuple[Mapping[str, str | None], ...] = field(repr=False)
    words_for: Callable[[Sequence[int]], tuple[str, ...]] | None = None
    stdin_instance: int = 0
    end_signal: int = signal.SIGTERM

    def environ_of(self, instance: int) -> dict[str, str]:
        """Return the environment variables of an instance, if it is on this host."""
        merged = {**self.environ, **self.variables[instance]}
        return {name: value for name, value in merged.items() if value is not None}

    def resetting(self, names: Collection[str]) -> Command:
        """Return the command with the launcher's own values of variables that it does not set.

        A wrapper of an earlier attempt has the variables ``names`` of an earlier command.
        """
        own = {name: self.environ.get(name) for name in names}
        return replace(self, variables=tuple({**own, **each} for each in self.variables))


class HostChanges(Protocol):
    """Decides which hosts a running job may use from its next attempt on.

    The methods ``ask_lost`` and ``ask_new`` run in a child process, because a host may take seconds
    to answer. Their texts go to the other methods.
    """

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for hosts that it has lost."""

    def next_job(self) -> Job | None:
        """Return the next attempt on all hosts that can be used; None if it has no plan."""

    def wait_again(self, problem: str) -> bool:
        """Wait again for the hosts that are back, because of a problem; return whether it waits."""

    def ask_lost(self) -> str:
        """Ask the lost hosts whether they can run the job."""

    def ask_new(self, name: str, *, has_model: bool) -> str:
        """Ask a host whether it can run the job.

        ``has_model`` tells whether the running program has a PopTorch model.

        Raises:
            StartError: The host cannot be taken in.
        """

    def take_lost(self, answer: str) -> str:
        """Note the hosts that can run the job; return why the attempt ends, or an empty text."""

    def take_new(self, answer: str, *, is_problem: bool) -> tuple[str, str]:
        """Note the answer about a new host, or the problem that prevents its use.

        Returns:
            The reason why the attempt ends, or an empty text; and the reply to the user, as JSON.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of a job; the defaults are for a job on this host only.

    Attributes:
        listen: The address of this machine to which the other hosts connect; None without other
            hosts.
        network: The network of mpirun's listening ports; None for all networks.
        names: For each instance, the name of its host, as the host itself reports the name; empty
            if the name is unknown.
        given: For each instance, the name of its host in the options.
        others: The instances on other hosts.
        leases: For some instances, the request for a lease on their hosts. The hosts take the
            leases before any program of the job starts.
        refusal_of: A function of an instance and its host's answer to the lease request, which
            returns why the job cannot start, or an empty text.
        explain_failed_start: A function that raises StartError with the reason why the job does not
            start, or returns possible problems of the hosts; None for a job on this host only.
        changes: The object that decides which hosts later attempts use; None if all attempts use
            the same hosts.
        keeps_state: Whether the programs keep their newest state in memory, so that an attempt may
            be ended at any time.
        lost_after: The seconds of silence after which another host counts as lost.
    """

    listen: str | None = None
    network: str | None = None
    names: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    others: frozenset[int] = frozenset()
    leases: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    refusal_of: Callable[[int, dict[str, Any]], str] = lambda *_: ""
    explain_failed_start: Callable[[], str] | None = None
    changes: HostChanges | None = None
    keeps_state: bool = False
    lost_after: float = LOST_AFTER_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """The time limits of a job, in seconds.

    Attributes:
        timeout: The time limit of the whole job; None for no time limit.
        spent: The part of ``timeout`` that earlier attempts have used.
        hang_timeout: The longest time without progress, or "auto"; None turns hang detection off.
        grace: The time between asking a program to end and killing it.
    """

    timeout: float | None = None
    spent: float = 0
    hang_timeout: float | str | None = None
    grace: float = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """The files of a job; None for a file that the job does not need.

    Attributes:
        output_dir: An existing folder for the output of the instances.
        output_limit: The maximum size of the output files of each instance, in bytes; None for no
            limit.
        places: The places for the files that programs leave. No file name matches the ``names`` of
            two places.
        spans: The folder of the timeline's spans.
        call: A file that every program reads. The launcher sends this file to the other hosts.
        checkpoint_memory: The path, on every host, of the folder for states of the training in
            memory. A program makes this folder when it saves the first state.
    """

    output_dir: str | None = None
    output_limit: int | None = None
    places: tuple[FilePlace, ...] = ()
    spans: Path | None = None
    call: Path | None = None
    checkpoint_memory: str | None = None

    def variables(self, instance: int) -> dict[str, str]:
        """Return the variables with the paths of an instance's files, if it is on this host."""
        variables = {
            each.variable: each.value_start + _absolute(each.prefix(instance))
            for each in self.places
        }
        return variables if self.call is None else {**variables, CALL: _absolute(self.call)}

    def settings(self, instance: int, *, is_other: bool) -> dict[str, Any]:
        """Return the settings for files that a wrapper gets before its program starts.

        A wrapper on another host chooses the path in each environment variable, so the wrapper gets
        only the text before the path. With a timeline, a wrapper on this host gets the path of the
        spans, and other wrappers get an empty path.
        """
        values: dict[str, Any] = {}
        if is_other and self.places:
            values["files"] = {each.variable: each.value_start for each in self.places}
        for each in self.places:
            if each.variable == TIMELINE:
                values["spans"] = "" if is_other else _absolute(each.prefix(instance))
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchers:
    """The output and the records of a job, and its description for inspections.

    Attributes:
        output: The form of the instances' output, such as "tag".
        only_output_from: The instances whose output is shown; None for all.
        live: Whether the terminal shows a live view of the instances.
        recorders: The recorders of every training step and of the states of the instances.
        run_id: The name of the run.
        labels: The tags and the note of the run, which --status shows.
        ipus: For each instance, its emulated IPUs, numbered within the partition.
        partition: The name of the partition; None without one.
    """

    output: str = "tag"
    only_output_from: frozenset[int] | None = None
    live: bool = False
    recorders: tuple[Recorder, ...] = ()
    run_id: str = ""
    program: str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)
    ipus: tuple[range, ...] = ()
    partition: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One attempt at a launch, as the supervisor runs it."""

    command: Command
    hosts: Hosts = Hosts()
    limits: JobLimits = JobLimits()
    files: JobFiles = JobFiles()
    watchers: Watchers = Watchers()

    @property
    def num_instances(self) -> int:
        """The number of instances."""
        return len(self.command.variables)


def _absolute(path: Path) -> str:
    # The path stays valid if the program changes its working folder.
    return os.path.abspath(path)  # noqa: PTH100 (keeps symbolic links)
