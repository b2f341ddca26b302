"""What it costs to see a job: of a training step, of the wrapper beside it, and of every view.

Steps of a small wrapped model with its loader, in turns with and without the ledger of activities:
their difference is the cost of a step, whatever the model. One step of 10 ms is what it is compared
with. The same with and without a timeline that is recorded (--timeline); a span is one of the
program's own, recorded or not. A look is what the wrapper does every one or two seconds while
somebody may want to know. Two more rows are what counting adds to plain PyTorch: to the step of an
optimizer, and to a whole step with its loader and its backward pass.

With --views, whole jobs instead, with and without each view, in turns (observed_views.py): some
seven minutes.

Usage: python benchmarks/observe.py [--json] [--turns 40] [--views] [--rounds 9] [--steps 400]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from observed_views import measured_views
from show_rows import show_rows
from torch import nn

import popdist_py
from popdist_py import activities, heartbeat, poptorch
from popdist_py.activities import ledger
from popdist_py.environment import TIMELINE_MIB
from popdist_py.timeline import spans
from popdist_py.timeline.recorder import Recorder
from popdist_py.torch_loops.training_loop import TrainingLoop
from poprun_py.instance.program_activity import resource_usage
from poprun_py.instance.progress_memory import ProgressMemory

_STEPS = 50
_COMPARED_MS = 10.0


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return out, self.loss(out, y)


def main() -> None:
    """Measure, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--views", action="store_true", help="whole jobs, with each view")
    parser.add_argument("--rounds", type=int, default=9, help="of whole jobs")
    parser.add_argument("--steps", type=int, default=400, help="of a whole job")
    arguments = parser.parse_args()
    if arguments.views:
        show_rows(measured_views(arguments.rounds, arguments.steps), as_json=arguments.json)
        return
    torch.set_num_threads(1)
    rows = [
        _steps("step", _switched_off, arguments.turns),
        *_plain_loop(),
        *_timeline(arguments.turns),
        _look(),
    ]
    show_rows(rows, as_json=arguments.json)


def _steps(
    what: str, switched_off: Callable[[], AbstractContextManager[None]], turns: int
) -> dict[str, Any]:
    """Return the cost of one step: the median difference between turns with and without."""
    options = poptorch.Options().showCompilationProgressBar(False)
    net = _Model()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.01))
    x = torch.randn(_STEPS * 4, 16)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(x, x), batch_size=4)
    _turn(model, loader)
    with_it, without = [], []
    for _ in range(turns):
        with_it.append(_turn(model, loader))
        with switched_off():
            without.append(_turn(model, loader))
    pairs = zip(with_it, without, strict=True)
    cost = statistics.median(one - other for one, other in pairs)
    return {
        "what": what,
        "microseconds": round(cost * 1e6, 2),
        "with": round(statistics.median(with_it) * 1e6, 1),
        "without": round(statistics.median(without) * 1e6, 1),
        f"percent of {_COMPARED_MS:g} ms": round(cost * 1e5 / _COMPARED_MS, 4),
    }


def _turn(model: Any, loader: Any) -> float:
    """Return the seconds of a step, over one epoch."""
    began = time.perf_counter()
    for x, y in loader:
        model(x, y)
    return (time.perf_counter() - began) / _STEPS


def _nothing(*_: object) -> None:
    pass


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    """Have nothing counted."""
    nothing = mock.patch.multiple(activities.doing, __enter__=_nothing, __exit__=_nothing)
    with (
        nothing,
        mock.patch.object(ledger, "step_done", _nothing),
        mock.patch.object(activities, "step_done", _nothing),
    ):
        yield


def _timeline(turns: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of a step whose timeline is recorded, and of one span."""
    yield {"what": "span, not recorded", "microseconds": _span()}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(f"{folder}/instance-0", TIMELINE_MIB << 20)
        with mock.patch.object(spans, "_recorder", recorder):
            spans._listen()
            yield {"what": "span, recorded", "microseconds": _span()}
            yield _steps("step with a timeline", _unrecorded, turns)
            activities.listen(None)


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Have no timeline recorded."""
    activities.listen(None)
    with mock.patch.object(spans, "_recorder", None):
        yield
    spans._listen()


def _span() -> float:
    """Return the microseconds of a span: the best of several turns."""
    turn = timeit.Timer("with span('work'): pass", globals={"span": popdist_py.span})
    return round(min(turn.repeat(10, 10_000)) * 100, 2)


def _plain_loop() -> Iterator[dict[str, Any]]:
    """Yield what a plain PyTorch loop costs: an optimizer's step, and a whole step of the loop."""
    loop, optimizer = TrainingLoop(), _Model()

    def update() -> None:
        loop.begin_update(optimizer)
        loop.end_update(optimizer)

    def whole() -> None:
        loop.load(_nothing)
        loop.backward(_nothing)
        update()

    # The models of the other rows have ended automatic counting.
    names = ("_has_model", "_is_explicit")
    with mock.patch.multiple(heartbeat, **dict.fromkeys(names, False)):
        for what, step in (("step of an optimizer", update), ("step of a plain loop", whole)):
            cost = min(timeit.repeat(step, number=1000, repeat=200)) * 1000
            yield {"what": what, "microseconds": round(cost, 2)}


def _look() -> dict[str, Any]:
    """Return what one look costs the wrapper: as much CPU time as it lasts."""
    os.environ.pop("POPDIST_HEARTBEAT", None)
    memory = ProgressMemory()
    took = []
    for _ in range(100):
        began = time.process_time()
        resource_usage(os.getpid())
        memory.ledger()
        took.append(time.process_time() - began)
    cost = statistics.median(took)
    return {
        "what": "look",
        "microseconds": round(cost * 1e6, 1),
        "percent of a CPU, once a second": round(cost * 100, 4),
    }


if __name__ == "__main__":
    main()
