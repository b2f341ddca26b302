"""The function ``build_program``, which makes the program that runs a compiled model.

The module ``execution/device_loop`` runs the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.backend_choice import BackendChoice
from popdist_py.poptorch.compilation.compiled_model import Compiled, Executable
from popdist_py.poptorch.compilation.source_model import SourceModel
from popdist_py.poptorch.compilation.training_setup import TrainingSetup
from popdist_py.poptorch.execution.anchors import Anchors
from popdist_py.poptorch.execution.call_times import Counters
from popdist_py.poptorch.execution.device_context import DeviceContext, Mode
from popdist_py.poptorch.execution.device_loop import Program
from popdist_py.poptorch.execution.floating_point_traps import FloatingPointTraps
from popdist_py.poptorch.execution.random_streams import RandomStreams
from popdist_py.poptorch.execution.replicas import DeviceModel, Forward
from popdist_py.poptorch.execution.torch_modes import MixedPrecision, OneThread
from popdist_py.poptorch.group_norms.batch_norm import GroupNorms
from popdist_py.poptorch.group_norms.statistics_exchange import GroupExchange
from popdist_py.poptorch.on_ipu.published_figures import IpuRows, modelled_times
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.first_forward import FirstForward
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.update.training import Training
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["build_program"]


def build_program(
    source: SourceModel,
    executable: Executable,
    state: DeviceState,
    call: Call,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Compiled:
    """Return a compiled model that uses existing device tensors.

    Args:
        source: The module, its options and its optimiser.
        executable: The result of compiling the model.
        state: The parameters and buffers on the device.
        call: Example arguments of one call of the model, with the samples of all its micro-batches.
        tell: A function that updates the progress bar of the compilation. The function gets a short
            text about what the compilation does next.
    """
    batching = source.batching
    run = source.device_run(executable.model_graph)
    streams = RandomStreams(_seed(source))
    first = executable.first_forward
    training = _training(source, first, state, streams)
    anchors = _anchors(source, first, state, call, training)
    model = _device_model(source, executable, state, call, training, anchors, streams)
    chosen = BackendChoice(
        model, call, _first_inputs(source, call, executable), source.communicator, tell
    ).choose(executable.replica_execution, executable.back_end)
    program = Program(
        batching=batching,
        replicas=chosen.replicas,
        back_end=chosen.name,
        training=training,
        context=model.context,
        num_outputs=len(first.shared),
        returns_results=not source.options.synthetic_data,
        loss_output=first.loss_output if source.training else None,
        anchors=anchors,
        counters=Counters(
            batching,
            len(call.leaves),
            len(first.shared),
            synthetic=source.options.synthetic_data,
            modelled=modelled_times(run, source.options),
        ),
    )
    executable = replace(executable, back_end=chosen.name)
    return Compiled(
        executable=executable,
        state=state,
        program=program,
        streams=streams,
        ipu_rows=IpuRows.of(run, source.options),
    )


def _device_model(
    source: SourceModel,
    executable: Executable,
    state: DeviceState,
    call: Call,
    training: Training | None,
    anchors: Anchors,
    streams: RandomStreams,
) -> DeviceModel:
    """Return the ``DeviceModel``: the properties of a model that replica back ends need."""
    if training is not None:
        state.hook_gradients(source.user_model.parameters())
    groups = _norm_groups(source)
    norms = [] if groups is None else [partial(GroupNorms, groups)]
    context = DeviceContext(
        state=state,
        training=source.training,
        is_random=executable.first_forward.is_random or bool(training and training.rounding),
        modes=(*norms, *_modes(source, executable)),
    )
    return DeviceModel(
        forward=_watched(source, anchors) if anchors.needs_operations else source.forward,
        context=context,
        first_forward=executable.first_forward,
        batching=source.batching,
        streams=streams,
        first_replica=source.first_replica,
        gradients=training.gradients if training else None,
        trained=training.optimizer.parameters if training else (),
        only_loop=_why_loop(source, anchors, executable, state, call),
        norm_groups=groups,
        # A change that the forward pass makes to an input must also change the caller's tensor.
        # Therefore an input that the forward pass changes must not be copied.
        aligned_inputs=bool(
            source.options.Emulator.deterministic_reduction
            and not executable.first_forward.changed_inputs
        ),
    )


def _norm_groups(source: SourceModel) -> GroupExchange | None:
    """Return the object that exchanges batch norm statistics between replicas.

    The result is None if each replica uses only its own batch norm statistics.
    """
    size = source.options.Training.norm_group_size
    if not source.training or size == 1:
        return None
    return GroupExchange(size, source.batching.replicas, source.communicator)


def _training(
    source: SourceModel, first: FirstForward, state: DeviceState, streams: RandomStreams
) -> Training | None:
    """Return the object that reduces gradients and updates weights; None for inference."""
    if source.optimizer is None:
        return None
    setup = TrainingSetup(
        options=source.options, optimizer=source.optimizer, communicator=source.communicator
    )
    return setup.make(first, state, streams.seed_update)


def _anchors(
    source: SourceModel,
    first: FirstForward,
    state: DeviceState,
    call: Call,
    training: Training | None,
) -> Anchors:
    """Return the object that stores the tensors that ``Options.anchorTensor()`` selected."""
    trained = [name for name in sorted(first.used_parameters) if training is not None]
    return Anchors(
        source.options.anchored_tensors,
        source.batching,
        {**state.parameters, **state.buffers},
        updated=[name for name in trained if state.parameters[name].requires_grad],
        operations=[name for name, _ in first.placement.operations],
        num_inputs=len(call.leaves),
        loss_output=first.loss_output,
        settings=training.optimizer.parameter_tensors if training else dict,
    )


def _modes(source: SourceModel, executable: Executable) -> tuple[Mode, ...]:
    modes: list[Mode] = []
    if source.options.Emulator.deterministic_reduction:
        modes.append(OneThread)
    if executable.mixed_precision:
        modes.append(MixedPrecision)
    if source.options.Precision.floating_point_exceptions:
        modes.append(FloatingPointTraps)
    return tuple(modes)


def _why_loop(
    source: SourceModel, anchors: Anchors, executable: Executable, state: DeviceState, call: Call
) -> str | None:
    """Return why a model's replicas must run one after the other; None if they may run at once."""
    if source.options.Emulator.deterministic_reduction and source.training:
        return "deterministic reduction is switched on"
    if anchors.needs_each_backward:
        return "Options.anchorTensor() selects gradients, which are read for each replica"
    if anchors.needs_operations:
        return "Options.anchorTensor() selects results of operations"
    if state.has_groups:
        return "parameters have different values in different groups of replicas"
    if any(tensor.dim() == 0 for tensor in call.leaves):
        return "an input of the model has no batch dimension"
    first = executable.first_forward
    if first.placement.reads_buffers and first.modified_buffers:
        return "the forward pass changes buffers of the model, and its Python code reads buffers"
    if state.gradient_hooks is not None and state.gradient_hooks.reach:
        return "parameters of the model have gradient hooks"
    if source.training and any(map(_has_backward_hooks, source.model.modules())):
        return "modules of the model have backward hooks"
    if first.needs_python:
        return (
            "the forward pass prints, registers gradient hooks or runs Python code on the host for "
            "each replica"
        )
    return None


def _watched(source: SourceModel, anchors: Anchors) -> Forward:
    """Return a function that runs the forward pass and passes operation results to ``anchors``.

    Each operation of the model gets the same name as in the first forward pass, which was traced.
    """

    def forward(call: Call, leaves: Sequence[torch.Tensor]) -> Any:
        blocks = BlockRecorder(
            source.options._execution_strategy,
            source.model,
            leaves,
            tell_result=anchors.see,
            module_scopes=source.options._module_namescope_enabled,
        )
        with ForwardWatch(blocks=blocks).following():
            return source.forward(call, leaves)

    return forward


def _first_inputs(
    source: SourceModel, call: Call, executable: Executable
) -> Sequence[torch.Tensor]:
    """Return the first micro-batch of each model input, as one tensor for all replica groups."""
    leaves = source.transfer.inputs(call.leaves, widen_integers=executable.widen_integers)
    return source.batching.combined_micro_batches(leaves)[0]


def _seed(source: SourceModel) -> int:
    """Return the random seed of the device, which is equal on all instances."""
    if source.options.exists("random_seed"):
        return int(source.options.random_seed)
    mine = int(torch.randint(2**31, (), generator=_fresh_generator()))
    return int(source.communicator.broadcast_object(mine))


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _fresh_generator() -> torch.Generator:
    """Return a random generator that the operating system seeds, apart from torch's generator."""
    generator = torch.Generator()
    generator.seed()
    return generator
