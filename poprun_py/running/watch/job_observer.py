"""Who is asked when, what came of it, and who wants to know: the looks at one running job.

It asks through a function that it is given, and hands out views. Nothing here reads the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from poprun_py.running.watch.instance_state import InstanceState, Look
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.recording import InstanceSteps, Recorders
from poprun_py.running.watch.stragglers import Straggler, slowest, stragglers

# How often all instances are asked: for the view of --live and for recorders, and else to find
# stragglers, for which a job has to last some time: of a short one nobody asks what could be
# quicker.
_SHOWN_SECONDS, _SECONDS, _FIRST_SECONDS = 1.0, 2.0, 10.0
# So many answers in a second leave the launcher time for all else.
_ANSWERS_PER_SECOND = 500
# The number of instances that are asked at once, and the pause before the next ones. In the pauses
# the launcher does its other work.
_ASKED_AT_ONCE, _ASK_PAUSE_SECONDS = 128, 0.02
# An instance whose host is busy answers late.
_ANSWER_SECONDS = 2.0
# An instance is slow if it was in as many looks in a row: one may fall on a bad moment.
_CONFIRMED = 2
# Two looks that are closer say little of what lies between them.
_APART_SECONDS = 0.5
_ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often to look at all instances, in seconds.

    ``between`` looks; None: only when somebody asks. ``first``: after the start. ``judged``: until
    then nobody is called slow.
    """

    between: float | None
    first: float = 0.0
    judged: float = 0.0

    @classmethod
    def of(cls, num_instances: int, *, is_live: bool, is_recorded: bool) -> Pace:
        """Return the pace of a job: it looks by itself where somebody may be waited for."""
        between = max(_SHOWN_SECONDS, num_instances / _ANSWERS_PER_SECOND)
        if is_live:
            return cls(between=between, first=between)
        if is_recorded:
            return cls(between=between, first=between, judged=_FIRST_SECONDS)
        alone = num_instances == 1
        return cls(between=None if alone else _SECONDS, first=_FIRST_SECONDS)


@dataclass(slots=True)
class _Watched:
    """One instance: the last looks, and what they told.

    ``asked_at`` is when it was asked what it has not answered yet.
    ``state`` is for the views. ``training`` is about a time in which steps were made: only that
    says whether the instance is slow, in so many such times in a row, ``slow_looks``.
    """

    index: int
    host: str
    pid: int
    steps: InstanceSteps
    is_running: bool = True
    asked_at: float | None = None
    last: Look | None = None
    last_with_steps: Look | None = None
    state: InstanceState = field(init=False)
    training: InstanceState | None = None
    has_new_steps: bool = False
    slow_looks: int = 0

    def __post_init__(self) -> None:
        """Set the state of an instance that has not reported anything yet."""
        self._show(InstanceState(index=self.index, host=self.host, pid=self.pid, phase="running"))

    def take(self, look: Look | None) -> None:
        """Compare with the looks before; the first is about all of the time."""
        if look is None or not look.memory_bytes:  # the program has just ended
            return
        last, with_steps = self.last, self.last_with_steps
        self.has_new_steps = look.timed > (with_steps.timed if with_steps else 0)
        if last is not None and look.at - last.at < _APART_SECONDS:
            self.has_new_steps = False
            return
        self.last = look
        self._show(self._between(last, look))
        if self.has_new_steps:
            self.last_with_steps = look
            self.training = self._between(with_steps, look)

    def end(self, look: Look | None) -> None:
        """Take the last look, at a program that has ended: it is about all of its time."""
        self.is_running = False
        if look is None:
            self._show(replace(self.state, phase=_ENDED))
            return
        last = self.last or look
        # What only a running process tells is that of the last look before.
        whole = replace(
            look, memory_bytes=max(look.memory_bytes, last.memory_bytes), num_cpus=last.num_cpus
        )
        self._show(replace(self._between(None, whole), phase=_ENDED))

    def _show(self, state: InstanceState) -> None:
        """Keep a state for the views, and make its text now.

        A view needs the texts of all instances at once, when there is no time to make them.
        """
        self.state = state
        state.json_text()

    def _between(self, before: Look | None, now: Look) -> InstanceState:
        return InstanceState.between(before, now, index=self.index, host=self.host, pid=self.pid)


class JobObserver:
    """Looks at the instances of one job, finds stragglers, and answers who asks for the view.

    Args:
        run_id: of the job.
        pid: of the launcher.
        program: as the user calls it.
        began: when the job began.
        pace: how often to look at all instances by itself.
        ask: asks an instance to tell; ``observed`` takes the answer.
        tell: takes a straggler, once for each instance and reason.
        show: takes the view, and when it is of, each time that all instances have told.
        recorders: take all steps and looks.
        epoch: returns what is added to a time given here to get the seconds since the epoch.
    """

    def __init__(
        self,
        *,
        run_id: str,
        pid: int,
        program: str,
        began: float,
        pace: Pace,
        ask: Callable[[int], None],
        tell: Callable[[Straggler], None],
        show: Callable[[JobView, float], None] | None,
        recorders: Recorders,
        epoch: Callable[[], float],
    ) -> None:
        self._facts = (run_id, pid, program)
        self._began = began
        self._pace = pace
        self._ask = ask
        self._tell = tell
        self._show = show
        self._recorders = recorders
        self._epoch = epoch
        self._watched: dict[int, _Watched] = {}
        self._awaited: set[int] = set()
        self._unasked: deque[int] = deque()  # the awaited instances that are still to be asked
        self._ask_at = float("inf")  # when to ask the next of them
        self._told: dict[tuple[int, str], Straggler] = {}
        self._named: set[int] = set()  # the instances in _told
        self._slow: Straggler | None = None
        self._next_look = float("inf")
        self._judge_at = float("inf")
        self._deadline = float("inf")  # of the answers that are awaited
        self._replies: list[Callable[[JobView], None]] = []

    def started(self, index: int, host: str, pid: int, now: float) -> None:
        """Watch an instance whose program runs."""
        self._watched[index] = _Watched(index, host, pid, InstanceSteps(index))
        self._judge_at = min(self._judge_at, now + self._pace.judged)
        if self._pace.between is not None:
            self._next_look = min(self._next_look, now + self._pace.first)

    def observed(self, index: int, message: Mapping[str, Any], now: float) -> None:
        """Take what an instance told."""
        watched = self._watched[index]
        asked, watched.asked_at = watched.asked_at, None
        self._record(watched, message, asked, now)
        watched.take(Look.of(message))
        self._answered(index, now)

    def ended(self, index: int, message: Mapping[str, Any], now: float) -> None:
        """Take the last that an instance told: its program has ended."""
        watched = self._watched.get(index)
        if watched is not None and watched.is_running:
            self._record(watched, message, None, now)  # said unasked, maybe before a question came
            watched.end(Look.of({"memory_bytes": message.get("max_rss_bytes", 0), **message}))
        self._answered(index, now)

    def request(self, reply: Callable[[JobView], None], now: float) -> None:
        """Have ``reply`` called with the view, once all instances have told or are late."""
        self._replies.append(reply)
        self._look(now)

    def show_again(self, now: float) -> None:
        """Show the last view again, because the size of the terminal has changed."""
        if self._show is not None and self._watched:
            self._show(self.view(now), now)

    def finish(self, now: float) -> JobView:
        """Return the job as it has ended, which is the last look."""
        view = self.view(now)
        self._show = None  # the job has ended: nothing more is shown live
        if self._watched:
            lost = {index: each.steps.lost for index, each in sorted(self._watched.items())}
            self._recorders.end(view, now + self._epoch(), lost)
        return view

    def view(self, now: float) -> JobView:
        """Return the job as the last looks tell."""
        run_id, pid, program = self._facts
        return JobView(
            run_id=run_id,
            pid=pid,
            program=program,
            seconds=now - self._began,
            instances=tuple(self._watched[index].state for index in sorted(self._watched)),
            worst=self._worst(),
        )

    def on_time(self, now: float) -> None:
        """Look when it is time, and stop waiting for those who are late."""
        if now >= self._ask_at:
            self._ask_some(now)
        if now >= self._deadline:
            self._complete(now)
        if self._pace.between is not None and now >= self._next_look:
            self._next_look = now + self._pace.between
            if not self._awaited:
                self._look(now)

    def next_deadline(self) -> float:
        """Return when there is something to do; inf for never."""
        is_running = any(each.is_running for each in self._watched.values())
        next_look = self._next_look if is_running else float("inf")
        return min(next_look, self._deadline, self._ask_at)

    def _worst(self) -> Straggler | None:
        """Return the slowest instance now; of a job that has ended, one that was named."""
        watched = self._watched.values()
        if self._slow is not None and not any(each.is_running for each in watched):
            return self._slow
        return slowest([each.training for each in watched if each.training is not None])

    def _look(self, now: float) -> None:
        running = [each.index for each in self._watched.values() if each.is_running]
        # An instance that has not answered yet is not asked again: its answers would pile up.
        self._unasked = deque(i for i in running if self._watched[i].asked_at is None)
        self._awaited.update(running)
        self._ask_some(now)
        if not self._awaited:
            self._complete(now)

    def _ask_some(self, now: float) -> None:
        """Ask the next few instances, except any that have ended meanwhile."""
        for index in [
            self._unasked.popleft() for _ in range(min(len(self._unasked), _ASKED_AT_ONCE))
        ]:
            watched = self._watched[index]
            if watched.is_running:
                watched.asked_at = now
                self._ask(index)
        self._ask_at = now + _ASK_PAUSE_SECONDS if self._unasked else float("inf")
        self._deadline = now + _ANSWER_SECONDS

    def _answered(self, index: int, now: float) -> None:
        was_awaited = index in self._awaited
        self._awaited.discard(index)
        if was_awaited and not self._awaited:
            self._complete(now)

    def _complete(self, now: float) -> None:
        """All have told, or are late: name the stragglers, and answer."""
        self._awaited.clear()
        self._unasked.clear()
        self._ask_at = float("inf")
        self._deadline = float("inf")
        if now >= self._judge_at:
            self._name_stragglers()
        view = self.view(now)
        if self._show is not None:
            self._show(view, now)
        self._recorders.look(view, now + self._epoch())
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(view)

    def _record(
        self, watched: _Watched, message: Mapping[str, Any], asked: float | None, now: float
    ) -> None:
        """Hand on the steps that a message tells of."""
        epoch = self._epoch()
        since = float("-inf") if asked is None else asked + epoch
        self._recorders.steps(watched.steps.take(message, since, now + epoch))

    def _name_stragglers(self) -> None:
        """Name who is slow, if it was in the look before as well."""
        running = [each for each in self._watched.values() if each.is_running]
        states = [each.training for each in running if each.training is not None]
        slow = {each.instance: each for each in stragglers(states)}
        for watched in running:
            watched.slow_looks = watched.slow_looks + 1 if watched.index in slow else 0
        confirmed = {i: each for i, each in slow.items() if self._is_confirmed(i)}
        for straggler in confirmed.values():  # the slowest first
            self._tell_once(straggler)
        if confirmed:
            slow_now = next(iter(confirmed.values()))
            told = self._told.get((slow_now.instance, slow_now.cause), slow_now)
            # A later look may also be about the time in which the program ends.
            self._slow = replace(slow_now, detail=told.detail)

    def _is_confirmed(self, index: int) -> bool:
        watched = self._watched[index]
        return watched.has_new_steps and watched.slow_looks >= _CONFIRMED

    def _tell_once(self, straggler: Straggler) -> None:
        """Tell of an instance and a cause once; without a cause only if it was never told of."""
        what = (straggler.instance, straggler.cause)
        is_known = straggler.instance in self._named
        if what not in self._told and (straggler.cause or not is_known):
            self._told[what] = straggler
            self._named.add(straggler.instance)
            self._tell(straggler)
