"""Which way of running the local replicas a program takes: measured while it is compiled."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch

from popdist_py.poptorch import phase
from popdist_py.poptorch.calls.batching import joined
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.graph_replicas import GraphReplicas
from popdist_py.poptorch.execution.random_streams import host_stream_kept
from popdist_py.poptorch.execution.replicas import (
    FusedReplicas,
    LoopReplicas,
    Model,
    Outputs,
    Replicas,
)
from popdist_py.poptorch.logger import logger

__all__ = ["choose_replicas"]

# Every way is timed for this long, in seconds, but at least once and at most so often.
_BUDGET: Final = 0.2
_MAX_REPEATS: Final = 12
# Of two ways whose times differ by less than this factor, the choice is made in so many turns.
_CLOSE, _MIN_TURNS = 1.5, 3


def choose_replicas(
    wanted: str,
    model: Model,
    slabs: Sequence[torch.Tensor],
    *,
    trained: Sequence[torch.Tensor],
    loop_reason: str | None,
    quick_capture: bool,
    modes: Sequence[type[AbstractContextManager[Any]]],
) -> tuple[str, Replicas]:
    """Return the name of a way of running replicas, and what runs them that way.

    Args:
        wanted: "loop", "fused", "auto" to measure, or what was measured before.
        model: what runs.
        slabs: inputs of one micro-batch of all replicas.
        trained: the parameters that are updated.
        loop_reason: why only the loop is possible, if so.
        quick_capture: whether capturing a graph is a matter of seconds at most.
        modes: makes the contexts that every call runs in.

    Raises:
        Error: "fused" was asked for and is not possible.
    """
    loop = LoopReplicas(model)
    if wanted == "loop" or (wanted == "fused" and model.batching.replicas == 1):
        return "loop", loop
    reason = loop_reason or _why_loop(model, slabs)
    if reason is None:
        # Operations that torch vectorises one by one are slow, which is measured here.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
        trial = _Trial(model, slabs, trained, modes)
        with _silent():
            found, reason = trial.fastest(
                loop,
                _WAYS["auto, no graph" if wanted == "auto" and not quick_capture else wanted],
                must_win=wanted == "auto",
            )
        if found is not None:
            return found
    if wanted == "fused":
        raise Error(f"The replicas cannot run fused, use 'auto' or 'loop': {reason}")
    if reason is not None and model.batching.replicas > 1:
        logger.info("Replicas run one after the other: %s", reason)
    return "loop", loop


# The ways to try, best first: those of a name wait for the ones before them to fail.
_WAYS: Final = {
    "auto": (("graph",), ("fused graph", "fused")),
    "auto, no graph": (("fused",),),
    "fused": (("fused graph", "fused"),),
    "graph": (("graph",),),
    "fused graph": (("fused graph",),),
}


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what this thread prints: trials repeat a forward that on a device is traced once."""
    stdout = sys.stdout
    sys.stdout = _OtherThreads(stdout, threading.get_ident())
    try:
        yield
    finally:
        sys.stdout = stdout


class _OtherThreads:
    """A text stream that takes nothing from one thread."""

    def __init__(self, stream: Any, without: int) -> None:
        self._stream = stream
        self._without = without

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.get_ident() == self._without:
            return len(text)
        return int(self._stream.write(text))


def _why_loop(model: Model, slabs: Sequence[torch.Tensor]) -> str | None:
    """Return why the model only runs as it is written; None if it may run in other ways."""
    if model.state.has_groups:
        return "parameters are grouped over replicas"
    if any(slab.dim() == 0 for slab in slabs):
        return "an input has no batch dimension"
    if model.trace.needs_python:
        return "the forward prints or runs Python on the host, once for each replica"
    return None


Result = tuple[Outputs, list[torch.Tensor | None], list[torch.Tensor]]


class _Trial:
    """Runs one micro-batch in several ways and leaves the device as it was."""

    def __init__(
        self,
        model: Model,
        slabs: Sequence[torch.Tensor],
        trained: Sequence[torch.Tensor],
        modes: Sequence[type[AbstractContextManager[Any]]],
    ) -> None:
        self._model = model
        self._slabs = slabs
        self._trained = trained
        self._modes = modes
        self._buffers = [stack for _, _, stack in model.state.stacked_buffers()]
        self._buffers += list(model.state.buffers.values())
        self._parameters = list(model.state.parameters.values())

    def fastest(
        self, loop: Replicas, ways: Sequence[Sequence[str]], *, must_win: bool
    ) -> tuple[tuple[str, Replicas] | None, str | None]:
        """Return the fastest way that agrees with the loop, or why none does.

        Args:
            loop: defines the result.
            ways: names; of each sequence, the first that agrees is a candidate.
            must_win: whether the loop is a candidate too.
        """
        loop_time, _ = self._timed(loop)
        expected = self._both_results(loop)
        found = [("loop", loop, loop_time)] if must_win else []
        reasons: list[str] = []
        for names in ways:
            for name in names:
                reason: str | None
                try:
                    made = self._make(name)
                    if made is None:
                        continue
                    replicas = made
                    seconds, _ = self._timed(replicas)
                    reason = _difference(expected, self._both_results(replicas))
                except Exception as error:
                    reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
                if reason is None:
                    found.append((name, replicas, seconds))
                    break
                reasons.append(reason)
        best = self._best(found)
        return best if best and best[0] != "loop" else None, "; ".join(reasons) or None

    def _best(
        self, candidates: Sequence[tuple[str, Replicas, float]]
    ) -> tuple[str, Replicas] | None:
        """Return the fastest way; two that are close run in turns, so that disturbances meet both.

        Args:
            candidates: name, what runs, and the seconds that it took.
        """
        ordered = sorted(candidates, key=lambda candidate: candidate[2])
        if not ordered:
            return None
        first, *others = ordered
        if not others or others[0][2] > _CLOSE * first[2]:
            return first[:2]
        second = others[0]
        times: dict[str, list[float]] = {first[0]: [], second[0]: []}
        start = time.perf_counter()
        for _ in range(_MAX_REPEATS):
            for name, replicas, _ in (first, second):
                times[name].append(self._once(replicas, self._slabs)[0])
            if time.perf_counter() - start > 2 * _BUDGET and len(times[first[0]]) >= _MIN_TURNS:
                break
        return min((first, second), key=lambda candidate: min(times[candidate[0]]))[:2]

    def _make(self, name: str) -> Replicas | None:
        """Return what runs replicas in the way ``name``; None if it is not for this model."""
        model = self._model
        vectorised = name.startswith("fused")
        if vectorised and model.batching.replicas == 1:
            return None
        if name == "fused":
            return FusedReplicas(model)
        # Random numbers of one pass over all replicas need Python: each has its own stream.
        if model.trace.needs_python or self._modes or (vectorised and model.trace.is_random):
            return None
        if model.training and not model.trace.loss_has_gradient:
            return None
        with ExitStack() as stack:
            self._enter(stack)
            return GraphReplicas(model, self._trained, self._slabs, vectorised=vectorised)

    def _enter(self, stack: ExitStack) -> None:
        """Enter the contexts that a call runs in."""
        model = self._model
        stack.enter_context(torch.set_grad_enabled(model.training))
        stack.enter_context(host_stream_kept(model.trace.is_random))
        stack.enter_context(model.state.shown())
        stack.enter_context(phase.entered(phase.Phase(training=model.training, tracing=False)))
        for mode in self._modes:
            stack.enter_context(mode())

    def _timed(self, replicas: Replicas) -> tuple[float, Result]:
        """Return the shortest time of a few runs, in seconds, and the result of the first."""
        seconds, first = self._once(replicas, self._slabs)
        times = [seconds]
        while sum(times) < _BUDGET and len(times) < _MAX_REPEATS:
            times.append(self._once(replicas, self._slabs)[0])
        # The first run warms up.
        return min(times[1:] or times), first

    @torch.no_grad()
    def _both_results(self, replicas: Replicas) -> Result:
        """Return the results for the inputs, and for other inputs and weights.

        The second tell what depends on them from what only was so while the graph was captured.
        """
        outputs, gradients, rest = self._once(replicas, self._slabs)[1]
        others = [_other(slab) for slab in self._slabs]
        # Not in place: other instances may be reading these very weights.
        saved = [parameter.data for parameter in self._parameters]
        try:
            for parameter in self._parameters:
                if parameter.is_floating_point():
                    parameter.data = parameter.detach() * 0.75
            more_outputs, more_gradients, more = self._once(replicas, others)[1]
        finally:
            for parameter, value in zip(self._parameters, saved, strict=True):
                parameter.data = value
        return [*outputs, *more_outputs], gradients + more_gradients, rest + more

    def _once(self, replicas: Replicas, slabs: Sequence[torch.Tensor]) -> tuple[float, Result]:
        model = self._model
        copies = [slab.clone() for slab in slabs]
        saved = [buffer.clone() for buffer in self._buffers]
        if model.gradients is not None:
            model.gradients.begin()
        with ExitStack() as stack:
            self._enter(stack)
            start = time.perf_counter()
            outputs = replicas.run(copies, 0, 1.0)
            seconds = time.perf_counter() - start
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._trained]
        buffers = [buffer.clone() for buffer in self._buffers]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in zip(self._buffers, saved, strict=True):
                buffer.copy_(value)
        return seconds, (outputs, gradients, [*buffers, *copies])


def _other(slab: torch.Tensor) -> torch.Tensor:
    """Return other valid values for an input: the samples in another order, floats smaller."""
    flipped = slab.flip(0)
    return flipped * 0.75 if slab.is_floating_point() else flipped


def _difference(expected: Result, got: Result) -> str | None:
    """Return in what the fused replicas differ from the loop; None if they agree."""
    for what, loop, fused in (
        ("outputs", _flat(expected[0]), _flat(got[0])),
        ("gradients", expected[1], got[1]),
        ("buffers or inputs", expected[2], got[2]),
    ):
        scale = max((_magnitude(tensor) for tensor in loop), default=0.0)
        if len(loop) != len(fused) or not all(
            _close(a, b, scale) for a, b in zip(loop, fused, strict=True)
        ):
            return f"in one pass they give other {what}"
    return None


def _flat(outputs: Outputs) -> list[torch.Tensor | None]:
    return [joined(values) for values in outputs]


def _magnitude(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(tensor.abs().to(torch.float64).nan_to_num().max())


def _close(expected: torch.Tensor | None, got: torch.Tensor | None, scale: float) -> bool:
    """Compare one tensor; ``scale`` is the largest value of its kind, for what is all rounding."""
    if expected is None or got is None:
        return expected is got
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    tolerance = {torch.float16: 2e-2, torch.float64: 1e-9}.get(expected.dtype, 1e-3)
    return torch.allclose(
        expected, got, rtol=tolerance, atol=tolerance * max(scale, 1e-9), equal_nan=True
    )
