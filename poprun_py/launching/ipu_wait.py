"""Waiting for IPUs that others have: how long, and what is said meanwhile.

A pod keeps no order among those who wait: whoever looks first when IPUs become free has them.
"""

from __future__ import annotations

import math
import time

from poprun_py.console import Console, Log
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import FOREVER

# Of a server, too: each look is three small requests.
_LOOK_SECONDS = 0.3


class IpuWait:
    """The wait of one job, as --wait-for-resources says.

    Args:
        config: whether and how long the job waits.
        console: is told whom it waits for, if there is no ``progress``.
        progress: takes whom it waits for, again and again, and at last an empty line.
        waited_seconds: what the job has used of its time already.
    """

    def __init__(
        self, config: LaunchConfig, console: Console, progress: Log | None, waited_seconds: float
    ) -> None:
        self._config, self._console, self._progress = config, console, progress
        wait = config.wait_for_resources
        self._limit = math.inf if wait == FOREVER else float(wait or 0)
        self._before, self._began, self._told = waited_seconds, math.nan, ""

    @property
    def has_begun(self) -> bool:
        """Whether the job has waited for IPUs."""
        return not math.isnan(self._began)

    def goes_on(self, busy: str) -> bool:
        """Say who has the IPUs and wait a moment; False where the time is over."""
        now = time.monotonic()
        if not self.has_begun:
            self._began = now
        waited = self._before + now - self._began
        if waited >= self._limit:
            return False
        text = f"for IPUs: {busy}"
        # Before it is told: who is interrupted meanwhile clears the line.
        is_new, self._told = text != self._told, text
        if self._progress is not None:
            self._progress(f"waiting {waited:.0f} s {text}")
        elif is_new:
            self._console.tell(f"waiting {text}")
        time.sleep(min(_LOOK_SECONDS, self._limit - waited))
        return True

    def over(self) -> str:
        """Return what a refusal begins with: that the time is over, if there was any."""
        if self._config.wait_for_resources is None:
            return ""
        return f"{self._config.shown('wait_for_resources')}: the time is over; "

    def end(self) -> None:
        """Clear the line; once more does nothing."""
        if self._progress is not None and self._told:
            self._progress("")
        self._told = ""
