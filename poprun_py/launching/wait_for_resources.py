"""Waiting of a job for cores and IPUs that other jobs hold, with a time limit."""

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
    """Raised if other jobs hold cores or IPUs that this job needs.

    Args:
        refusal: The error text for a user whose job may not wait any longer.
        reason: The text shown while the job waits, such as "for IPUs: ...".
        seconds: The pause in seconds before the job tries again to get the cores or IPUs.
    """

    def __init__(self, refusal: str, reason: str, seconds: float) -> None:
        super().__init__(refusal)
        self.reason, self.seconds = reason, seconds


class Wait:
    """A job's wait for cores and IPUs of other jobs; --wait-for-resources limits the wait.

    A launch has one ``Wait``, whose limit applies to the waits for cores and for IPUs together.

    Args:
        config: The options of the launch, such as how long the job may wait.
        console: The console that shows how long the job has waited, and for which reason.

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
        """Whether the job has waited as long as it may; always true for a job that may not wait."""
        return self.seconds >= self._limit

    def until(self, take: Callable[[], T]) -> T:
        """Call ``take`` repeatedly while it raises BusyError; return the first value of ``take``.

        Raises:
            StartError: Other jobs hold cores or IPUs that the job needs, and the job may not wait
                any longer.
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
        return f"{reason} (the time of {self._config.shown('wait_for_resources')} is over)"
