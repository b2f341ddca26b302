"""Detection of instances that make no progress, and the end of a job that hangs.

An instance that counts steps hangs if it makes no step and shows no other activity, unless it waits
for an instance that is working. If no instance counts steps, the activity of all instances decides.
``HangDetector`` does no I/O, and takes the current time as an argument. ``HangCheck`` confirms a
hang by the Python stacks of the instances, which also show which instances caused it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from popdist_py.environment import COMPILING, INFERENCE, TRAINING
from poprun_py.running.supervise import stacks
from poprun_py.running.supervise.activity_monitor import (
    AUTO_IDLE_SECONDS,
    ActivityMonitor,
    start_limit,
    storage_limit,
)
from poprun_py.running.supervise.launch_result import Cause, Progress, StackGroup
from poprun_py.running.supervise.mpirun_process import Mpirun
from poprun_py.running.supervise.shutdown import JobShutdown
from poprun_py.running.supervise.stacks import StackCollector

_AUTO_FACTOR, _AUTO_FLOOR_SECONDS, _AUTO_SAMPLES = 20, 10.0, 5
# With --hang-timeout auto, the time limit of a step is at least this many times the longest time
# between two steps so far.
_AUTO_LONGEST_FACTOR = 2
# The hang detector keeps the durations of this many steps. One progress message may report several
# short steps.
_KEPT_DURATIONS = 101
# If the last check for a hang was longer ago than this, the launcher itself was stopped. Instances
# do not count as idle while the launcher was stopped.
_LATE_SECONDS = 1.0
# A wrapper counts as stopped if it sends neither steps nor samples for the time limit of a step.
# A shorter or longer time limit is replaced by the first or the second of these times.
_MIN_UNSAMPLED_SECONDS, _MAX_UNSAMPLED_SECONDS = 2.0, 10.0
_INFINITY = float("inf")


class HangDetector:
    """Follows the steps of all instances, and their activity in ``activity``.

    An instance hangs if it has made no step for the time limit, and ``activity`` has seen no
    activity for as long. An instance that waits for other instances hangs only if no other instance
    is working. The limits for training steps and for other calls are separate. The time limit for
    compiling equals the time limit for a first step. If a wrapper sends no samples, only the steps
    of its instance count.

    If the steps of an instance are counted automatically, the program does not report validations
    and waits between its steps. Such an instance hangs only if no other instance is working, and
    with "auto" it may always be idle for two minutes.

    Args:
        limit: Seconds without a step, or "auto": 20 times the median step or twice the longest time
            without a step, whichever is longer, and at least 10 s. The first step, and compiling,
            may take ten times as long, at least 30 s. With "auto", this limit applies only to an
            instance that is stopped or waits in a collective of the library. All other instances
            may be idle for two minutes.
    """

    def __init__(self, limit: float | str) -> None:
        self._fixed_limit = None if isinstance(limit, str) else limit
        # The progress of each instance, and the time of its last step.
        self._progress: dict[int, tuple[Progress, float]] = {}
        self._durations: dict[int, deque[float]] = {
            kind: deque(maxlen=_KEPT_DURATIONS) for kind in (TRAINING, INFERENCE)
        }
        self._longest = dict.fromkeys(self._durations, 0.0)
        self._limits: dict[int, float] = {}  # by kind of call; cleared after a step
        self._checked_at = -_INFINITY
        # Before this time, no further instance exceeds its limit.
        self._next_timeout_at = -_INFINITY
        self.activity = ActivityMonitor(limit)

    @property
    def check_interval(self) -> float:
        """The seconds between two checks for a hang, and between two messages of a wrapper."""
        return 0.2 if self._fixed_limit is None else min(0.5, max(0.02, self._fixed_limit / 5))

    def limit(self, kind: int = TRAINING) -> float:
        """Return the time limit in seconds for a kind of call; inf if it is not known yet."""
        if self._fixed_limit is not None:
            return self._fixed_limit
        if kind not in self._limits:
            self._limits[kind] = self._auto_limit(kind)
        return self._limits[kind]

    def _auto_limit(self, kind: int) -> float:
        durations = self._durations[kind]
        if len(durations) < _AUTO_SAMPLES:
            return _INFINITY
        longest = _AUTO_LONGEST_FACTOR * self._longest[kind]
        return max(_AUTO_FLOOR_SECONDS, _AUTO_FACTOR * _upper_median(durations), longest)

    def record_progress(self, instance: int, progress: Progress, now: float) -> None:
        """Record the progress of an instance."""
        before, since = self._progress.get(instance, (progress, now))
        done = progress.calls_since(before)
        if done == 0:
            # The instance may have begun a call, which is not progress.
            self._progress[instance] = (progress, since)
            return
        self.activity.of(instance).mark_working(now)
        if done is not None and before.has_begun and progress.kind in self._durations:
            durations = [(now - since) / done] * min(done, _AUTO_SAMPLES)
            self._durations[progress.kind].extend(durations)
            self._longest[progress.kind] = max(self._longest[progress.kind], now - since)
            self._limits.clear()
        self._progress[instance] = (progress, now)

    def reset_timers(self, now: float) -> None:
        """Restart the idle times of all instances, after the launcher or its output was delayed."""
        self._progress = {index: (progress, now) for index, (progress, _) in self._progress.items()}
        self.activity.reset_timers(now)

    def remove(self, instance: int, now: float) -> None:
        """Remove an instance that has ended."""
        self._progress.pop(instance, None)
        self.activity.remove(instance, now)

    @property
    def counts_steps(self) -> bool:
        """Whether any running instance counts steps; then only such instances can hang."""
        return bool(self._progress)

    def next_deadline(self) -> float:
        """Return the time of the next check for a hang."""
        return self._checked_at + self.check_interval

    def check(
        self, now: float, *, is_blocked: bool, is_mpirun_stopped: Callable[[], bool] = lambda: False
    ) -> tuple[int, ...]:
        """Return the instances that seem to hang now, the longest idle instance first.

        If the reader of the output, or a debugger, makes the instances wait, they are blocked and
        not idle. While mpirun is stopped, no instance can end, so instances that are ending may
        hang as well.
        """
        is_due = now >= min(self.next_deadline(), self._next_timeout_at)
        if not (is_blocked or is_due):
            return ()
        self.activity.can_end = not is_mpirun_stopped()
        if is_blocked or now > self._checked_at + _LATE_SECONDS:
            self.reset_timers(now)
        self._checked_at = now
        return self.hung(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return the instances that seem to hang, the longest idle instance first.

        The result may contain instances that only wait for another instance, or for a CPU core. To
        exclude such instances, the caller collects the stacks and calls ``confirm``. For a job
        whose instances count no steps, the result contains all instances, or is empty.
        """
        limits = [(since, self._step_limit(each)) for each, since in self._progress.values()]
        later = (since + limit for since, limit in limits if now - since <= limit)
        self._next_timeout_at = min(later, default=_INFINITY)
        if all(limit == _INFINITY for _, limit in limits):
            return self.activity.hung(now)
        idle = [instance for instance in self._progress if self._is_idle(instance, now)]
        is_each_waiting = all(map(self._may_wait, idle))
        if is_each_waiting and self._is_any_other_working(idle, now):
            return ()
        return tuple(sorted(idle, key=lambda index: (self._progress[index][1], index)))

    def confirm(self, waiting: Iterable[int], ending: Iterable[int], now: float) -> tuple[int, ...]:
        """Return the instances that hang according to their stacks.

        The stacks show which instances are ``waiting`` for others, and which are ``ending``.
        """
        waiting = set(waiting)
        for index in ending:
            self.activity.of(index).mark_ending(now)
        for index in self.busy(now):
            if index not in waiting:
                self.activity.of(index).mark_working(now)
        hung = self.hung(now)
        is_each_waiting = all(i in waiting or self._may_wait(i) for i in hung)
        if self.counts_steps and is_each_waiting and self._is_any_other_working(hung, now):
            for index in hung:
                self.activity.of(index).mark_working(now)
            return ()
        return hung

    def busy(self, now: float) -> tuple[int, ...]:
        """Return the instances of ``hung`` that use CPU time, perhaps only for waiting."""
        return tuple(
            index
            for index in self.hung(now)
            if self.activity.of(index).is_active(now, self._idle_limit(index))
        )

    def _is_idle(self, index: int, now: float) -> bool:
        progress, since = self._progress[index]
        limit = self._step_limit(progress)
        if now - since <= limit or self.activity.is_ending(index, now):
            return False
        unsampled = min(_MAX_UNSAMPLED_SECONDS, max(_MIN_UNSAMPLED_SECONDS, limit))
        activity = self.activity.of(index)
        is_sampled = activity.has_recent_sample(now, unsampled)
        return not is_sampled or activity.is_idle(now, self._idle_limit(index))

    def _may_wait(self, index: int) -> bool:
        """Tell whether an idle instance may be waiting for others, as far as samples show it."""
        is_automatic = index in self._progress and self._progress[index][0].is_automatic
        return is_automatic or self.activity.of(index).is_waiting

    def _is_any_other_working(self, idle: Iterable[int], now: float) -> bool:
        """Tell whether the ``idle`` instances may be waiting for a working instance."""
        idle = set(idle)
        return any(
            index not in idle
            and not self.activity.is_ending(index, now)
            and not (self._idle_limit(index) is None and self.activity.of(index).is_idle(now))
            for index in {*self.activity.instances, *self._progress}
        )

    def _idle_limit(self, index: int) -> float | None:
        """Return the time limit of an idle instance; None for the limit of ``activity``."""
        if index not in self._progress:
            return None
        progress = self._progress[index][0]
        limit = self._step_limit(progress)
        sample = self.activity.of(index).sample
        if limit == _INFINITY or sample is None:
            return None
        if sample.saves:
            return storage_limit(limit)
        is_certain = (sample.waits or sample.stopped) and not progress.is_automatic
        if is_certain or self._fixed_limit is not None:
            return limit
        return max(AUTO_IDLE_SECONDS, limit)

    def _step_limit(self, progress: Progress) -> float:
        is_compiling = progress.kind == COMPILING
        limit = self.limit(TRAINING if is_compiling else progress.kind)
        return start_limit(limit) if is_compiling or not progress.has_begun else limit

    def progress_counts(self) -> dict[int, tuple[int, int]]:
        """Return each instance's number of training steps, and of other calls since the last step.

        For a job whose instances count no steps, the pairs are the number of collectives and 0.
        """
        if not self.counts_steps:
            return self.activity.collective_counts()
        return {i: (progress.step, progress.calls) for i, (progress, _) in self._progress.items()}

    def idle_seconds(self, instance: int, now: float) -> float:
        """Return the seconds since the last step of an instance, or since its last activity."""
        if instance not in self._progress:
            return self.activity.of(instance).idle_seconds(now)
        return now - self._progress[instance][1]


def _upper_median(values: Iterable[float]) -> float:
    # Importing the statistics module would delay the launch.
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class HangCheck:
    """Checks for a hang at the intervals of the detector, and ends a job that hangs.

    ``is_blocked`` tells whether the reader of the output, or a debugger, makes the instances wait.
    """

    def __init__(
        self,
        detector: HangDetector,
        collector: StackCollector,
        shutdown: JobShutdown,
        mpirun: Mpirun,
        is_blocked: Callable[[], bool],
    ) -> None:
        self._detector = detector
        self._collector = collector
        self._shutdown = shutdown
        self._mpirun = mpirun
        self._is_blocked = is_blocked
        self._is_collecting = False

    def next_deadline(self) -> float:
        """Return the time of the next check."""
        return self._detector.next_deadline()

    def on_time(self, now: float) -> None:
        """If the job seems to hang, collect the stacks of its instances to confirm it."""
        hung = self._detector.check(
            now, is_blocked=self._is_blocked(), is_mpirun_stopped=lambda: self._mpirun.is_stopped
        )
        if hung and self._shutdown.may_hang and not self._is_collecting:
            self._is_collecting = True
            self._collector.collect(self._confirm, now)

    def _confirm(self, groups: tuple[StackGroup, ...]) -> None:
        """End the job if its stacks confirm the hang and no instance was active meanwhile."""
        self._is_collecting = False
        detector, now = self._detector, time.monotonic()
        if not self._shutdown.may_hang:
            return
        busy = detector.busy(now)
        waiting = {index for group in groups if group.waits for index in group.instances}
        ending = {i for group in groups if stacks.is_ending(group) for i in group.instances}
        hung = detector.confirm(waiting, ending, now)
        if not hung:
            return
        if detector.counts_steps:
            blocking = stacks.blocking_by_steps(hung, detector.progress_counts(), groups)
            reason = (
                f"no training step for {max(detector.idle_seconds(i, now) for i in hung):.1f} s"
            )
            if self._mpirun.is_stopped:
                reason += f" while mpirun ({self._mpirun.pid}) is stopped"
        else:
            blocking = stacks.blocking_by_stacks(hung, detector.progress_counts(), groups)
            idle = max(detector.idle_seconds(index, now) for index in blocking)
            cpu = "CPU time only for waiting" if set(blocking) & set(busy) else "no CPU time"
            reason = f"silent for {idle:.1f} s (no output, {cpu})"
        self._shutdown.decide(Cause.HANG, reason, hung=blocking)
        self._shutdown.end_with_stacks(blocking, groups)
