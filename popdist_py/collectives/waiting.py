"""The time limits of waits for other instances, and the errors of these waits.

All waits of one communicator share one ``WaitLimits``. So a new limit or an abort takes effect in
all waits of the communicator at once. A process group of torch.distributed also uses its
``WaitLimits`` when it waits for its store or for point-to-point messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from popdist_py.collectives.signature import INSTANCES, Names
from popdist_py.errors import InstanceLostError
from popdist_py.peers.silence import SILENT_SECONDS

__all__ = ["Span", "WaitLimits", "WaitTime"]

# A waiting instance reads the clock far more often than once in this number of seconds. A longer
# gap between two readings means that all processes of the job were stopped (Ctrl-Z).
_STOPPED_SECONDS = 2.0
_MOST_LAUNCHER_GRACE_SECONDS = 2.0
_MOST_EXTRA_SECONDS = 1.0


class WaitTime:
    """The duration of one wait, excluding the time in which this process was stopped."""

    def __init__(self) -> None:
        self._measured_at = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the seconds that the wait has taken so far.

        The caller must call this method often during the wait, because a long gap between two calls
        counts as a stop of the process.
        """
        now = time.monotonic()
        passed, self._measured_at = now - self._measured_at, now
        if passed < _STOPPED_SECONDS:
            self._seconds += passed
        return self._seconds


class Span(IntEnum):
    """The range of instances that a wait is for; a wider range has a longer time limit.

    The instances of a host can tell which instance of this host is missing. Waits within a host
    have the shortest limit. So this host can report the missing instance to the other hosts before
    their waits fail.
    """

    WITHIN_HOST = 0
    BETWEEN_HOSTS = 1
    # The other instances of a host wait for its first instance, which itself waits for other hosts.
    FOR_FIRST = 2


class WaitLimits:
    """The limits of all waits of one communicator.

    Args:
        hang_timeout: Seconds after which a wait within a host raises an error.
        names: The names of instances in error messages, or a function that returns these names.

    Attributes:
        hang_timeout: The limit of a wait within a host, in seconds. This limit may be changed at
            any time.
        abort_reason: If this text is not empty, every wait raises an error that contains the text.
    """

    def __init__(self, hang_timeout: float, names: Names | Callable[[], Names] = INSTANCES) -> None:
        self.hang_timeout = hang_timeout
        self.abort_reason = ""
        self._names = names
        self._call_timeout: float | None = None

    @property
    def names(self) -> Names:
        """The names of instances in error messages."""
        return self._names if isinstance(self._names, Names) else self._names()

    @property
    def call_timeout(self) -> float:
        """The time-out of the collective call that runs now, in seconds."""
        return self.hang_timeout if self._call_timeout is None else self._call_timeout

    @contextmanager
    def during_call(self, seconds: float | None) -> Iterator[None]:
        """Return a context manager in which a collective call has a time-out of ``seconds``.

        If ``seconds`` is None, the time-out stays ``hang_timeout``. Waits outside of collective
        calls keep ``hang_timeout``, because they may run in other threads at the same time.
        """
        self._call_timeout = seconds
        try:
            yield
        finally:
            self._call_timeout = None

    @property
    def launcher_grace(self) -> float:
        """Seconds that a waiting instance delays its error after another instance has ended.

        During this delay, the launcher ends the job and reports why the other instance ended. An
        error of a waiting instance would only hide that reason.
        """
        return min(_MOST_LAUNCHER_GRACE_SECONDS, self.call_timeout / 2)

    def seconds(self, span: Span) -> float:
        """Return the time limit in seconds for a wait with the Span ``span``."""
        timeout = self.call_timeout
        return timeout + span * (timeout / 4 + min(_MOST_EXTRA_SECONDS, timeout))

    def check_abort(self, call: object) -> None:
        """Raise an error if the communicator was aborted.

        Raises:
            InstanceLostError: The communicator was aborted.
        """
        if self.abort_reason:
            raise InstanceLostError(f"{call}: {self.abort_reason}")

    def late_error(self, missing: Sequence[int], call: object) -> InstanceLostError:
        """Return the error for a wait that exceeded its limit.

        ``missing`` contains the instances that did not make the call. ``missing`` is empty if all
        instances made the call, and some did not finish it.
        """
        limit = f"within {self.call_timeout:g} s ({self.names.time_limit})"
        if not missing:
            text = f"all {self.names.noun}s made this call, but did not finish it {limit}"
        else:
            text = f"{self.names.of(*sorted(missing))} did not make this call {limit}"
        return InstanceLostError(f"{call}: {text}")

    def host_error(self, instance: int, call: object, *, is_silent: bool) -> InstanceLostError:
        """Return the error for an instance that was lost on another host.

        Args:
            instance: Index of the lost instance.
            call: The collective call that waits, for error messages.
            is_silent: Whether the other host does not answer.
        """
        lost = self.names.of(instance)
        if not is_silent:
            return InstanceLostError(f"{call}: {lost} on another host was lost")
        return InstanceLostError(
            f"{call}: no answer from {lost} on another host for {SILENT_SECONDS} s: the other host "
            "is down, or the network to the other host is down"
        )
