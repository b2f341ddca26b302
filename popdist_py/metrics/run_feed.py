"""The process that writes the numbers of a run to files, TensorBoard and Weights & Biases.

The launcher starts this separate process, so that slow or large packages do not delay the job. The
process ends when its standard input ends, even if the launcher is killed. Before it ends, the
process writes a line about each failed sink to standard output.

Each line of standard input is a JSON document. The first document, ``{"sinks": [...]}``, contains
for each sink its ``name`` and one of ``{"tensorboard": folder}``, ``{"csv": file}``, ``{"jsonl":
file}`` and ``{"wandb": arguments of wandb.init}``. The following documents are ``{"begins": true}``
at the start of each attempt, and ``{"step": 7, "values": {name: number}}`` for each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from popdist_py.metrics.csv_sink import CsvSink
from popdist_py.metrics.jsonl_sink import JsonlSink
from popdist_py.metrics.sink import MetricsSink
from popdist_py.metrics.tensorboard_sink import TensorBoardSink
from popdist_py.metrics.wandb_sink import WandbSink

# The longest time, in seconds, for closing the sinks. Closing a sink may wait for a network.
_END_SECONDS: Final = 60


class _Guarded:
    """A wrapper of a sink, which stores a message about the sink's first error in ``trouble``."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._place = place
        self._sink = self._make()
        self.trouble = ""

    def _make(self) -> MetricsSink:
        if "wandb" in self._place:
            return WandbSink(**self._place["wandb"])
        makers: dict[str, Callable[[str], MetricsSink]]
        makers = {"tensorboard": TensorBoardSink, "csv": CsvSink, "jsonl": JsonlSink}
        tool = next(tool for tool in makers if tool in self._place)
        return makers[tool](self._place[tool])

    def begin(self) -> None:
        """Begin an attempt, whose steps replace the same steps of earlier attempts in files."""
        if "wandb" not in self._place:  # for Weights & Biases, the same run continues
            self._sink = self._make()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._guard(partial(self._sink.write, step, values))

    def close(self) -> None:
        self._guard(self._sink.close)

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # an error of a sink must not stop the other sinks
            if not self.trouble:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.trouble = f"metrics for {self._place['name']} are incomplete: {reason:.300}"


def feed(lines: Iterable[bytes]) -> list[str]:
    """Write the numbers in ``lines`` to all sinks, and return a message about each failed sink.

    A last line without a newline is ignored, because a killed launcher may leave an incomplete
    line.
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
    """Pass the values from standard input to the sinks, and write messages about failed sinks."""
    # Output of packages such as wandb must not mix with the messages on standard output. Child
    # processes of the packages must not inherit the pipe to the launcher.
    said = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    troubles = feed(sys.stdin.buffer)
    with os.fdopen(said, "w", encoding="utf-8", errors="replace") as output:
        output.writelines(f"{trouble}\n" for trouble in troubles)
