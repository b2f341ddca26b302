"""The time limits of waits for other instances, and the errors of these waits.

All waits of one communicator share one ``WaitLimits``. So a new limit or an abort takes effect in
all waits of the communicator at once. A group of torch.distributed also uses its ``WaitLimits`` for
its store and its messages.
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

# A wait measures its duration far more often than once in this time. A longer gap between two
# measurements means that all processes of the job were stopped (Ctrl-Z).
_STOPPED_SECONDS = 2.0
_MOST_LAUNCHER_GRACE_SECONDS = 2.0
_MOST_EXTRA_SECONDS = 1.0


class WaitTime:
    """The duration of one wait, excluding the time in which this process was stopped."""

    def __init__(self) -> None:
        self._measured_at = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the duration so far.

        The caller must call this method often while the wait lasts.
        """
        now = time.monotonic()
        passed, self._measured_at = now - self._measured_at, now
        if passed < _STOPPED_SECONDS:
            self._seconds += passed
        return self._seconds


class Span(IntEnum):
    """The set of instances for which an instance waits; a wider span has a longer limit.

    The instances of a host can tell which instance of this host is missing. The limit within a host
    is the shortest, so that the other hosts receive this error and name the same instance.
    """

    WITHIN_HOST = 0
    BETWEEN_HOSTS = 1
    # A wait for the first instance of this host while that instance waits for other hosts.
    FOR_FIRST = 2


class WaitLimits:
    """The limits of all waits of one communicator.

    Args:
        hang_timeout: Seconds after which a wait within a host raises an error.
        names: Names of the instances in messages, or a function that returns them.

    Attributes:
        hang_timeout: The limit in seconds. The limit may be changed at any time.
        abort_reason: If this is not empty, every wait raises an error that states this reason.
    """

    def __init__(self, hang_timeout: float, names: Names | Callable[[], Names] = INSTANCES) -> None:
        self.hang_timeout = hang_timeout
        self.abort_reason = ""
        self._names = names
        self._call_timeout: float | None = None

    @property
    def names(self) -> Names:
        """Names of the instances in messages."""
        return self._names if isinstance(self._names, Names) else self._names()

    @property
    def call_timeout(self) -> float:
        """The time-out of the collective call that runs now, in seconds."""
        return self.hang_timeout if self._call_timeout is None else self._call_timeout

    @contextmanager
    def during_call(self, seconds: float | None) -> Iterator[None]:
        """Return a context manager in which a collective call has a time-out of ``seconds``.

        None keeps the usual time-out. Waits outside of collective calls keep ``hang_timeout``,
        because they may run in other threads at the same time.
        """
        self._call_timeout = seconds
        try:
            yield
        finally:
            self._call_timeout = None

    @property
    def launcher_grace(self) -> float:
        """Seconds between the end of a missing instance and the error of a waiting instance.

        In these seconds the launcher ends the job and reports why the missing instance ended.
        Errors of the waiting instances would only hide that reason.
        """
        return min(_MOST_LAUNCHER_GRACE_SECONDS, self.call_timeout / 2)

    def seconds(self, span: Span) -> float:
        """Return the time limit in seconds for a wait of this span."""
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

        ``missing`` contains the instances that did not arrive. It is empty if all arrived, but some
        did not finish the call.
        """
        limit = f"within {self.call_timeout:g} s ({self.names.time_limit})"
        if not missing:
            text = f"all {self.names.noun}s arrived, but did not end {limit}"
        else:
            text = f"{self.names.of(*sorted(missing))} did not arrive {limit}"
        return InstanceLostError(f"{call}: {text}")

    def host_error(self, instance: int, call: object, *, is_silent: bool) -> InstanceLostError:
        """Return the error for an instance that was lost on another host.

        Args:
            instance: Index of the lost instance.
            call: The waiting call, as messages name it.
            is_silent: Whether the other host does not answer.
        """
        lost = self.names.of(instance)
        if not is_silent:
            return InstanceLostError(f"{call}: {lost} was lost on another host")
        return InstanceLostError(
            f"{call}: no answer from {lost} on another host for {SILENT_SECONDS} s: that host is "
            "down, or the network between it and this one"
        )
