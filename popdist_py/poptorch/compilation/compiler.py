"""The class Compiler, which makes a program from a module, options and example arguments.

The module ``model_checks`` checks a model against its options. The module
``execution/device_loop`` runs the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from popdist_py.collectives import Communicator
from popdist_py.collectives.freed_memory import freed_memory_given_back
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.calls.batching import Batching
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.calls.transfer import Transfer
from popdist_py.poptorch.compilation.backend_choice import BackendChoice
from popdist_py.poptorch.compilation.model_checks import (
    check_changed_buffers,
    check_norm_groups,
    check_placement,
)
from popdist_py.poptorch.compilation.training_setup import TrainingSetup
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.anchors import Anchors
from popdist_py.poptorch.execution.device_context import DeviceContext, Mode
from popdist_py.poptorch.execution.device_loop import Program
from popdist_py.poptorch.execution.floating_point_traps import FloatingPointTraps
from popdist_py.poptorch.execution.modes import MixedPrecision, OneThread
from popdist_py.poptorch.execution.random_streams import RandomStreams
from popdist_py.poptorch.execution.replicas import DeviceModel, Forward
from popdist_py.poptorch.execution.timings import Counters
from popdist_py.poptorch.group_norms.batch_norm import GroupNorms, OneValueAllowed
from popdist_py.poptorch.group_norms.exchange import GroupExchange
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.call_times import modelled_times
from popdist_py.poptorch.on_ipu.capture import captured_or_none, watched_model
from popdist_py.poptorch.on_ipu.captured import Captured
from popdist_py.poptorch.on_ipu.device_document import keep_device_document
from popdist_py.poptorch.on_ipu.ipu_rows import IpuRows
from popdist_py.poptorch.on_ipu.memory_check import check_memory
from popdist_py.poptorch.on_ipu.run_of import run_of
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.profile_folder import profile_folder
from popdist_py.poptorch.options.without_effect import say_idle_options
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.first_forward import FirstForward, first_forward
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.update.flat_buffers import FlatBuffers
from popdist_py.poptorch.update.training import Training
from popdist_py.poptorch.weights.device_state import DeviceState
from popdist_py.poptorch.weights.norm_statistics import norm_statistics
from popdist_py.poptorch.weights.watched_module import plain_class
from popdist_py.timeline import spans

__all__ = ["Compiled", "Compiler", "Executable"]

# The progress bar shows the first percentage when the choice of the back end starts. Each step of
# the choice adds _PERCENTS, up to the last percentage.
_FIRST_PERCENT, _PERCENTS, _LAST_PERCENT = 30, 20, 95


@dataclass(frozen=True, kw_only=True, slots=True)
class Executable:
    """The result of a compilation, which can be stored because it does not refer to tensors.

    Attributes:
        first_forward: The facts that the first forward pass showed.
        replica_execution: The value of the option ``replicaExecution``, which is "auto" or selects
            a back end.
        widen_integers: Whether integers of fewer than 64 bits are converted to 64 bits, because
            torch requires indices of 64 bits.
        mixed_precision: Whether the forward pass multiplies float16 tensors with float16 or float32
            tensors.
        back_end: The name of the chosen back end; None before the choice.
        captured: The forward pass as a graph for the device model; None if no graph was requested
            or the forward pass cannot be captured.
    """

    first_forward: FirstForward
    replica_execution: str
    widen_integers: bool
    mixed_precision: bool
    back_end: str | None = None
    captured: Captured | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compiled model on the device.

    The attribute ``ipu_rows`` writes the model's calls to the timeline, if the options name a
    device.
    """

    executable: Executable
    state: DeviceState
    program: Program
    streams: RandomStreams
    ipu_rows: IpuRows | None = None

    def download_changed(self) -> Callable[[], None]:
        """Return a function that copies to the host the tensors that a call changes.

        The tensors are parameters and buffers.
        """
        first, state, training = self.executable.first_forward, self.state, self.program.training
        changed: list[torch.Tensor] = [state.buffers[name] for name in first.modified_buffers]
        changed += [state.parameters[name] for name in first.modified_parameters]
        if training is not None:
            changed += training.optimizer.parameters
        return partial(state.download, frozenset(map(id, changed)))

    def check_weights(self) -> None:
        """Check that all weights belong to the same training step.

        Raises:
            Error: An instance was lost during an update.
        """
        if self.program.training is not None:
            self.program.training.optimizer.check_whole()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """Compiles one model.

    Attributes:
        model: The module that runs the forward pass. It is a shallow copy of ``user_model``.
        user_model: The user's module.
        options: The options of the PopTorch model.
        optimizer: The user's optimiser; None for inference.
        transfer: The conversion of tensors between the host and the device.
        communicator: The communicator for calls between the instances. For inference, it contains
            only this instance.
        placed: A function that is called with the number of IPUs of all replicas, once the compiler
            has computed this number.
    """

    model: nn.Module
    user_model: nn.Module
    options: Options
    optimizer: torch.optim.Optimizer | None
    transfer: Transfer
    communicator: Communicator
    placed: Callable[[int], None]

    @property
    def training(self) -> bool:
        """Whether the model trains."""
        return self.optimizer is not None

    @property
    def batching(self) -> Batching:
        """The division of a call's samples into micro-batches."""
        return self.options.batching(training=self.training)

    def compile(
        self, call: Call, earlier: Executable | None, advance: Callable[[int, str], None]
    ) -> Compiled:
        """Compile the model for arguments with the structure and shapes of ``call``.

        Args:
            call: Example arguments of a whole call.
            earlier: The result of an earlier compilation, which is used instead of a new trace of
                the forward pass; None without an earlier compilation.
            advance: A function that is called with the percentage done and the name of the next
                step.

        Raises:
            Error, AssertionError: The model, its options and its arguments do not match.
        """
        with freed_memory_given_back() if self.training else nullcontext():
            return self._compile(call, earlier, advance)

    def _compile(
        self, call: Call, earlier: Executable | None, advance: Callable[[int, str], None]
    ) -> Compiled:
        self.options._Popart.check()
        say_idle_options(self.options)
        _record_profile(self.options)
        batching = self.batching
        batching.check()
        if self.training:
            check_norm_groups(self.options, batching, self.communicator)
        for tensor in call.leaves:
            self.transfer.check(tensor)
        sizes = [batching.micro_batch(tensor.shape) for tensor in call.leaves]
        advance(5, "copying weights")
        state = self._make_state()
        advance(15, "tracing")
        executable = earlier or self._trace(call, sizes, state)
        placement = executable.first_forward.placement
        self.placed(check_placement(placement, self.options, batching, training=self.training))
        run = self._run(executable.captured)
        check_memory(run, self.options, state, placement.num_ipus)
        self._give_buffers(executable.first_forward, state, batching)
        steps = count()

        def tell(what: str) -> None:
            advance(min(_FIRST_PERCENT + _PERCENTS * next(steps), _LAST_PERCENT), what)

        compiled = self.build(executable, state, call, tell=tell)
        keep_device_document(run, self.options, plain_class(self.user_model).__name__)
        advance(100, "")
        return compiled

    # -- tracing ------------------------------------------------------------------------------

    def _make_state(self) -> DeviceState:
        replicas = self.options.replication_factor * self.communicator.num_instances
        state = DeviceState(self.model, self.user_model, self.transfer.dtype, replicas)
        _share(state, self.communicator)
        for name in self.options.updatable_buffers:
            if name not in state.buffers:
                raise Error(
                    f"Options.updatableNamedBuffers: the model has no buffer {name!r}, only "
                    f"{', '.join(state.buffers) or 'none'}"
                )
        return state

    def _trace(self, call: Call, sizes: Sequence[int], state: DeviceState) -> Executable:
        """Trace the forward pass; if torch raises an error, trace it again with 64-bit integers."""
        try:
            return self._trace_with(call, sizes, state, widen_integers=False)
        except (RuntimeError, IndexError) as error:
            logger.debug("Tracing again with 64-bit integers: %s", error)
            with suppress(RuntimeError, IndexError):
                return self._trace_with(call, sizes, state, widen_integers=True)
            raise

    def _trace_with(
        self, call: Call, sizes: Sequence[int], state: DeviceState, *, widen_integers: bool
    ) -> Executable:
        inputs = [
            self.transfer.to_device(
                tensor if tensor.dim() == 0 else tensor[:size], widen_integers=widen_integers
            )
            for tensor, size in zip(call.leaves, sizes, strict=True)
        ]
        if state.has_own_tensors:
            state.select(0, self._first_replica)
        watched = watched_model(self.model, call, self.options, training=self.training)
        # The function first_forward() restores the host's random state.
        context = DeviceContext(state=state, training=self.training, is_random=False)
        has_groups = self.training and self.options.Training.norm_group_size > 1
        with OneValueAllowed() if has_groups else nullcontext(), MixedPrecision() as precision:
            found, observer = first_forward(
                watched,
                inputs,
                state,
                partial(context.enter, tracing=True),
                observes=self.options.Emulator.asks_model,
            )
        return Executable(
            first_forward=found,
            replica_execution=self.options.Emulator.replica_execution,
            widen_integers=widen_integers,
            mixed_precision=precision.met_half,
            captured=None if observer is None else captured_or_none(observer),
        )

    # -- the device ---------------------------------------------------------------------------

    def _run(self, captured: Captured | None) -> Run | None:
        """Return the input of the device model, or None if the device model is not used."""
        if captured is None:
            return None
        try:
            return run_of(captured, self.options, self.optimizer, training=self.training)
        except ValueError as error:  # The emulation can run without the device model.
            logger.debug("The model of the device cannot be asked: %s", error)
            return None

    def _give_buffers(self, first: FirstForward, state: DeviceState, batching: Batching) -> None:
        """Give replicas their own copies of the buffers that the forward pass changes.

        Each replica always has its own statistics of norm layers, because each replica normalises
        its own micro-batches. For other buffers, the options must allow separate copies.
        """
        if first.modified_buffers and batching.replicas > 1:
            others = first.modified_buffers - norm_statistics(self.model)
            check_changed_buffers(others, self.options, batching)
            state.give_replicas_buffers(first.modified_buffers, batching.replicas)

    # -- building -----------------------------------------------------------------------------

    @property
    def _first_replica(self) -> int:
        return self.communicator.instance_index * int(self.options.replication_factor)

    def build(
        self,
        executable: Executable,
        state: DeviceState,
        call: Call,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Compiled:
        """Return a compiled model that uses existing device tensors.

        Args:
            executable: The result of the compilation.
            state: The device's tensors.
            call: Example arguments of a whole call.
            tell: A function that is called with a few words about the current step.
        """
        batching = self.batching
        run = self._run(executable.captured)
        setup = self._training_setup
        streams = RandomStreams(self._seed())
        first = executable.first_forward
        training = setup.make(first, state, streams.seed_update) if setup else None
        anchors = Anchors(
            self.options.anchored_tensors,
            batching,
            {**state.parameters, **state.buffers},
            updated=[
                name
                for name in sorted(first.used_parameters)
                if training and state.parameters[name].requires_grad
            ],
            operations=[name for name, _ in first.placement.operations],
            num_inputs=len(call.leaves),
            loss_output=first.loss_output,
            settings=training.optimizer.parameter_tensors if training else dict,
        )
        model = self._device_model(executable, state, call, training, anchors, streams)
        chosen = BackendChoice(
            model, call, self._first_inputs(call, executable), self.communicator, tell
        ).choose(executable.replica_execution, executable.back_end)
        program = Program(
            batching=batching,
            replicas=chosen.replicas,
            back_end=chosen.name,
            training=training,
            context=model.context,
            num_outputs=len(first.shared),
            returns_results=not self.options.synthetic_data,
            loss_output=first.loss_output if self.training else None,
            anchors=anchors,
            counters=Counters(
                batching,
                len(call.leaves),
                len(first.shared),
                synthetic=self.options.synthetic_data,
                modelled=modelled_times(run, self.options),
            ),
        )
        executable = replace(executable, back_end=chosen.name)
        return Compiled(
            executable=executable,
            state=state,
            program=program,
            streams=streams,
            ipu_rows=IpuRows.of(run, self.options),
        )

    def _device_model(
        self,
        executable: Executable,
        state: DeviceState,
        call: Call,
        training: Training | None,
        anchors: Anchors,
        streams: RandomStreams,
    ) -> DeviceModel:
        """Return the object that describes the model to the replica back ends."""
        if training is not None:
            state.hook_gradients(self.user_model.parameters())
        groups = self._norm_groups()
        norms = [] if groups is None else [partial(GroupNorms, groups)]
        context = DeviceContext(
            state=state,
            training=self.training,
            is_random=executable.first_forward.is_random or bool(training and training.rounding),
            modes=(*norms, *self._modes(executable)),
        )
        return DeviceModel(
            forward=self._watched(anchors) if anchors.needs_operations else self._forward,
            context=context,
            first_forward=executable.first_forward,
            batching=self.batching,
            streams=streams,
            first_replica=self._first_replica,
            gradients=training.gradients if training else None,
            trained=training.optimizer.parameters if training else (),
            only_loop=self._why_loop(anchors, executable, state, call),
            norm_groups=groups,
            # A change that the forward pass makes to an input must also change the caller's tensor.
            # So an input that the forward pass changes must not be copied.
            aligned_inputs=bool(
                self.options.Emulator.deterministic_reduction
                and not executable.first_forward.changed_inputs
            ),
        )

    def _norm_groups(self) -> GroupExchange | None:
        """Return the exchange of batch norm statistics; None if each replica is its own group."""
        size = self.options.Training.norm_group_size
        if not self.training or size == 1:
            return None
        return GroupExchange(size, self.batching.replicas, self.communicator)

    @property
    def _training_setup(self) -> TrainingSetup | None:
        if self.optimizer is None:
            return None
        return TrainingSetup(
            options=self.options, optimizer=self.optimizer, communicator=self.communicator
        )

    def _forward(self, call: Call, leaves: Sequence[torch.Tensor]) -> Any:
        """Run the model on the arguments of a call, with its tensors replaced by ``leaves``."""
        args, kwargs = call.arguments(leaves)
        return self.model(*args, **kwargs)

    def _modes(self, executable: Executable) -> tuple[Mode, ...]:
        modes: list[Mode] = []
        if self.options.Emulator.deterministic_reduction:
            modes.append(OneThread)
        if executable.mixed_precision:
            modes.append(MixedPrecision)
        if self.options.Precision.floating_point_exceptions:
            modes.append(FloatingPointTraps)
        return tuple(modes)

    def _why_loop(
        self, anchors: Anchors, executable: Executable, state: DeviceState, call: Call
    ) -> str | None:
        """Return the reason why replicas must run one after the other; None without a reason."""
        if self.options.Emulator.deterministic_reduction and self.training:
            return "the reduction is deterministic"
        if anchors.needs_each_backward:
            return "gradients of single replicas are anchored"
        if anchors.needs_operations:
            return "results of operations are anchored"
        if state.has_groups:
            return "parameters are grouped over replicas"
        if any(tensor.dim() == 0 for tensor in call.leaves):
            return "an input has no batch dimension"
        first = executable.first_forward
        if first.placement.reads_buffers and first.modified_buffers:
            return "Python code of the forward reads buffers, and the forward changes buffers"
        if state.gradient_hooks is not None and state.gradient_hooks.reach:
            return "parameters have hooks on their gradients"
        if self.training and any(map(_has_backward_hooks, self.model.modules())):
            return "modules have hooks on their backward"
        if first.needs_python:
            return "the forward prints, hooks gradients or runs Python on the host, in each replica"
        return None

    def _watched(self, anchors: Anchors) -> Forward:
        """Return a function that runs the forward pass and passes operation results to ``anchors``.

        The operations get the same names as in the first forward pass.
        """

        def forward(call: Call, leaves: Sequence[torch.Tensor]) -> Any:
            blocks = BlockRecorder(
                self.options._execution_strategy,
                self.model,
                leaves,
                tell_result=anchors.see,
                module_scopes=self.options._module_namescope_enabled,
            )
            with ForwardWatch(blocks=blocks).following():
                return self._forward(call, leaves)

        return forward

    def _first_inputs(self, call: Call, executable: Executable) -> Sequence[torch.Tensor]:
        """Return the first combined micro-batch of each input."""
        leaves = self.transfer.inputs(call.leaves, widen_integers=executable.widen_integers)
        return self.batching.combined_micro_batches(leaves)[0]

    def _seed(self) -> int:
        """Return the seed of the device, which is equal on all instances."""
        if self.options.exists("random_seed"):
            return int(self.options.random_seed)
        mine = int(torch.randint(2**31, (), generator=_fresh_generator()))
        return int(self.communicator.broadcast_object(mine))


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _fresh_generator() -> torch.Generator:
    """Return a generator that is seeded by the system and does not affect torch's generator."""
    generator = torch.Generator()
    generator.seed()
    return generator


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
    """Record the timeline of this process if the options ask for a profile.

    Raises:
        Error: The folder for the profile cannot be made.
    """
    folder = profile_folder(options)
    if folder is None:
        return
    try:
        path = spans.record(folder)
    except OSError as error:
        raise Error(f"the folder {folder} for the profile: {error.strerror}") from None
    if path is not None:
        logger.info("The profile is a timeline, written when the program ends: %s", path)
