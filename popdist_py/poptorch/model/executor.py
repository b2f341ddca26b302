"""The model wrappers: a user's module that trains or infers on emulated IPUs: its life cycle."""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from popdist_py import context, heartbeat
from popdist_py.collectives import Communicator
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.poptorch import enums, optim
from popdist_py.poptorch.calls.nested_values import Call, check_call, check_same
from popdist_py.poptorch.calls.transfer import Transfer, forbid_backward
from popdist_py.poptorch.compilation.compiler import Compiled, Compiler, Executable
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.model import compile_hooks, devices, saved_model
from popdist_py.poptorch.model.inspection import Observable
from popdist_py.poptorch.model.progress import progress_bar
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.update.optimizer_rules import (
    Layout,
    OptimizerRules,
    check_optimizer,
    mean_strategy,
)
from popdist_py.poptorch.weights import watched_module
from popdist_py.poptorch.weights.freshness import Party, fetch_stale
from popdist_py.poptorch.weights.replica_grouping import join_groups, make_groupable, split_groups

__all__ = ["PoplarExecutor"]

# The device's autograd is its own: torch.no_grad() and inference_mode() of the program are not in
# force there.
_as_on_device: Final = torch.inference_mode(False)


class PoplarExecutor(Observable):
    """A model on its emulated device; made by trainingModel() and inferenceModel().

    Calling it runs the model: the first dimension of every input is micro-batch x device iterations
    x (replicas / input group size) x gradient accumulation; results have the structure of the
    forward's, with the micro-batches that the output mode chooses along the first dimension.
    Attributes that it lacks are those of the user's module.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        options._freeze()
        self._user_model = model
        self._model = _shallow_copy(model)
        self._options = options.clone()
        self._options._freeze()
        self._training = training
        # Any: one of torch's, and perhaps one of ours, which mypy takes for a contradiction.
        self._optimizer: Any = optimizer
        self._rules = self._new_rules()
        self._layout: Layout | None = None
        self._transfer = Transfer(double_precision=options.Emulator.double_precision)
        self._compiled: Compiled | None = None
        self._compilation_seconds: float | None = None
        self._attached = False
        self._optimizer_ran = False
        self._unwatch: Callable[[], None] | None = None
        self._party: Party | None = None
        self._after_compiling: Callable[[], None] | None = None
        # Arguments to build the program with again, for another optimiser.
        self._last_call = Call((), (), [])
        self._template = self._last_call
        self._names: list[str] = []
        if training:
            assert optimizer is not None
            self._accept_optimizer(optimizer)
            self._wrap_user_model()

    # -- the user's module --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The wrapper's own, frozen options."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        if "_user_model" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.__dict__["_user_model"], name)
        if isinstance(value, nn.Module | nn.Parameter):
            make_groupable(value)
        return value

    def __repr__(self) -> str:
        from popdist_py.poptorch.model.module_text import module_repr

        return module_repr(self._user_model)

    def _wrap_user_model(self) -> None:
        if watched_module.is_wrapped(self._user_model):
            raise RuntimeError(
                f"{type(self._user_model).__name__} has already been wrapped in a "
                "poptorch.trainingModel: call destroy() on that wrapper first"
            )
        self._unwatch = watched_module.watch(
            self._user_model, self.copyWeightsToHostIfNeeded, self.destroy
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the user's module's state, with the weights of the device."""
        self.copyWeightsToHostIfNeeded()
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the user's module's state, and upload it if the model is attached.

        Returns:
            The missing and the unexpected keys.
        """
        self.copyWeightsToHostIfNeeded()
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

    # -- compiling ----------------------------------------------------------------------------

    def isCompiled(self) -> bool:
        """Tell whether the model was compiled and not destroyed since."""
        return self._compiled is not None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments like these; a second call is ignored with a warning."""
        if self._compiled is not None:
            logger.warning("Call to compile() ignored: the model is already compiled")
            return
        self._compile(args, kwargs, None)

    @_as_on_device
    def _compile(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], known: Executable | None
    ) -> None:
        self._names = check_call(self._model.forward, args, kwargs)
        self._last_call = Call.of(args, kwargs)
        if self._last_call.has_dictionary:
            self._transfer.warn_once("Dicts as inputs are flattened in the order of their keys")
        start = time.perf_counter()
        compile_hooks.before_compile()
        if self._unwatch is None and self._training:
            self._wrap_user_model()
        if self._options.connection_type == enums.ConnectionType.Always:
            self._acquire()
        self._update_from_host_parties()
        with progress_bar(shown=self._shows_progress) as advance:
            compiler = self._compiler()
            cache = saved_model.Cache.of(compiler, self._last_call)
            with cache.locked():
                compiled = compiler.compile(self._last_call, known or cache.load(), advance)
                cache.store(compiled.executable)
        self._compiled = compiled
        self._template = self._last_call.without_data()
        self._party = Party(
            [*self._user_model.parameters(), *self._user_model.buffers()], compiled.state.download
        )
        if compiler.communicator.num_instances > 1:
            self._party.mark_stale()
        if self._training:
            self._layout = Layout.of(self._optimizer)
        self._connect_optimizer()
        compile_hooks.after_compile()
        self._compilation_seconds = time.perf_counter() - start
        if self._options.connection_type != enums.ConnectionType.Never:
            self._acquire()
        action, self._after_compiling = self._after_compiling, None
        if action is not None:
            action()

    def _when_compiled(self, action: Callable[[], None]) -> None:
        """Do ``action`` once the model is compiled: now, or right after it will be."""
        if self._compiled is not None:
            action()
        else:
            self._after_compiling = action

    @property
    def _shows_progress(self) -> bool:
        first = self._options.Distributed.processId == 0
        return bool(self._options._show_compilation_progress_bar) and first

    def _compiler(self) -> Compiler:
        return Compiler(
            model=self._model,
            user_model=self._user_model,
            options=self._options,
            optimizer=self._optimizer,
            transfer=self._transfer,
            communicator=_join(self._options) if self._training else _Alone(self._options),
        )

    def _update_from_host_parties(self) -> None:
        """Have the host's weights up to date before they are uploaded."""
        fetch_stale(Party([*self._user_model.parameters(), *self._user_model.buffers()], _nothing))

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            Error: not compiled, or the progress bar is switched off.
        """
        if not self._options._show_compilation_progress_bar:
            raise Error("compilationTime() needs Options.showCompilationProgressBar(True)")
        self._require_compiled()
        return datetime.timedelta(seconds=self._compilation_seconds or 0.0)

    # -- running ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one call's samples; compile it first if need be.

        Raises:
            Error: the arguments differ from those the model was compiled for.
            AssertionError: there is no device, or a batch dimension does not fit.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*args, **kwargs)
        if self._compiled is None:
            self._compile(args, kwargs, None)
            given = self._last_call
        else:
            given = Call.of(args, kwargs)
            if not self._template.fits(given):
                check_call(self._model.forward, args, kwargs)
                given = self._template.like(args, kwargs)
                check_same(self._template, given, self._names)
            self._last_call = given
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device: ConnectionType.Never has none"
        )
        if not self._attached:
            self.attachToDevice()
        return self._run(given)

    def _run(self, given: Call) -> Any:
        compiled, party = self._require_compiled(), self._party
        assert party is not None
        if not self._training:
            fetch_stale(party)
            if party.needs_upload:
                self.copyWeightsToDevice()
        self._load_optimizer_state()
        widen = compiled.executable.widen_integers
        leaves = [self._transfer.to_device(t, widen_integers=widen) for t in given.leaves]
        found = compiled.executable.trace
        results = compiled.program.run(given, leaves)
        if found.changed_inputs:
            self._transfer.write_back(found.changed_inputs, given.leaves, leaves)
        results = self._transfer.to_host(results)
        heartbeat.step()
        if self._training:
            party.mark_stale()
            self._optimizer_ran = True
            results = [forbid_backward(result) for result in results]
        self._log_cycles()
        return found.outputs.rebuild(iter(results))

    # -- weights ------------------------------------------------------------------------------

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights and buffers into the user's module."""
        self._require_compiled()
        assert self._party is not None
        self._party.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Do copyWeightsToHost() if training changed the weights since; return whether it did."""
        return self._party is not None and self._party.fetch()

    def copyWeightsToDevice(self) -> None:
        """Copy the user's weights and buffers to the device."""
        compiled = self._require_compiled()
        assert self._party is not None
        compiled.state.upload()
        self._party.mark_fresh()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers of Options.updatableNamedBuffers() to the device.

        Raises:
            Error: no buffers were named.
        """
        compiled = self._require_compiled()
        names = self._options.updatable_buffers
        if not names:
            raise Error("copyNamedBuffersToDevice() needs Options.updatableNamedBuffers([names])")
        compiled.state.upload(only=frozenset(names))

    # -- optimiser ----------------------------------------------------------------------------

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the settings of ``optimizer`` from the next call on.

        The state on the device stays for one of the same kind that brings no state itself.

        Raises:
            AssertionError: an optimiser that the device does not know.
            ValueError: amsgrad, or a mean strategy other than the compiled one.
            Error: an attribute that was constant at compile time has changed, or this is an
                inference model.
        """
        if not self._training:
            raise Error(
                "setOptimizer() is for training models: an inference model updates nothing. Give "
                "the optimizer to poptorch.trainingModel()"
            )
        changed_object = optimizer is not self._optimizer
        if changed_object:
            self._fetch_optimizer_state()
            self._rules = self._new_rules()
        self._accept_optimizer(optimizer)
        if self._compiled is None or self._compiled.program.training is None:
            return
        if Layout.of(optimizer) == self._layout:
            self._compiled.program.training.optimizer.sync(optimizer)
        else:
            self._rebuild(self._compiled)
        if changed_object:
            self._connect_optimizer()

    @_as_on_device
    def _rebuild(self, before: Compiled) -> None:
        """Make the program again for another optimiser, which may train other parameters."""
        compiled = self._compiler().build(before.executable, before.state, self._last_call)
        compiled.streams.seed_value = before.streams.seed_value
        compiled.program.steps_done = before.program.steps_done
        self._compiled = compiled
        old, self._layout = self._layout, Layout.of(self._optimizer)
        if old is not None and old.type is self._layout.type:
            assert before.program.training is not None
            assert compiled.program.training is not None
            state = before.program.training.optimizer.state_tensors()
            compiled.program.training.optimizer.load_state_tensors(state)

    def _new_rules(self) -> OptimizerRules:
        return OptimizerRules(
            relaxed=self._options._relax_optimizer_checks,
            automatic_loss_scaling=self._options.Training.automatic_loss_scaling,
        )

    def _accept_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        compiled = self._compiled is not None
        self._rules.accept(optimizer, compiled=compiled)
        training = self._options.Training
        strategy = mean_strategy(optimizer)
        name = "meanAccumulationAndReplicationReductionStrategy"
        if strategy == enums.MeanReductionStrategy.Running and strategy != training(name):
            if compiled:
                raise ValueError(
                    "The model is already compiled with another mean reduction strategy than "
                    f"this optimizer's accumulation type needs ({strategy.name})"
                )
            self._options._unfreeze()
            training.set(**{name: strategy})
            self._options._freeze()
        self._optimizer = optimizer

    def _connect_optimizer(self) -> None:
        """Let a PopTorch optimiser read and write its state on the device."""
        if self._training:
            # The device does what step() would: learning-rate schedulers ask whether it was called.
            self._optimizer._opt_called = True
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer._connect(self._fetch_optimizer_state)
            if self._options.connection_type != enums.ConnectionType.Never:
                self._load_optimizer_state()
                self._optimizer_ran = True

    def _load_optimizer_state(self) -> None:
        """Give the device the optimiser state that the program loaded since the last call."""
        if not isinstance(self._optimizer, optim.Optimizer):
            return
        pending = self._optimizer._take_pending()
        if pending is not None and self._compiled is not None:
            training = self._compiled.program.training
            assert training is not None
            parameters = self._compiled.state.parameters
            training.optimizer.load_state_tensors(split_groups(pending, parameters))
            self._optimizer_ran = True

    def _fetch_optimizer_state(self) -> None:
        """Give the optimiser its state on the device, if it ran since the last time."""
        if not isinstance(self._optimizer, optim.Optimizer) or self._compiled is None:
            return
        training = self._compiled.program.training
        if self._optimizer_ran and training is not None:
            self._optimizer_ran = False
            self._optimizer._set_device_state(
                join_groups(training.optimizer.state_tensors()),
                join_groups(training.optimizer.parameter_tensors()),
            )

    # -- device -------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Tell whether the model holds its device."""
        return self._attached

    def _acquire(self) -> None:
        # Instances of a job share ids with nobody; a program that was told an id has to wait.
        if self._options.exists("ipu_id") and not self._options.shares_devices:
            devices.acquire(self._options.ipu_id, self)
        self._attached = True

    def attachToDevice(self) -> None:
        """Take the device again and upload weights and optimiser state.

        Raises:
            Error: not compiled, attached already, or another model has the device.
            AssertionError: the connection type is Never.
        """
        compiled = self._require_compiled()
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to attach to an offline device: ConnectionType.Never has none"
        )
        if self._attached:
            raise Error("The model is already attached to its device")
        self._acquire()
        assert self._party is not None
        fetch_stale(self._party)
        compiled.state.upload()
        self._party.mark_fresh()

    def detachFromDevice(self) -> None:
        """Fetch weights, optimiser and random state, and give the device back.

        Raises:
            Error: not compiled, or detached already.
        """
        self._require_compiled()
        if not self._attached:
            raise Error("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        self._fetch_optimizer_state()
        devices.release(self)
        self._attached = False

    def destroy(self) -> None:
        """Fetch weights and optimiser state, give the device back, unwrap the user's module."""
        if self._compiled is not None:
            self.copyWeightsToHostIfNeeded()
            self._fetch_optimizer_state()
            self._compiled = None
            self._party = None
        devices.release(self)
        self._attached = False
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._model = _shallow_copy(self._user_model)

    @property
    def rng_state(self) -> list[int]:
        """The state of the device's random numbers: the seed, and the micro-batches run.

        Raises:
            Error: the model is not compiled.
        """
        compiled = self._require_compiled()
        return [compiled.streams.seed_value, compiled.program.steps_done]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        compiled = self._require_compiled()
        compiled.streams.seed_value, compiled.program.steps_done = state

    # -- saving -------------------------------------------------------------------------------

    def save(
        self, filename: str | Path, export_model: bool = True, save_rng_state: bool = True
    ) -> None:
        """Write the compiled model to a file that poptorch.load() or loadExecutable() reads.

        Args:
            filename: the file; in a folder, ``model.poptorch``. Missing folders are made.
            export_model: include the module, the weights and the optimiser.
            save_rng_state: include the state of random numbers.

        Raises:
            Error: the model is not compiled.
            AssertionError: the parent is a file.
        """
        self._require_compiled()
        saved_model.save(self, Path(filename), export_model=export_model, rng_state=save_rng_state)

    def compileAndExport(
        self, filename: str | Path, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for the arguments, and save()."""
        self._compile(args, kwargs, None)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | Path) -> None:
        """Take a compiled model from a file instead of compiling; weights are this wrapper's own.

        Raises:
            Error: the file is none that save() wrote.
        """
        saved = saved_model.read(Path(filename))
        args, kwargs = saved.call.example()
        self._compile(args, kwargs, saved.executable)
        if saved.rng_state is not None:
            self.rng_state = saved.rng_state


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes; a parametrised one refuses copy.copy()."""
    if not is_parametrized(module):
        return copy.copy(module)
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    return twin


def _nothing() -> None:
    """Copy nothing."""


class _Alone(SoloCommunicator):
    """An instance that talks to nobody but keeps its index, so that its replicas keep theirs."""

    def __init__(self, options: Options) -> None:
        self.instance_index = options.Distributed.processId


def _join(options: Options) -> Communicator:
    """Return the connection to the other instances, joining them if the program did not."""
    _check_replicas(options)
    if options.Distributed.numProcesses == 1:
        return SoloCommunicator()
    if not context.is_launched():
        logger.warning(
            "Options.Distributed has %d processes, but nothing connects them: this one trains on "
            "its own. Start them with poprun-py, so that gradients are reduced over all",
            options.Distributed.numProcesses,
        )
    if not context.is_initialised():
        context.init()
    return context.communicator()


def _check_replicas(options: Options) -> None:
    """Warn if a training model does not run as many replicas as the launcher was asked for."""
    instance, replicas = context.environment(), options.replication_factor
    takes_part = options.Distributed.numProcesses == instance.num_instances
    if context.is_launched() and takes_part and replicas != instance.num_local_replicas:
        logger.warning(
            "The launcher gave this instance %d local replicas, but Options.replicationFactor is "
            "%d, which counts: poptorch.DistributedOptions() takes the launcher's number, as "
            "popdist.poptorch.Options(ipus_per_replica=...) does",
            instance.num_local_replicas,
            replicas,
        )
