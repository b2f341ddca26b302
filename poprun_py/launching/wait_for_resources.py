"""The time that one job waits for cores and IPUs of other jobs, and the messages about it."""

from __future__ import annotations

import math
import time

from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FOREVER
from poprun_py.terminal import Console


class Wait:
    """The time that a job may wait for other jobs, as --wait-for-resources says.

    A launch has one Wait, so waiting for cores and then for IPUs has one common limit.

    Args:
        config: The options, which say whether and how long the job may wait.
        console: The console that shows the seconds waited and the reason.
    """

    def __init__(self, config: LaunchConfig, console: Console) -> None:
        self._config, self._console = config, console
        wait = config.wait_for_resources
        self._limit = math.inf if wait == FOREVER else float(wait or 0)
        self._seconds_before = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds that the job has waited so far."""
        if self._began is None:
            return self._seconds_before
        return self._seconds_before + time.monotonic() - self._began

    @property
    def is_allowed(self) -> bool:
        """Whether the job may wait for other jobs at all."""
        return self._limit > 0

    @property
    def is_over(self) -> bool:
        """Whether the limit of the wait is reached; always true for a job that may not wait."""
        return self.seconds >= self._limit

    def sleep(self, seconds: float, reason: str) -> None:
        """Show the reason, such as "for IPUs: ...", and sleep, at most until the time limit."""
        if self._began is None:
            self._began = time.monotonic()
        waited = self.seconds
        self._console.waiting(waited, reason)
        time.sleep(max(0.0, min(seconds, self._limit - waited)))

    def end(self) -> None:
        """End the wait and clear its message; do nothing if the job is not waiting."""
        if self._began is not None:
            self._seconds_before, self._began = self.seconds, None
            self._console.waiting(self._seconds_before, "")

    def refusal(self, reason: str) -> str:
        """Return an error text with the reason why the job does not get cores or IPUs.

        With --wait-for-resources, the text begins with this option and says that the limit is
        reached.
        """
        if self._config.wait_for_resources is None:
            return reason
        return f"{self._config.shown('wait_for_resources')}: the time is over; {reason}"
