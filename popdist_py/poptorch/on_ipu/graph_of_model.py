"""Functions that return a model's forward pass as a graph of operations.

To make the graph, the functions of the module ``graph_of_model`` observe the torch operations of a
forward pass. The function ``graph_or_none`` uses the forward pass that PopTorch runs to compile the
model. The function ``graph_of_model`` runs a forward pass on tensors that have shapes but no
values, and so need no memory. The module ``operations_to_steps`` interprets the observed
operations, and the module ``graph_of_steps`` of ``popdist_py.ipu.runs`` makes the graph.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from popdist_py.errors import counted
from popdist_py.ipu.runs.graph_of_steps import graph_of_steps
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.poptorch.calls.call_signature import CallSignature
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.calls.transfer import Transfer
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.torch_modes import MixedPrecision
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.fake_tensors import UnknownValues
from popdist_py.poptorch.on_ipu.operations_to_steps import forward_of
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.tracing.first_forward import WatchedForward, WatchedModel
from popdist_py.poptorch.tracing.recorded_operations import Observed, Observer
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = [
    "graph_of_forward",
    "graph_of_model",
    "graph_or_none",
    "traced_graph",
    "traced_outputs",
    "watched_model",
]

Result = TypeVar("Result")


def graph_of_forward(observed: Observed) -> ModelGraph:
    """Return the graph of an observed forward pass, with the stage and IPU of each operation."""
    return graph_of_steps(forward_of(observed))


def watched_model(
    model: nn.Module, call: Call, options: Options, *, training: bool
) -> WatchedModel:
    """Return a ``WatchedModel``, which traces a forward pass with the given PopTorch options."""
    return WatchedModel(
        model=model,
        call=call,
        training=training,
        strategy=options._execution_strategy,
        overlap=options.overlap_conditions(training),
        module_scopes=options._module_namescope_enabled,
    )


def graph_or_none(observer: Observer) -> ModelGraph | None:
    """Return the graph of the forward pass that compiles a model; None after an error."""
    try:
        model_graph = graph_of_forward(observer.observed())
    except Exception:
        logger.debug("The operations of the model's forward could not be recorded", exc_info=True)
        return None
    logger.debug(
        "The model's forward has %s in %s",
        counted(len(model_graph.graph.operations), "operation"),
        counted(model_graph.placement.num_stages, "stage"),
    )
    return model_graph


def graph_of_model(
    model: nn.Module,
    options: Options,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
) -> ModelGraph:
    """Return the graph of a model, without compiling the model or allocating its tensors.

    Args:
        model: The user's ``torch.nn.Module``, which is not changed.
        options: The options of the PopTorch model.
        args: The positional arguments of a call of the model, with tensors for all micro-batches of
            the call. Only the shapes and types of the tensors in ``args`` and ``kwargs`` are used.
        kwargs: The keyword arguments of the call of the model.
        training: Whether the model is used for training. The forward pass of a model for training
            must compute a loss.

    Raises:
        Error: The forward pass fails on tensors without values, or PopTorch does not support the
            forward pass.
        AssertionError: The arguments do not match the PopTorch options, or a block (part of the
            model) cannot be placed on an IPU.
    """
    try:
        return traced_graph(model, options, args, kwargs, training=training)
    except (Error, AssertionError):
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise Error(
            f"The model's forward failed with tensors that have shapes but no values ({text}). If "
            "the arguments are those of a call of the model, the forward needs their values: "
            "call compile() with these arguments first, and then ask for the report without "
            "arguments"
        ) from error


def traced_graph(
    model: nn.Module,
    options: Options,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
) -> ModelGraph:
    """Return the graph of a model like ``graph_of_model``, but do not convert exceptions.

    Raises:
        Exception: The forward pass raised the exception.
    """
    with _prepared(model, options, args, kwargs or {}, training=training) as run:
        return run.read(_model_graph, observes=True)


def traced_outputs(
    model: nn.Module,
    options: Options,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return the value that a model's forward pass returns, with tensors without values.

    Args:
        model: The user's ``torch.nn.Module``, which is not changed.
        options: The options of the PopTorch model.
        args: The positional arguments of a call of the model.
        kwargs: The keyword arguments of the call of the model.

    Raises:
        Exception: The forward pass raised the exception.
    """
    with _prepared(model, options, args, kwargs or {}, training=False) as run:
        return run.read(lambda seen: seen.result, observes=False)


def _model_graph(seen: WatchedForward) -> ModelGraph:
    assert seen.watch.observer is not None
    return graph_of_forward(seen.watch.observer.observed())


@contextmanager
def _prepared(
    model: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
) -> Iterator[_FakeRun]:
    """Yield a ``_FakeRun``, and restore the host's random state after the with statement."""
    batching = options.batching(training=training)
    batching.check()
    _, call = CallSignature.of(model.forward, args, kwargs, batching.num_slices)
    sizes = [batching.micro_batch(tensor.shape) for tensor in call.leaves]
    transfer = Transfer(double_precision=options.Emulator.double_precision)
    replicas = options.replication_factor * max(1, options.Distributed.numProcesses)
    random = torch.get_rng_state()
    # The mode ``UnknownValues`` makes torch operations run on shapes, without values. The mode must
    # stay active while the modules contain tensors without values.
    with (
        torch.inference_mode(False),
        UnknownValues() as mode,
        _without_tracebacks(),
        _without_compiler(),
    ):
        try:
            state = DeviceState(
                model,
                model,
                transfer.dtype,
                replicas,
                lambda host, dtype: mode.unknown(host.shape, dtype),
            )
            inputs = _micro_batch(call, sizes, transfer, mode)
            yield _FakeRun(model, options, call, state, inputs, training=training)
        finally:
            torch.set_rng_state(random)


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Disable torch's logger for tensors without values inside a with statement.

    The code inside the with statement raises the errors that torch's logger would log. The log
    lines of torch would only repeat errors that the program raises anyway.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run functions that were given to ``torch.compile`` without the compiler."""
    # The compiler would compile functions of this library, and print warnings about them. Without
    # the compiler's module in ``sys.modules``, no function was given to ``torch.compile``.
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def _micro_batch(
    call: Call, sizes: Sequence[int], transfer: Transfer, mode: UnknownValues
) -> Callable[[bool], list[torch.Tensor]]:
    """Return a function that makes the input tensors (without values) of a micro-batch.

    The returned function, which makes the input tensors, has one argument, ``widen_integers``. If
    ``widen_integers`` is True, integer tensors get 64-bit types.
    """

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
    """Runs the first forward pass of a model on tensors without values."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        call: Call,
        state: DeviceState,
        inputs: Callable[[bool], list[torch.Tensor]],
        *,
        training: bool,
    ) -> None:
        self._model = model
        self._options = options
        self._call = call
        self._state = state
        self._inputs = inputs
        self._training = training

    def read(self, result_of: Callable[[WatchedForward], Result], *, observes: bool) -> Result:
        """Run the model's forward pass, and return the result of ``result_of`` for the pass.

        In the first run of the forward pass, the inputs have the integer types that the IPU uses.
        If the first run of the forward pass fails, the forward pass runs again with 64-bit
        integers, because some torch operations require 64-bit indices.

        Args:
            result_of: A function that returns the wanted result of the forward pass.
            observes: Whether to record the operations inside torch's functions.
        """
        with suppress(RuntimeError, IndexError):
            return result_of(self._run(self._inputs(False), observes=observes))
        return result_of(self._run(self._inputs(True), observes=observes))

    def _run(self, inputs: list[torch.Tensor], *, observes: bool) -> WatchedForward:
        model = watched_model(self._model, self._call, self._options, training=self._training)
        context = DeviceContext(state=self._state, training=self._training, is_random=False)
        with MixedPrecision(), self._state.attributes.contents_kept():
            return model.run(inputs, partial(context.enter, tracing=True), observes=observes)
