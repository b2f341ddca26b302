"""The recorder that gathers the metrics of --metrics-port and sends them to the endpoint process.

All counts are cumulative, so a document that a busy endpoint misses does no harm. The JSON text of
an instance's step counts is updated when steps arrive. To send a view of thousands of instances,
only the texts of the instances have to be joined.
"""

from __future__ import annotations

import json
import socket
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

from poprun_py.errors import UsageError
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord

# The upper bounds of the histogram buckets in seconds: 1, 2.5 and 5 times each power of ten, as is
# usual with Prometheus.
BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
_HOST: Final = "127.0.0.1"
_WAITING_CONNECTIONS: Final = 128


def listen(port: int, option: str) -> socket.socket:
    """Return a socket that listens on ``port`` of the loopback address; 0 picks a free port.

    Args:
        port: The number of the port.
        option: The name of the option that the error message mentions.

    Raises:
        UsageError: The port cannot be used.
    """
    listener = socket.socket()
    try:
        # Allow the port to be used again as soon as the previous job has ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{option}: port {port} of {_HOST}: {error.strerror}; give another port, or 0 for a "
            "free one"
        ) from None
    return listener


class EndpointRecorder:
    """Counts the steps of one attempt, and sends the counts with each view to the endpoint process.

    Args:
        send: A function that sends a JSON document, given as text.
        restart_count: The number of restarts of the job before this attempt.
        continue_sending: A function that sends more of a document that has been sent only in part.
    """

    def __init__(
        self,
        send: Callable[[str], object],
        restart_count: int,
        continue_sending: Callable[[], object] = lambda: None,
    ) -> None:
        self._send, self._continue_sending = send, continue_sending
        self._restart_count = restart_count
        self._steps: dict[int, _StepCounts] = {}  # keyed by the instance
        send(json.dumps({"restarts": restart_count}))

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Add new steps of one instance to the counts and to the histograms of durations."""
        for record in records:
            self._steps.setdefault(record.instance, _StepCounts()).add(record)
        for instance in {record.instance for record in records}:
            self._steps[instance].update_text()
        self._continue_sending()

    def view(self, view: JobView, at: float, /) -> None:
        """Send a view, with the counts of all steps so far."""
        # Joining the cached JSON texts is quicker than encoding all values again.
        steps = ", ".join([f'"{index}": {each.text}' for index, each in self._steps.items()])
        restarts, text = self._restart_count, view.json_text()
        self._send(f'{{"restarts": {restarts}, "view": {text}, "steps": {{{steps}}}}}')


class _StepCounts:
    """The number of steps of one instance, and histograms of their durations."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = _Histogram()
        self._own_seconds = _Histogram()
        self.text = ""

    def add(self, record: StepRecord) -> None:
        self._count += record.every
        if record.seconds > 0:  # a program's first step is not timed
            self._seconds.add(record.seconds, record.every)
            self._own_seconds.add(record.own_seconds, record.every)

    def update_text(self) -> None:
        """Set ``text`` to the current counts and histograms as JSON."""
        self.text = json.dumps(
            {
                "count": self._count,
                "seconds": self._seconds.to_json(),
                "own_seconds": self._own_seconds.to_json(),
            }
        )


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += count
        self._sum += seconds * count

    def to_json(self) -> dict[str, Any]:
        """Return the (not cumulative) number of durations in each bucket, and their sum."""
        return {"counts": self._counts, "sum": self._sum}
