"""The function ``compile_model``, which makes a program from a module and example arguments.

The module ``model_checks`` checks that a model and its options fit together. The module
``execution/device_loop`` runs the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count

import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.freed_memory import freed_memory_given_back
from popdist_py.poptorch.calls.batching import Batching
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.compiled_model import Compiled, Executable
from popdist_py.poptorch.compilation.model_checks import (
    check_changed_buffers,
    check_norm_groups,
    check_placement,
)
from popdist_py.poptorch.compilation.program_builder import build_program
from popdist_py.poptorch.compilation.source_model import SourceModel
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.torch_modes import MixedPrecision
from popdist_py.poptorch.group_norms.batch_norm import OneValueAllowed
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.graph_of_model import graph_or_none, watched_model
from popdist_py.poptorch.on_ipu.memory_check import check_memory
from popdist_py.poptorch.on_ipu.published_figures import keep_device_document
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.options_without_effect import say_idle_options
from popdist_py.poptorch.options.profile_folder import profile_folder
from popdist_py.poptorch.tracing.first_forward import FirstForward, first_forward
from popdist_py.poptorch.update.flat_buffers import FlatBuffers
from popdist_py.poptorch.weights.copy_before_read import plain_class
from popdist_py.poptorch.weights.device_state import DeviceState
from popdist_py.poptorch.weights.norm_statistics import norm_statistics
from popdist_py.timeline import spans

__all__ = ["compile_model"]

# The progress bar of the compilation shows _FIRST_PERCENT when the choice of a replica back end
# starts. For each replica back end that is tried, the progress bar advances by _PERCENTS, up to
# _LAST_PERCENT.
_FIRST_PERCENT, _PERCENTS, _LAST_PERCENT = 30, 20, 95


def compile_model(
    source: SourceModel,
    call: Call,
    earlier: Executable | None,
    advance: Callable[[int, str], None],
    placed: Callable[[int], None],
) -> Compiled:
    """Compile a model for arguments with the same structure and shapes as in ``call``.

    Args:
        source: The module, its options and its optimiser.
        call: Example arguments of one call of the model, with the samples of all its micro-batches.
        earlier: The result of an earlier compilation of the same model, which makes tracing the
            forward pass unnecessary; None without an earlier compilation.
        advance: A function that is called with the completed percentage of the compilation and the
            name of the work that the compilation does next.
        placed: A function that is called with the number of IPUs that all replicas need, as soon as
            the compilation has determined this number of IPUs.

    Raises:
        Error, AssertionError: The model, its options and its arguments do not match.
    """
    with freed_memory_given_back() if source.training else nullcontext():
        return _compile(source, call, earlier, advance, placed)


def _compile(
    source: SourceModel,
    call: Call,
    earlier: Executable | None,
    advance: Callable[[int, str], None],
    placed: Callable[[int], None],
) -> Compiled:
    source.options._Popart.check()
    say_idle_options(source.options)
    _record_profile(source.options)
    batching = source.batching
    batching.check()
    if source.training:
        check_norm_groups(source.options, batching, source.communicator)
    for tensor in call.leaves:
        source.transfer.check(tensor)
    sizes = [batching.micro_batch(tensor.shape) for tensor in call.leaves]
    advance(5, "copying weights")
    state = _make_state(source)
    advance(15, "tracing")
    executable = earlier or _trace(source, call, sizes, state)
    placement = executable.first_forward.placement
    placed(check_placement(placement, source.options, batching, training=source.training))
    run = source.device_run(executable.model_graph)
    check_memory(run, source.options, state, placement.num_ipus)
    _give_buffers(source, executable.first_forward, state, batching)
    steps = count()

    def tell(what: str) -> None:
        advance(min(_FIRST_PERCENT + _PERCENTS * next(steps), _LAST_PERCENT), what)

    compiled = build_program(source, executable, state, call, tell=tell)
    keep_device_document(run, source.options, plain_class(source.user_model).__name__)
    advance(100, "")
    return compiled


def _make_state(source: SourceModel) -> DeviceState:
    replicas = source.options.replication_factor * source.communicator.num_instances
    state = DeviceState(source.model, source.user_model, source.transfer.dtype, replicas)
    _share(state, source.communicator)
    for name in source.options.updatable_buffers:
        if name not in state.buffers:
            raise Error(
                f"Options.updatableNamedBuffers(): the model has no buffer {name!r}. The buffers "
                f"of the model: {', '.join(state.buffers) or 'none'}"
            )
    return state


def _trace(source: SourceModel, call: Call, sizes: Sequence[int], state: DeviceState) -> Executable:
    """Trace the forward pass.

    If torch raises an error in the forward pass, ``_trace`` traces the forward pass again with
    integers of 64 bits.
    """
    try:
        return _trace_with(source, call, sizes, state, widen_integers=False)
    except (RuntimeError, IndexError) as error:
        logger.debug(
            "The forward pass is traced again with 64-bit integers, because tracing with 32-bit "
            "integers failed: %s",
            error,
        )
        with suppress(RuntimeError, IndexError):
            return _trace_with(source, call, sizes, state, widen_integers=True)
        raise


def _trace_with(
    source: SourceModel,
    call: Call,
    sizes: Sequence[int],
    state: DeviceState,
    *,
    widen_integers: bool,
) -> Executable:
    inputs = [
        source.transfer.to_device(
            tensor if tensor.dim() == 0 else tensor[:size], widen_integers=widen_integers
        )
        for tensor, size in zip(call.leaves, sizes, strict=True)
    ]
    if state.has_own_tensors:
        state.select(0, source.first_replica)
    watched = watched_model(source.model, call, source.options, training=source.training)
    # After the traced forward pass, the function first_forward() restores the state of the host's
    # random generator.
    context = DeviceContext(state=state, training=source.training, is_random=False)
    has_groups = source.training and source.options.Training.norm_group_size > 1
    with OneValueAllowed() if has_groups else nullcontext(), MixedPrecision() as precision:
        found, observer = first_forward(
            watched,
            inputs,
            state,
            partial(context.enter, tracing=True),
            observes=source.options.Emulator.asks_model,
        )
    return Executable(
        first_forward=found,
        replica_execution=source.options.Emulator.replica_execution,
        widen_integers=widen_integers,
        mixed_precision=precision.met_half,
        model_graph=None if observer is None else graph_or_none(observer),
    )


def _give_buffers(
    source: SourceModel, first: FirstForward, state: DeviceState, batching: Batching
) -> None:
    """Make a separate copy, for each replica, of the buffers that the forward pass changes.

    Each replica always has its own statistics of norm layers, because each replica normalises its
    own micro-batches. The model's options must allow each replica a separate copy of every changed
    buffer that is not a statistic of a norm layer.
    """
    if first.modified_buffers and batching.replicas > 1:
        others = first.modified_buffers - norm_statistics(source.model)
        check_changed_buffers(others, source.options, batching)
        state.give_replicas_buffers(first.modified_buffers, batching.replicas)


def _share(state: DeviceState, communicator: Communicator) -> None:
    """Copy the weights and buffers of instance 0 to every instance."""
    if communicator.num_instances == 1:
        return
    tensors = [parameter.data for parameter in state.parameters.values()]
    tensors += list(state.buffers.values())
    flat = FlatBuffers(tensors)
    flat.fill(tensors)
    for array in flat.arrays:
        communicator.broadcast(array)
    torch._foreach_copy_(tensors, flat.views)


def _record_profile(options: Options) -> None:
    """Record the timeline of this process if a profile is enabled in the options.

    Raises:
        Error: The folder for the profile cannot be made.
    """
    folder = profile_folder(options)
    if folder is None:
        return
    try:
        path = spans.record(folder)
    except OSError as error:
        raise Error(f"cannot make the folder {folder} for the profile: {error.strerror}") from None
    if path is not None:
        logger.info(
            "The profile is a timeline, which will be written to %s when the program ends", path
        )
