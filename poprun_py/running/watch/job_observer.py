"""The observer of one running job, which asks the instances for their counters in rounds.

The observer does no input or output itself, but calls functions that its creator passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from poprun_py.running.watch.instance_state import InstanceState, num_timed_steps, read_at
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import Recorders, StepReader
from poprun_py.running.watch.stragglers import Straggler, slowest, stragglers

# Three times in seconds: between rounds of observation for --live and recorders, between rounds
# that only search for stragglers, and from the start of a job to its first search for stragglers.
_SHOWN_SECONDS, _SECONDS, _FIRST_SECONDS = 1.0, 2.0, 10.0
# The largest number of answers of wrappers per second. In large jobs, the time between two rounds
# is therefore longer.
_ANSWERS_PER_SECOND = 500
# The number of instances that are asked at once in a round, and the pause in seconds before the
# next instances are asked. The launcher does other work in these pauses.
_ASKED_AT_ONCE, _ASK_PAUSE_SECONDS = 128, 0.02
# A round of observation ends after this many seconds, even if an instance on a busy host has not
# answered.
_ANSWER_SECONDS = 2.0
# An instance is reported as slow if it was slow in this many consecutive rounds.
_CONFIRMED = 2
# An answer of an instance is ignored if it comes less than this many seconds after the previous
# answer, because speeds over a shorter time are inaccurate.
_APART_SECONDS = 0.5
_ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimes:
    """The schedule of the rounds in which a job is observed; times in seconds.

    Attributes:
        between: The time between two rounds; None if rounds start only when a user asks for the
            state.
        first: The time from the start of the programs to the first round.
        judged: The time from the start of the programs until stragglers may be reported.
    """

    between: float | None
    first: float = 0.0
    judged: float = 0.0

    @classmethod
    def of(cls, num_instances: int, *, is_live: bool, is_recorded: bool) -> RoundTimes:
        """Return the schedule of rounds for a job.

        Without --live and recorders, a job of one instance is observed only on request.
        """
        between = max(_SHOWN_SECONDS, num_instances / _ANSWERS_PER_SECOND)
        if is_live:
            return cls(between=between, first=between)
        if is_recorded:
            return cls(between=between, first=between, judged=_FIRST_SECONDS)
        return cls(between=None if num_instances == 1 else _SECONDS, first=_FIRST_SECONDS)


@dataclass(slots=True)
class _ObservedInstance:
    """An observed instance, the last messages of its wrapper, and its state.

    ``training`` is the state of the instance over the last period with new training steps.
    ``slow_rounds`` is the number of last consecutive rounds in which the instance was slow.
    ``asked_at`` is the time of a request that the wrapper has not answered yet.
    """

    state: InstanceState
    steps: StepReader
    is_running: bool = True
    asked_at: float | None = None
    last: Mapping[str, Any] | None = None
    last_with_steps: Mapping[str, Any] | None = None
    training: InstanceState | None = None
    has_new_steps: bool = False
    slow_rounds: int = 0

    def take(self, message: Mapping[str, Any]) -> None:
        """Update the state with a new message of the wrapper, unless the program has ended."""
        if message.get("now") is None or not message.get("memory_bytes"):
            return
        # The message is kept without its rows of new steps. The recorders have received these rows,
        # which may take about a megabyte for each instance.
        message = {name: value for name, value in message.items() if name != "steps"}
        self.has_new_steps = num_timed_steps(message) > num_timed_steps(self.last_with_steps)
        last = self.last
        if last is not None and read_at(message) - read_at(last) < _APART_SECONDS:
            self.has_new_steps = False
            return
        self.last = message
        self._set_state(self.state.after(last, message))
        if self.has_new_steps:
            self.training = self.state.after(self.last_with_steps, message)
            self.last_with_steps = message

    def end(self, message: Mapping[str, Any]) -> None:
        """Set the final state of a program that has ended, computed over its whole run time."""
        self.is_running = False
        if message.get("now") is None:  # the connection to the wrapper was lost
            self._set_state(replace(self.state, phase=_ENDED))
            return
        # Take the use of memory and CPUs from the previous message, because the last message was
        # made after the process had ended.
        memory_bytes = message.get("memory_bytes", message.get("max_rss_bytes", 0))
        last = self.last or message
        memory_bytes = max(memory_bytes, last.get("memory_bytes", 0))
        whole = {**message, "memory_bytes": memory_bytes, "cpus": last.get("cpus", ())}
        self._set_state(replace(self.state.after(None, whole), phase=_ENDED))

    def _set_state(self, state: InstanceState) -> None:
        self.state = state
        # Cache the state's JSON text now, because a view later needs the texts of all instances at
        # once.
        state.json_text()


class JobObserver:
    """Asks the instances of a job for their counters, finds stragglers, and creates job views.

    Args:
        job: A view of the job without instances, to which the observer adds instances.
        began: The time on the launcher's clock when the job started.
        ask: A function that asks an instance for its counters. The answer must be passed to the
            method ``observed``.
        tell: A function that reports a straggler to the user.
        show: A function that shows the job view after each round; None without ``--live``.
        epoch: A function that returns the seconds from the epoch to time 0 of the launcher's clock.
    """

    def __init__(
        self,
        *,
        job: JobView,
        began: float,
        times: RoundTimes,
        ask: Callable[[int], None],
        tell: Callable[[Straggler], None],
        show: Callable[[JobView, float], None] | None,
        recorders: Recorders,
        epoch: Callable[[], float],
    ) -> None:
        self._job = job
        self._began = began
        self._times = times
        self._ask = ask
        self._tell = tell
        self._show = show
        self._recorders = recorders
        self._epoch = epoch
        self._observed: dict[int, _ObservedInstance] = {}
        self._awaited: set[int] = set()
        self._unasked: deque[int] = deque()  # The instances still to ask in this round.
        self._ask_at = float("inf")  # The time to ask the next instances.
        self._told: dict[tuple[int, str], Straggler] = {}
        self._slow: Straggler | None = None
        self._next_round_at = float("inf")
        self._judge_at = float("inf")
        self._deadline = float("inf")  # when the current round ends even without all answers
        self._replies: list[Callable[[JobView], None]] = []

    def started(self, index: int, host: str, pid: int, now: float) -> None:
        """Start to observe an instance whose program has started."""
        launch = now - self._began
        state = InstanceState(index=index, host=host, pid=pid, phase="running", launch=launch)
        self._observed[index] = _ObservedInstance(state, StepReader(index))
        self._judge_at = min(self._judge_at, now + self._times.judged)
        if self._times.between is not None:
            self._next_round_at = min(self._next_round_at, now + self._times.first)

    def observed(self, index: int, message: Mapping[str, Any], now: float) -> None:
        """Process the answer of an instance's wrapper to a request for its counters."""
        instance = self._observed[index]
        asked, instance.asked_at = instance.asked_at, None
        self._record(instance, message, asked, now)
        instance.take(message)
        self._answered(index, now)

    def ended(self, index: int, message: Mapping[str, Any], now: float) -> None:
        """Process the last message of an instance's wrapper, after its program has ended."""
        instance = self._observed.get(index)
        if instance is not None and instance.is_running:
            # The wrapper may have sent its last message before the request of this round arrived,
            # so the request's time is not used to estimate the difference of the clocks.
            self._record(instance, message, None, now)
            instance.end(message)
        self._answered(index, now)

    def request(self, reply: Callable[[JobView], None], now: float) -> None:
        """Start a round of observation. When the round ends, call ``reply`` with the job view."""
        self._replies.append(reply)
        self._begin_round(now)

    def show_again(self, now: float) -> None:
        """Show the current view of the job again, because the terminal was resized."""
        if self._show is not None and self._observed:
            self._show(self.view(now), now)

    def finish(self, now: float) -> JobView:
        """Pass the last view of an ended job to the recorders, and return the view."""
        view = self.view(now)
        self._show = None
        if self._observed:
            lost = {index: each.steps.lost for index, each in sorted(self._observed.items())}
            self._recorders.end(view, now + self._epoch(), lost)
        return view

    def view(self, now: float) -> JobView:
        """Return a view of the job from the last answers of its instances."""
        return replace(
            self._job,
            seconds=now - self._began,
            instances=tuple(self._observed[index].state for index in sorted(self._observed)),
            worst=self._worst(),
        )

    def on_time(self, now: float) -> None:
        """Start or end a round of observation, or ask more instances, whichever is due."""
        if now >= self._ask_at:
            self._ask_some(now)
        if now >= self._deadline:
            self._end_round(now)
        if self._times.between is not None and now >= self._next_round_at:
            self._next_round_at = now + self._times.between
            if not self._awaited:
                self._begin_round(now)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        is_running = any(each.is_running for each in self._observed.values())
        next_round_at = self._next_round_at if is_running else float("inf")
        return min(next_round_at, self._deadline, self._ask_at)

    def _worst(self) -> Straggler | None:
        """Return the slowest instance; after the end of a job, the straggler reported last."""
        instances = self._observed.values()
        if self._slow is not None and not any(each.is_running for each in instances):
            return self._slow
        return slowest([each.training for each in instances if each.training is not None])

    def _begin_round(self, now: float) -> None:
        running = [index for index, each in self._observed.items() if each.is_running]
        # If an instance has not answered the previous request, it is not asked again, so that
        # answers do not pile up.
        self._unasked = deque(i for i in running if self._observed[i].asked_at is None)
        self._awaited.update(running)
        self._ask_some(now)
        if not self._awaited:
            self._end_round(now)

    def _ask_some(self, now: float) -> None:
        for _ in range(min(len(self._unasked), _ASKED_AT_ONCE)):
            index = self._unasked.popleft()
            instance = self._observed[index]
            if instance.is_running:
                instance.asked_at = now
                self._ask(index)
        self._ask_at = now + _ASK_PAUSE_SECONDS if self._unasked else float("inf")
        self._deadline = now + _ANSWER_SECONDS

    def _answered(self, index: int, now: float) -> None:
        was_awaited = index in self._awaited
        self._awaited.discard(index)
        if was_awaited and not self._awaited:
            self._end_round(now)

    def _end_round(self, now: float) -> None:
        self._awaited.clear()
        self._unasked.clear()
        self._ask_at = float("inf")
        self._deadline = float("inf")
        if now >= self._judge_at:
            self._report_stragglers()
        view = self.view(now)
        if self._show is not None:
            self._show(view, now)
        self._recorders.view(view, now + self._epoch())
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(view)

    def _record(
        self,
        instance: _ObservedInstance,
        message: Mapping[str, Any],
        asked: float | None,
        now: float,
    ) -> None:
        epoch = self._epoch()
        asked_at = float("-inf") if asked is None else asked + epoch
        self._recorders.steps(instance.steps.read(message, asked_at, now + epoch))

    def _report_stragglers(self) -> None:
        running = [each for each in self._observed.values() if each.is_running]
        states = [each.training for each in running if each.training is not None]
        slow = {each.instance: each for each in stragglers(states)}
        for instance in running:
            instance.slow_rounds = instance.slow_rounds + 1 if instance.state.index in slow else 0
        confirmed = []
        for index, straggler in slow.items():
            instance = self._observed[index]
            if instance.has_new_steps and instance.slow_rounds >= _CONFIRMED:
                confirmed.append(straggler)
        for straggler in confirmed:
            self._tell_once(straggler)
        if confirmed:
            worst = confirmed[0]
            told = self._told.get((worst.instance, worst.cause), worst)
            # Keep the detail of the first report about this straggler, because the measured values
            # of a later round may include the end of the program.
            self._slow = replace(worst, detail=told.detail)

    def _tell_once(self, straggler: Straggler) -> None:
        """Report a straggler, unless the instance was reported before with the same cause.

        If the cause is unknown, the straggler is reported only if it was never reported before.
        """
        key = (straggler.instance, straggler.cause)
        is_known = any(instance == straggler.instance for instance, _ in self._told)
        if key not in self._told and (straggler.cause or not is_known):
            self._told[key] = straggler
            self._tell(straggler)
