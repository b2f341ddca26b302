"""Gathers what the endpoint of --metrics-port shows, and hands it over at each look.

Nothing here serves: endpoint.py does, in a process of its own. All numbers are cumulative, so
the next document makes up for one that a busy endpoint misses. The JSON text of an instance is made
when the instance reports something. A look at thousands of instances then only joins their texts,
because it has no time to make them all.
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

# Of the buckets, in seconds: 1, 2.5 and 5 times each power of ten, as Prometheus has them.
BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
_HOST: Final = "127.0.0.1"
_WAITING_CONNECTIONS: Final = 128


def listen(port: int, option: str) -> socket.socket:
    """Return a socket that listens at ``port`` of this machine only; 0 is a free one.

    Raises:
        UsageError: the port cannot be had; ``option`` is how it was asked for.
    """
    listener = socket.socket()
    try:
        # A port is free as soon as the job before has ended.
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
    """The numbers of one attempt for the endpoint.

    Args:
        send: takes the JSON document of a look, as text.
        restart_count: how often the job was started again before.
        go_on: sends more of a document of which only a part has been sent so far.
    """

    def __init__(
        self,
        send: Callable[[str], object],
        restart_count: int,
        go_on: Callable[[], object] = lambda: None,
    ) -> None:
        self._send, self._go_on = send, go_on
        self._restart_count = restart_count
        self._instances: dict[int, _Steps] = {}
        send(json.dumps({"restarts": restart_count}))

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Count steps, and how long they took."""
        for record in records:
            self._instances.setdefault(record.instance, _Steps()).add(record)
        for instance in {record.instance for record in records}:
            self._instances[instance].update_text()
        self._go_on()

    def view(self, view: JobView, at: float, /) -> None:
        """Hand over what is known now."""
        steps = ", ".join([f'"{index}": {each.text}' for index, each in self._instances.items()])
        restarts, text = self._restart_count, view.json_text()
        self._send(f'{{"restarts": {restarts}, "view": {text}, "steps": {{{steps}}}}}')


class _Steps:
    """The steps of one instance: how many, and how long they took with and without waiting."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = _Durations()
        self._own_seconds = _Durations()
        self.text = ""

    def add(self, record: StepRecord) -> None:
        """Count a step; the first of an attempt has no duration."""
        self._count += record.every
        if record.seconds > 0:
            self._seconds.add(record.seconds, record.every)
            self._own_seconds.add(record.own_seconds, record.every)

    def update_text(self) -> None:
        """Set ``text`` to the present numbers, as JSON."""
        self.text = json.dumps(
            {
                "count": self._count,
                "seconds": self._seconds.to_json(),
                "own_seconds": self._own_seconds.to_json(),
            }
        )


class _Durations:
    """A histogram: how many fell into each bucket, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Count a duration that stands for ``count``."""
        self._counts[bisect_left(BOUNDS, seconds)] += count
        self._sum += seconds * count

    def to_json(self) -> dict[str, Any]:
        """Return the counts of the buckets, each without those below, and the sum."""
        return {"counts": self._counts, "sum": self._sum}
