"""Which replica back end a program takes: measured while it is compiled.

Knows the registry in ``execution/backends.py``, and none of its names.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from popdist_py.poptorch.calls.batching import joined
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution import backends
from popdist_py.poptorch.execution.backends import Backend
from popdist_py.poptorch.execution.replicas import DeviceModel, Outputs, Replicas
from popdist_py.poptorch.logger import logger

__all__ = ["choose_backend"]

# Every back end is timed for this long, in seconds, but at least once and at most so often.
_BUDGET: Final = 0.2
_MAX_REPEATS: Final = 12
# Two back ends whose times differ by less than this factor run in at least so many turns.
_CLOSE, _MIN_TURNS = 1.5, 3


class Candidate(NamedTuple):
    """A back end that is ready to run a model.

    Attributes:
        name: of the back end.
        replicas: what runs.
        seconds: that it took; 0 if it was not timed.
    """

    name: str
    replicas: Replicas
    seconds: float = 0.0


def choose_backend(
    wanted: str,
    model: DeviceModel,
    call: Call,
    inputs: Sequence[torch.Tensor],
    *,
    quick_capture: bool,
) -> Candidate:
    """Return the replica back end of a model.

    Args:
        wanted: "auto" to measure, the name or the option of a back end, or what was measured
            before.
        model: what runs.
        call: arguments of a call.
        inputs: a combined micro-batch of each input.
        quick_capture: whether capturing a graph is a matter of seconds at most.

    Raises:
        Error: an option was asked for and none of its back ends can run the replicas.
    """
    reference = backends.BACKENDS[0]
    loop = Candidate(reference.name, reference.make(model, call, inputs))
    alternatives, reasons = _alternatives(wanted, model, quick_capture=quick_capture)
    if alternatives:
        # torch would warn of operations that it vectorises slowly; measuring shows them.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
        tuner = _Autotuner(model, call, inputs)
        with _silent():
            best, failures = tuner.fastest(loop, alternatives, must_win=wanted == "auto")
        if best is not None:
            return best
        # What was measured and is slower is no failure, whatever other back ends lack.
        reasons = failures if wanted == "auto" else reasons + failures
    if reasons and model.batching.replicas > 1:
        reason = "; ".join(dict.fromkeys(reasons))
        if wanted in {backend.option for backend in backends.BACKENDS}:
            raise Error(f"The replicas cannot run {wanted}, use 'auto' or 'loop': {reason}")
        logger.info("Replicas run one after the other: %s", reason)
    return loop


def _alternatives(
    wanted: str, model: DeviceModel, *, quick_capture: bool
) -> tuple[list[list[Backend]], list[str]]:
    """Return the back ends to try beside the reference, and why others cannot run the model.

    Those of one option stand together, best first: each waits for the ones before it to fail.
    """
    possible: dict[str, list[Backend]] = {}
    reasons: list[str] = []
    for backend in backends.BACKENDS[1:]:
        if wanted == "auto":
            is_asked_for = quick_capture or not backend.captures
        else:
            is_asked_for = wanted in (backend.name, backend.option)
        if not is_asked_for:
            continue
        reason = backend.can_run(model)
        if reason is None:
            possible.setdefault(backend.option or backend.name, []).append(backend)
        else:
            reasons.append(reason)
    return list(possible.values()), reasons


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what this thread prints: autotuning repeats a forward that a device traces once."""
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


Result = tuple[Outputs, list[torch.Tensor | None], list[torch.Tensor]]


class _Autotuner:
    """Runs one micro-batch with several back ends and leaves the device as it was."""

    def __init__(self, model: DeviceModel, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._buffers = [stack for _, _, stack in model.state.stacked_buffers()]
        self._buffers += list(model.state.buffers.values())
        self._parameters = list(model.state.parameters.values())

    def fastest(
        self, loop: Candidate, alternatives: Sequence[Sequence[Backend]], *, must_win: bool
    ) -> tuple[Candidate | None, list[str]]:
        """Return the fastest back end that agrees with the loop, or None; and what failed why.

        Args:
            loop: defines the result.
            alternatives: of each sequence, the first that agrees is a candidate.
            must_win: whether the loop is a candidate too.
        """
        loop = loop._replace(seconds=self._timed(loop.replicas))
        expected = self._both_results(loop.replicas)
        candidates = [loop] if must_win else []
        reasons: list[str] = []
        for rows in alternatives:
            for backend in rows:
                try:
                    candidate = self._made(backend)
                    reason = _difference(expected, self._both_results(candidate.replicas))
                except Exception as error:
                    reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
                if reason is None:
                    candidates.append(candidate)
                    break
                reasons.append(f"{backend.name}: {reason}")
        best = self._best(candidates)
        return None if best is loop else best, reasons

    def _made(self, backend: Backend) -> Candidate:
        with self._model.context.enter():
            replicas = backend.make(self._model, self._call, self._inputs)
        return Candidate(backend.name, replicas, self._timed(replicas))

    def _best(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest one; two close ones run in turns, to meet the same disturbances."""
        ordered = sorted(candidates, key=lambda candidate: candidate.seconds)
        if not ordered:
            return None
        first, *others = ordered
        if not others or others[0].seconds > _CLOSE * first.seconds:
            return first
        pair = (first, others[0])
        times: tuple[list[float], list[float]] = ([], [])
        start = time.perf_counter()
        for _ in range(_MAX_REPEATS):
            for candidate, taken in zip(pair, times, strict=True):
                taken.append(self._once(candidate.replicas, self._inputs)[0])
            if time.perf_counter() - start > 2 * _BUDGET and len(times[0]) >= _MIN_TURNS:
                break
        return pair[0] if min(times[0]) <= min(times[1]) else pair[1]

    def _timed(self, replicas: Replicas) -> float:
        """Return the shortest time of a few runs, in seconds."""
        times = [self._once(replicas, self._inputs)[0]]
        while sum(times) < _BUDGET and len(times) < _MAX_REPEATS:
            times.append(self._once(replicas, self._inputs)[0])
        # The first run warms up.
        return min(times[1:] or times)

    @torch.no_grad()
    def _both_results(self, replicas: Replicas) -> Result:
        """Return the results for the inputs, and for other inputs and weights.

        The second tell what depends on them from what only was so while the graph was captured.
        """
        outputs, gradients, rest = self._once(replicas, self._inputs)[1]
        others = [_other(tensor) for tensor in self._inputs]
        # Weights are replaced, not changed in place: other instances may read this memory.
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

    def _once(self, replicas: Replicas, inputs: Sequence[torch.Tensor]) -> tuple[float, Result]:
        model = self._model
        copies = [tensor.clone() for tensor in inputs]
        saved = [buffer.clone() for buffer in self._buffers]
        if model.gradients is not None:
            model.gradients.zero()
        with model.context.enter():
            start = time.perf_counter()
            outputs = replicas.run(self._call, copies, 0, 1.0)
            seconds = time.perf_counter() - start
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in model.trained]
        buffers = [buffer.clone() for buffer in self._buffers]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in zip(self._buffers, saved, strict=True):
                buffer.copy_(value)
        return seconds, (outputs, gradients, [*buffers, *copies])


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Return other valid values for an input: the samples in another order, floats smaller."""
    flipped = tensor.flip(0)
    return flipped * 0.75 if tensor.is_floating_point() else flipped


def _difference(expected: Result, got: Result) -> str | None:
    """Return in what a back end differs from the loop; None if it agrees."""
    for what, loop, other in (
        ("outputs", _flat(expected[0]), _flat(got[0])),
        ("gradients", expected[1], got[1]),
        ("buffers or inputs", expected[2], got[2]),
    ):
        scale = max((_magnitude(tensor) for tensor in loop), default=0.0)
        if len(loop) != len(other) or not all(
            _close(a, b, scale) for a, b in zip(loop, other, strict=True)
        ):
            return f"its {what} are not those of the loop"
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
