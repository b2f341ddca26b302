"""Capturing: the graph of a model's forward, from a run that compiles or from one without memory.

Nothing here knows single operations: ``dataflow`` reads them, ``tidying`` makes the graph.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from popdist_py.errors import counted
from popdist_py.poptorch.calls.call_signature import CallSignature
from popdist_py.poptorch.calls.nested_values import Call, Tree
from popdist_py.poptorch.calls.transfer import Transfer
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.modes import MixedPrecision
from popdist_py.poptorch.execution.trace import run_once
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.captured import Captured
from popdist_py.poptorch.on_ipu.dataflow import forward_of
from popdist_py.poptorch.on_ipu.observations import Observed, Observer
from popdist_py.poptorch.on_ipu.tidying import captured_of
from popdist_py.poptorch.on_ipu.unknown_values import UnknownValues
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.recorder import record_placement
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["Capturing", "capture", "graph_of"]

# Runs the model on these tensors in the places of a call's.
_Forward = Callable[[Sequence[torch.Tensor]], Any]


def graph_of(observed: Observed) -> Captured:
    """Return a forward that was observed as a graph, and where its operations stand."""
    return captured_of(forward_of(observed))


class Capturing:
    """Captures the forward that compiles a model; whatever goes wrong decides nothing there.

    Args:
        model: the module whose forward runs.
        call: its arguments.
        wanted: whether to do anything at all.
    """

    def __init__(self, model: nn.Module, call: Call, *, wanted: bool = True) -> None:
        self._model = model
        self._call = call
        self._observer = Observer() if wanted else None

    @classmethod
    def of(cls, model: nn.Module, call: Call, options: Options) -> Capturing:
        """Return the one that the options want."""
        return cls(model, call, wanted=options.Emulator.asks_model)

    @contextmanager
    def observing(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Observe the enclosed forward on these tensors, inside a recorder of placement."""
        if self._observer is None:
            yield
            return
        names = _names(self._model, self._call)
        with self._observer.following(self._model, names, leaves):
            yield

    def telling(self, forward: _Forward) -> _Forward:
        """Return the forward, which now tells what it returns."""
        observer = self._observer
        if observer is None:
            return forward

        def observed(leaves: Sequence[torch.Tensor]) -> Any:
            result = forward(leaves)
            observer.finish(result)
            return result

        return observed

    def captured(self) -> Captured | None:
        """Return the graph; None if none was wanted, or none can be made."""
        if self._observer is None:
            return None
        try:
            captured = self.required()
        except Exception:
            logger.debug("The forward is not captured", exc_info=True)
            return None
        logger.debug(
            "The forward is captured: %s in %s",
            counted(len(captured.graph.operations), "operation"),
            counted(captured.placement.num_stages, "stage"),
        )
        return captured

    def required(self) -> Captured:
        """Return the graph, or raise what went wrong."""
        assert self._observer is not None
        return graph_of(self._observer.observed())


def capture(
    model: nn.Module,
    options: Options,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
) -> Captured:
    """Return the graph of a model without compiling it, and without memory for its tensors.

    Args:
        model: the user's module; nothing of it changes.
        options: those of its wrapper.
        args: positional arguments of a whole call; of tensors only shapes and dtypes count.
        kwargs: keyword arguments.
        training: whether it trains: ``args`` and forward are then those of a training model.

    Raises:
        Error: the forward reads values, or something else that only running it can tell.
        AssertionError: arguments or blocks do not fit.
    """
    batching = options.batching(training=training)
    batching.check()
    _, call = CallSignature.of(model.forward, args, kwargs or {}, batching.num_slices)
    sizes = [batching.micro_batch(tensor.shape) for tensor in call.leaves]
    transfer = Transfer(double_precision=options.Emulator.double_precision)
    replicas = options.replication_factor * max(1, options.Distributed.numProcesses)
    random = torch.get_rng_state()
    # Whatever a program computes with while the modules hold tensors without data has none either.
    with (
        torch.inference_mode(False),
        UnknownValues() as mode,
        _without_tracebacks(),
    ):
        try:
            state = DeviceState(
                model,
                model,
                transfer.dtype,
                replicas,
                lambda host, dtype: mode.unknown(host.shape, dtype),
            )
            run = _FakeRun(model, options, call, state, training=training)
            return run.captured(_micro_batch(call, sizes, transfer, mode))
        finally:
            torch.set_rng_state(random)


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging errors that become ours, such as shapes that do not fit."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _micro_batch(
    call: Call, sizes: Sequence[int], transfer: Transfer, mode: UnknownValues
) -> Callable[[bool], list[torch.Tensor]]:
    """Return what makes the tensors of a micro-batch, with narrow integers widened or not."""

    def make(widen_integers: bool) -> list[torch.Tensor]:
        return [
            transfer.to_device(
                mode.unknown(
                    tensor.shape if tensor.dim() == 0 else (size, *tensor.shape[1:]), tensor.dtype
                ),
                widen_integers=widen_integers,
            )
            for tensor, size in zip(call.leaves, sizes, strict=True)
        ]

    return make


class _FakeRun:
    """The first forward of a model whose tensors have no data."""

    def __init__(
        self, model: nn.Module, options: Options, call: Call, state: DeviceState, *, training: bool
    ) -> None:
        self._model = model
        self._options = options
        self._call = call
        self._state = state
        self._training = training

    def captured(self, inputs: Callable[[bool], list[torch.Tensor]]) -> Captured:
        """Return the graph; if torch refuses the indices, that with 64-bit integers.

        Raises:
            Error: the forward cannot run so.
        """
        try:
            with suppress(RuntimeError, IndexError):
                return self._run(inputs(False))
            return self._run(inputs(True))
        except (Error, AssertionError):
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise Error(
                f"The forward fails on tensors with shapes and without values ({text}). If the "
                "arguments are those of a call, it needs values: call compile() first, which "
                "runs it with them, and ask again without arguments"
            ) from error

    def _run(self, leaves: list[torch.Tensor]) -> Captured:
        model, options = self._model, self._options
        capturing = Capturing(model, self._call)

        @contextmanager
        def around(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
            with (
                record_placement(
                    options._execution_strategy,
                    model,
                    self._training,
                    options.overlap_conditions(self._training),
                    inputs=tensors,
                    module_scopes=options._module_namescope_enabled,
                ),
                capturing.observing(tensors),
            ):
                yield

        def forward(tensors: Sequence[torch.Tensor]) -> Any:
            args, kwargs = self._call.arguments(tensors)
            return model(*args, **kwargs)

        with MixedPrecision(), self._state.contents_kept():
            run_once(
                capturing.telling(forward),
                leaves,
                self._state,
                training=self._training,
                around=around,
            )
            return capturing.required()


def _names(model: nn.Module, call: Call) -> list[str]:
    """Return a name for each tensor of a call: the forward's of its argument."""
    parameters: list[inspect.Parameter] = []
    with suppress(ValueError, TypeError):
        parameters = list(inspect.signature(model.forward).parameters.values())
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    trees: list[tuple[str, Tree]] = [
        (plain[index] if index < len(plain) else f"input{index}", tree)
        for index, tree in enumerate(call.positional)
    ]
    names: list[str] = []
    for name, tree in [*trees, *call.keywords]:
        count = tree.num_tensors
        names += [name] if count == 1 else [f"{name}.{index}" for index in range(count)]
    return names
