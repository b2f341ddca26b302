"""Time limits of a job. They pause while the job is stopped (Ctrl-Z) or debugged."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from poprun_py.instance import control_protocol
from poprun_py.running.keyboard.keyboard_input import KeyboardInput
from poprun_py.running.keyboard.suspension import Suspension, take_signal
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.hang_detection import HangDetector
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job import Cause
from poprun_py.running.supervise.shutdown import JobShutdown


class TimeLimits:
    """The time limit of a job, and of its instances after one has ended at a checkpoint.

    Args:
        grace_seconds: The seconds that instances may run on after the first has ended at a
            checkpoint.
        reached: Called once for each limit that is reached, with its cause and the reason in words.

    Attributes:
        paused_seconds: The total time during which the limits were paused.
    """

    def __init__(self, grace_seconds: float, reached: Callable[[Cause, str], None]) -> None:
        self.paused_seconds = 0.0
        self._grace_seconds = grace_seconds
        self._reached = reached
        self._limits: dict[Cause, tuple[float, str]] = {}
        self._paused_at: float | None = None

    def begin(self, now: float, timeout_seconds: float, spent_seconds: float) -> None:
        """Limit the job to ``timeout_seconds``, including the time of earlier attempts."""
        reason = f"the time limit of {timeout_seconds:g} s is over"
        self._limits[Cause.TIME_LIMIT] = (now + timeout_seconds - spent_seconds, reason)

    def on_checkpoint_end(self, index: int, now: float) -> None:
        """Give the others the grace time, as instance ``index`` has ended at a checkpoint."""
        reason = f"instance {index} ended at a checkpoint, others did not"
        self._limits.setdefault(Cause.STRAGGLER, (now + self._grace_seconds, reason))

    def pause(self, now: float) -> None:
        """Pause all limits until ``resume``."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """Resume all limits; the time of the pause does not count."""
        if self._paused_at is None:
            return
        paused, self._paused_at = now - self._paused_at, None
        self.paused_seconds += paused
        for cause, (at, reason) in self._limits.items():
            self._limits[cause] = (at + paused, reason)

    def next_deadline(self) -> float:
        """Return the time of the next limit; inf for never."""
        if self._paused_at is not None:
            return float("inf")
        return min((at for at, _ in self._limits.values()), default=float("inf"))

    def on_time(self, now: float) -> None:
        """Report a limit that is reached."""
        if now < self.next_deadline():
            return
        cause, (_, reason) = min(self._limits.items(), key=lambda limit: limit[1][0])
        del self._limits[cause]
        self._reached(cause, reason)


class JobPauses:
    """Stops the job on Ctrl-Z, and pauses its limits.

    Args:
        control: The connections to the instances.
        shutdown: Tells whether the job is ending.
        limits: The time limits of the job.
        hangs: Detects hangs; None if no hangs are to be detected.
        output: The output of the instances.
        show_view: Shows the live view again after a pause.

    Attributes:
        suspension: Waits until the programs have stopped after Ctrl-Z.
    """

    def __init__(
        self,
        control: ControlChannel,
        shutdown: JobShutdown,
        limits: TimeLimits,
        hangs: HangDetector | None,
        output: InstanceOutput,
        show_view: Callable[[], None],
    ) -> None:
        self._control = control
        self._shutdown = shutdown
        self._limits = limits
        self._hangs = hangs
        self._output = output
        self._show_view = show_view
        self._keyboard: KeyboardInput
        self.suspension = Suspension(self._stop_launcher)

    def set_keyboard(self, keyboard: KeyboardInput) -> None:
        """Set the keyboard, which calls ``on_debugger`` when a program is in the debugger."""
        self._keyboard = keyboard

    def suspend(self) -> None:
        """Stop the programs because of Ctrl-Z, and then this process.

        The programs of a job that is starting or ending are not stopped.
        """
        if self.suspension.is_asked:
            return
        running = [p.index for p in self._control.peers.values() if p.program_end is None]
        if not self._control.is_complete or self._shutdown.asked_at is not None:
            running = []
        for index in running:
            self._control.send_to(index, control_protocol.PAUSE, True)
        self.suspension.begin(running, time.monotonic())

    def on_debugger(self, instance: int | None) -> None:
        """Pause all limits while ``instance`` is in the debugger; resume them if it is None."""
        if instance is None:
            self._resume_limits()
        else:
            self._limits.pause(time.monotonic())
            self._output.say(
                f"instance {instance} is in the debugger; hang timeout and time limit pause"
            )

    def _stop_launcher(self) -> None:
        """Stop this process until the shell continues it."""
        self._limits.pause(time.monotonic())
        self._output.write(time.monotonic(), wait_seconds=0.1)
        self._output.erase_panel()
        self._keyboard.let_go()
        take_signal(signal.SIGTSTP)
        self._resume_limits()
        self._keyboard.on_time(time.monotonic())
        self._output.redraw()
        self._show_view()
        self._control.broadcast(control_protocol.PAUSE, False)

    def _resume_limits(self) -> None:
        now = time.monotonic()
        if self._hangs is not None:
            self._hangs.reset_timers(now)
        if not self._keyboard.is_debugging:
            self._limits.resume(now)
