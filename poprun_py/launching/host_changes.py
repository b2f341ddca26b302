"""The hosts of a job over all of its attempts, with lost hosts, hosts that return and added hosts.

After the loss of a host, the job goes on with the hosts that are left (--allow-fewer-hosts), or
waits for the lost host (--wait-for-hosts). When a host returns, or a user adds one (--add-host),
the launcher ends the attempt at a state that the next attempt can load.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from popdist_py.errors import counted, plural
from poprun_py.display.formatting import read_json
from poprun_py.errors import StartError, UsageError
from poprun_py.launching.replanning import change_text, plan_on_hosts
from poprun_py.machines.host_list import Host
from poprun_py.options.option_types import FOREVER
from poprun_py.planning.hosts_and_mpi import hosts_of
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job_description import Hosts, Job
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.running.supervise.other_hosts import HostWatch
from poprun_py.terminal import Console

# The seconds in which a lost host may answer before the job goes on without it. All processes on a
# host may have been killed, although the host itself can be used. A job that keeps its wrappers
# goes on at once, because it can use the host later at a small cost.
_ANSWER_SECONDS = 1.5
_POLL_SECONDS = 0.1
# A silent host counts as lost after these seconds if the job then restarts from a state in memory
# and without the host. A late guess costs more than a restart, and a wrong guess costs one restart,
# or two if the job takes the host in again. Without --wait-for-hosts, the host is lost for good, so
# the time is longer.
_LOST_FOR_NOW_SECONDS, _LOST_FOR_GOOD_SECONDS = 3.0, 5.0


class JobHosts:
    """The hosts of one job, as ``supervise.job_description.HostChanges``.

    Args:
        first: The plan of the first attempt, to which the job returns when all hosts are back.
        console: The console that prints warnings and messages about the hosts.
        cpus: The CPUs that the job has leased on this machine.

    Attributes:
        plan: The plan of the current attempt, or of the next one after ``choose``.
    """

    def __init__(self, first: LaunchPlan, console: Console, cpus: tuple[int, ...]) -> None:
        self.plan = self._first = first
        self._console = console
        self._cpus = cpus
        self._known = list(first.topology.hosts)
        # The names of the hosts that are not lost, including hosts that the plan does not use; of
        # the awaited hosts, with the times when they were lost; and of the hosts that the next
        # attempt may use in addition.
        self._present = self._names(first)
        self._awaited: dict[str, float] = {}
        self._back: list[str] = []
        self._told: dict[str, str] = {}  # the last problem of each host that the user knows
        self._has_model = False
        self._job_of: Callable[[LaunchPlan], Job]
        wait = first.config.wait_for_hosts
        self._wait_seconds = math.inf if wait == FOREVER else float(wait or 0)

    @property
    def _keeps_wrappers(self) -> bool:
        """Whether wrappers may stay from one attempt to the next, with their leases of CPUs."""
        return self._first.config.memory_checkpoints

    @staticmethod
    def _names(planned: LaunchPlan) -> list[str]:
        return [host.name for host in planned.topology.hosts]

    def changeable(self, hosts: Hosts, job_of: Callable[[LaunchPlan], Job]) -> Hosts:
        """Return the supervisor's description of hosts, with the changes that this job permits.

        ``job_of`` returns the job of the next attempt by its plan.
        """
        self._job_of = job_of
        config, lost_after = self._first.config, hosts.lost_after
        if config.memory_checkpoints and self._wait_seconds:
            lost_after = _LOST_FOR_NOW_SECONDS
        elif config.memory_checkpoints and config.allow_fewer_hosts:
            lost_after = _LOST_FOR_GOOD_SECONDS
        return replace(
            hosts, changes=self, keeps_state=config.memory_checkpoints, lost_after=lost_after
        )

    # --- between two attempts -----------------------------------------------------------------

    def note_end(self, result: LaunchResult, lost: Sequence[Host]) -> None:
        """Note the hosts that an attempt has lost, and the kind of its program."""
        self._has_model = self._has_model or any(each.has_model for each in result.instances)
        gone = [host.name for host in lost]
        # An attempt also runs on hosts that were lost before, if the job could not do without them.
        used = [name for name in self._names(self.plan) if name not in self._present]
        self._present = [name for name in (*self._present, *used) if name not in gone]
        if self._wait_seconds:
            self._awaited |= dict.fromkeys(gone, time.monotonic())

    @property
    def lacks_hosts(self) -> bool:
        """Whether the next attempt cannot begin before an awaited host is back."""
        lost = set(self._names(self.plan)).difference(self._present)
        return self.is_waiting and not lost.isdisjoint(self._awaited)

    def choose(self, pause: Callable[[float], int], may_wait: Callable[[], bool]) -> int:
        """Choose the hosts of the next attempt, and wait for awaited hosts that it needs.

        ``pause`` waits for some seconds, and returns the number of a signal that ended the wait, or
        0. ``may_wait`` tells whether the job's time limit permits to wait longer.

        Returns:
            0, or the number of the signal that ended the wait.
        """
        began = time.monotonic()
        watch = HostWatch(self, lambda _: None)
        try:
            may_answer = not (self._keeps_wrappers and self._first.config.allow_fewer_hosts)
            while may_answer and self.lacks_hosts and time.monotonic() < began + _ANSWER_SECONDS:
                if number := pause(_POLL_SECONDS):
                    return number
                watch.on_time(time.monotonic())
            self._replan()
            if self.lacks_hosts:
                self._console.warn(
                    "waiting until the lost hosts can be used again (--wait-for-hosts)"
                )
            num_tried = len(self._back)
            while self.lacks_hosts and may_wait():
                if number := pause(_POLL_SECONDS):
                    return number
                watch.on_time(time.monotonic())
                if len(self._back) > num_tried:
                    self._replan()
                    num_tried = len(self._back)
        finally:
            watch.end()
        return 0

    def _replan(self) -> None:
        """Plan the next attempt without lost hosts, and with hosts that are back.

        If that is not possible, warn and keep the plan.
        """
        names, before = [*self._present, *self._back], self.plan
        lost = sorted(set(self._names(before)).difference(names))
        if lost and not (names and self._first.config.allow_fewer_hosts):
            return
        if not lost and not self._back:
            return
        joined, self._back = self._back, []
        try:
            self.plan = self._plan_on(names)
        except (UsageError, StartError) as error:
            if lost:
                without = ", ".join(lost)
                self._console.warn(
                    f"the job cannot continue without {plural('host', len(lost))} {without}: "
                    f"{error}"
                )
                self._back = joined
            else:
                self._console.warn(
                    f"the job does not use {plural('host', len(joined))} {', '.join(joined)}: "
                    f"{error}"
                )
            return
        self._present = names
        change = change_text(before, self.plan)
        parts = [f"without {plural('host', len(lost))} {', '.join(lost)}"] if lost else []
        parts += [f"with {plural('host', len(joined))} {', '.join(joined)}"] if joined else []
        tell = self._console.warn if lost or self.plan.config.oversubscribe else self._console.tell
        tell(f"the job continues {' and '.join(parts)}{f': {change}' if change else ''}")

    def _plan_on(self, names: Sequence[str]) -> LaunchPlan:
        hosts = tuple(host for host in self._known if host.name in names)
        for planned in (self.plan, self._first):
            if hosts == planned.topology.hosts:
                return planned
        return self._plan(hosts, contact=not self._keeps_wrappers)

    def _plan(self, hosts: Sequence[Host], *, contact: bool) -> LaunchPlan:
        return plan_on_hosts(
            self._first,
            hosts,
            may_change=self._has_model,
            cpus=self._cpus,
            own=self._present if self._keeps_wrappers else (),
            contact=contact,
        )

    def _check_use(self, names: Sequence[str]) -> None:
        """Check that the job can use some of these hosts in addition to those that are not lost.

        Raises:
            UsageError: The job does not fit on the hosts, or cannot be divided over them.
            StartError: A host cannot be used, or other jobs hold its cores.
        """
        usable = [*self._present, *names]
        hosts = [host for host in self._known if host.name in usable]
        planned = self._plan(hosts, contact=True)
        if not set(names).intersection(self._names(planned)):
            topology = self._first.topology
            raise UsageError(
                f"{counted(topology.num_instances, 'instance')} with "
                f"{counted(topology.num_replicas, 'replica')} cannot be split evenly over "
                f"{counted(len(hosts), 'host')}"
            )

    def silent_hosts(self) -> list[Host]:
        """Return the hosts of the plan that do not answer, or that cannot run the job."""
        others = [host for host in self.plan.topology.hosts if not host.is_local]
        problems = self._problems(others) if others else {}
        return [host for host in others if host.name in problems]

    # --- while an attempt runs: job_description.HostChanges ------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether the job waits for hosts that it has lost."""
        now = time.monotonic()
        for name, since in list(self._awaited.items()):
            if now > since + self._wait_seconds:
                del self._awaited[name]
                option = self._first.config.shown("wait_for_hosts")
                self._console.warn(
                    f"the job no longer waits for host {name}, because the time of {option} is over"
                )
        return bool(self._awaited)

    def next_job(self) -> Job | None:
        """Return the next attempt on all hosts that can be used; None if it has no plan."""
        try:
            return self._job_of(self._plan_on([*self._present, *self._back]))
        except (UsageError, StartError):
            return None

    def wait_again(self, problem: str) -> bool:
        """Wait again for the hosts that are back, because of a problem; return whether it waits."""
        if not self._wait_seconds or not self._back:
            return False
        self._console.warn(
            f"the job cannot use {plural('host', len(self._back))} {', '.join(self._back)}: "
            f"{problem}"
        )
        self._awaited |= dict.fromkeys(self._back, time.monotonic())
        self._back.clear()
        return True

    def ask_lost(self) -> str:
        """Ask the awaited hosts whether they can run the job; return their problems as JSON."""
        hosts = [host for host in self._known if host.name in self._awaited]
        problems = self._problems(hosts)
        able = [host.name for host in hosts if host.name not in problems]
        needs_more = set(self._names(self.plan)).difference([*self._present, *able])
        if able and not needs_more:
            try:
                self._check_use(able)
            except (UsageError, StartError) as error:
                problems |= {name: {"text": str(error), "is_reached": True} for name in able}
        return json.dumps(problems)

    def take_lost(self, answer: str) -> str:
        """Note the hosts that can run the job; return why the attempt ends, or an empty text."""
        try:
            problems: Mapping[str, Any] = read_json(answer)
        except ValueError:
            return ""
        for name, problem in problems.items():
            text = problem["text"]
            if self._told.get(name) != text:
                self._told[name] = text
                tell = self._console.warn if problem["is_reached"] else self._console.log
                tell(f"host {name} is not used: {text}")
        back = [name for name in self._awaited if name not in problems]
        for name in back:
            del self._awaited[name]
            self._told.pop(name, None)
        self._back += back
        return f"{plural('host', len(back))} {', '.join(back)} can be used again" if back else ""

    def ask_new(self, name: str, *, has_model: bool) -> str:
        """Ask a host whether it can run the job, and return the host as JSON.

        ``has_model`` tells whether the running program has a PopTorch model.

        Raises:
            StartError: The host cannot be taken in.
        """
        host = self._host(name)
        if host.name in self._names(self.plan):
            raise StartError(f"host {host.name} is already part of the job")
        if problem := self._problems([host]).get(host.name):
            raise StartError(f"host {host.name}: {problem['text']}")
        if host not in self._known:
            self._known.append(host)
        self._has_model = self._has_model or has_model
        try:
            self._check_use([host.name])
        except UsageError as error:
            raise StartError(f"host {host.name}: {error}") from None
        return json.dumps(asdict(host))

    def _host(self, name: str) -> Host:
        try:
            config = replace(self._first.config, host=name, host_file=None)
            host, *more = hosts_of(config, self._first.environ)
        except UsageError as error:
            raise StartError(str(error)) from None
        if more:
            raise StartError(f"{name} names {len(more) + 1} hosts; add one host at a time")
        return next((each for each in self._known if each.name == host.name), host)

    def take_new(self, answer: str, *, is_problem: bool) -> tuple[str, str]:
        """Note the answer about a new host; return why the attempt ends, and the reply as JSON."""
        if is_problem or not answer:
            text = (
                answer
                or "the launcher could not ask the host whether the host can be used; try again"
            )
            return "", json.dumps({"problem": text})
        host = Host(**read_json(answer))
        if host not in self._known:
            self._known.append(host)
        self._awaited.pop(host.name, None)
        if host.name not in self._back:
            self._back.append(host.name)
        return f"host {host.name} was added", json.dumps({"host": host.name})

    def _problems(self, hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
        """Return the problem of each host that cannot run the job, and whether it was reached."""
        from poprun_py.machines.host_checks import vital_problems

        return vital_problems(
            self._first.config, hosts, mpirun=self._first.command[0], environ=self._first.environ
        )
