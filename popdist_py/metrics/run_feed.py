"""The process that writes a run's numbers to sinks: JSON documents on standard input, one a line.

The launcher starts it: what is slow or large, such as Weights & Biases, never holds up a job. It
ends with its input, also when the launcher is killed, and writes then which sinks failed, one
sentence a line, to the standard output that it was given. Nothing here computes a number.

The first document: ``{"sinks": [...]}``, each ``{"name": ..., "tensorboard": folder}`` or
``{"name": ..., "wandb": arguments of wandb.init}``. Then
``{"begins": true}`` for each attempt, and ``{"step": 7, "values": {name: number}}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from popdist_py.metrics.sink import MetricsSink
from popdist_py.metrics.tensorboard_sink import TensorBoardSink
from popdist_py.metrics.wandb_sink import WandbSink

__all__ = ["feed", "main"]

# Closing may wait for a network; nobody waits that long for us.
_END_SECONDS: Final = 60


class _Guarded:
    """A sink whose first failure is kept for the end."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._place = place
        self._sink = self._make()
        self.trouble = ""

    def _make(self) -> MetricsSink:
        if "tensorboard" in self._place:
            return TensorBoardSink(self._place["tensorboard"])
        return WandbSink(**self._place["wandb"])

    def begin(self) -> None:
        """Begin an attempt: in a folder, its steps replace the same ones of attempts before."""
        if "tensorboard" in self._place:  # a run of Weights & Biases goes on
            self._sink = self._make()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._guard(partial(self._sink.write, step, values))

    def close(self) -> None:
        self._guard(self._sink.close)

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a sink raises, the others go on
            if not self.trouble:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.trouble = f"metrics for {self._place['name']} are incomplete: {reason:.300}"


def feed(lines: Iterable[bytes]) -> list[str]:
    """Write what the lines say; returns which sinks failed, and why.

    A last line without an end is that of a launcher that was killed: it is left out.
    """
    documents = (json.loads(line) for line in lines if line.endswith(b"\n"))
    sinks = [_Guarded(place) for place in next(documents, {"sinks": []})["sinks"]]
    for document in documents:
        for sink in sinks:
            if "values" in document:
                sink.write(document["step"], document["values"])
            else:
                sink.begin()
    signal.alarm(_END_SECONDS)
    for sink in sinks:
        sink.close()
    signal.alarm(0)
    return [sink.trouble for sink in sinks if sink.trouble]


def main() -> None:
    """Feed the sinks from standard input, and say on standard output which failed."""
    # What the services say is no sentence of ours, and what they start must not hold the pipe.
    said = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    troubles = feed(sys.stdin.buffer)
    with os.fdopen(said, "w", encoding="utf-8", errors="replace") as output:
        output.writelines(f"{trouble}\n" for trouble in troubles)
