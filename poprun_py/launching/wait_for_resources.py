"""The time that one job waits for cores and IPUs of other jobs, and the messages about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from poprun_py.errors import StartError
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FOREVER
from poprun_py.terminal import Console

T = TypeVar("T")


class BusyError(StartError):
    """Other jobs hold the cores or IPUs that a job needs.

    Args:
        refusal: The error text for a job that may not wait for the other jobs.
        reason: The text shown while the job waits, such as "for IPUs: ...".
        seconds: The pause before the job tries again.
    """

    def __init__(self, refusal: str, reason: str, seconds: float) -> None:
        super().__init__(refusal)
        self.reason, self.seconds = reason, seconds


class Wait:
    """The time that a job may wait for other jobs, as --wait-for-resources says.

    A launch has one Wait, so waiting for cores and then for IPUs has one common limit.

    Args:
        config: The options, which say whether and how long the job may wait.
        console: The console that shows the seconds waited and the reason.

    Attributes:
        seconds: The seconds that the job has waited so far.
    """

    def __init__(self, config: LaunchConfig, console: Console) -> None:
        self._config, self._console = config, console
        wait = config.wait_for_resources
        self._limit = math.inf if wait == FOREVER else float(wait or 0)
        self.seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the limit of the wait is reached; always true for a job that may not wait."""
        return self.seconds >= self._limit

    def until(self, take: Callable[[], T]) -> T:
        """Return the value of ``take``, which is called again as long as it raises BusyError.

        Raises:
            StartError: Other jobs hold what the job needs, and it may not wait any longer.
        """
        before, began = self.seconds, None
        try:
            while True:
                is_last = self.is_over
                try:
                    return take()
                except BusyError as busy:
                    if is_last:
                        raise StartError(self._refusal(str(busy))) from None
                    began = time.monotonic() if began is None else began
                    self.seconds = before + time.monotonic() - began
                    self._console.waiting(self.seconds, busy.reason)
                    time.sleep(max(0.0, min(busy.seconds, self._limit - self.seconds)))
                    self.seconds = before + time.monotonic() - began
        finally:
            if began is not None:
                self._console.waiting(self.seconds, "")

    def _refusal(self, reason: str) -> str:
        if self._config.wait_for_resources is None:
            return reason
        return f"{self._config.shown('wait_for_resources')}: the time is over; {reason}"
