"""PoplarExecutor: a user's module that trains or infers on emulated IPUs, and its life cycle.

Here a wrapper is compiled, called, attached, saved and destroyed. What its parts do is in the
modules that it is made of: it computes and writes nothing itself.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from popdist_py import activities, context, heartbeat
from popdist_py.environment import BETWEEN_CALLS, COMPILING, INFERENCE, TRAINING
from popdist_py.poptorch import enums
from popdist_py.poptorch.calls.call_signature import CallSignature
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.calls.synthetic_data import SyntheticTransfer
from popdist_py.poptorch.calls.transfer import Transfer, forbid_backward
from popdist_py.poptorch.compilation.compiler import Compiled, Compiler, Executable
from popdist_py.poptorch.compilation.executable_cache import ExecutableCache
from popdist_py.poptorch.data import drawn_orders
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.model import compile_hooks, devices, inspection, training_state
from popdist_py.poptorch.model.device_reports import DeviceReports
from popdist_py.poptorch.model.module_text import module_repr
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.model.other_instances import communicator_for
from popdist_py.poptorch.model.progress import progress_bar
from popdist_py.poptorch.model.saved_model import SavedModel
from popdist_py.poptorch.model.user_frames import frames_folded
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.weights import watched_module
from popdist_py.poptorch.weights.freshness import WeightCopy, pull_newer
from popdist_py.poptorch.weights.replica_grouping import make_groupable

__all__ = ["PoplarExecutor"]

_NO_CALL: Final = Call((), (), [])
# The device's autograd is its own: torch.no_grad() and inference_mode() of the program are not in
# force there.
_as_on_device: Final = torch.inference_mode(False)


class PoplarExecutor(DeviceReports):
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
        scheduler: LRScheduler | None = None,
    ) -> None:
        options._freeze()
        heartbeat.expect()
        self._user_model = model
        self._model = watched_module.shallow_copy(model)
        self._options = _own_options(options, training=training)
        self._training = training
        self._activity = activities.COMPUTING if training else activities.VALIDATING
        self._transfer = _transfer(options)
        self._attached = False
        self._num_ipus = 1
        self._unwatch: Callable[[], None] | None = None
        # The arguments with which the program is rebuilt for another optimiser.
        # _NO_CALL while there is no program.
        self._last_call = _NO_CALL
        # What compiling makes:
        self._compiled: Compiled | None = None
        self._signature: CallSignature | None = None
        self._weights: WeightCopy | None = None
        self._compilation_seconds = 0.0
        self._when_compiled: Callable[[], None] | None = None
        self._link: OptimizerLink | None = None
        if training:
            assert optimizer is not None
            self._link = OptimizerLink(self._options, optimizer, scheduler)
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

    # PopTorch's names of what it keeps; programs read them.

    @property
    def _executable(self) -> Executable | None:
        """What compiling made; None before, and after destroy()."""
        return None if self._compiled is None else self._compiled.executable

    @property
    def _is_attached(self) -> bool:
        """Whether the model holds its device."""
        return self._attached

    def __getattr__(self, name: str) -> Any:
        if "_user_model" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.__dict__["_user_model"], name)
        if isinstance(value, nn.Module | nn.Parameter):
            make_groupable(value)
        return value

    def __repr__(self) -> str:
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
        with frames_folded:
            self._compile(args, kwargs, None)

    @_as_on_device
    def _compile(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], executable: Executable | None
    ) -> None:
        """Compile for these arguments; an executable from a file spares the forward's trace."""
        signature, self._last_call = CallSignature.of(
            self._model.forward, args, kwargs, self._options.batching(self._training).num_slices
        )
        if self._last_call.has_dictionary:
            self._transfer.warn_once("Dicts as inputs are flattened in the order of their keys")
        start = time.perf_counter()
        heartbeat.enter(COMPILING)
        compile_hooks.before_compile()
        if self._unwatch is None and self._training:
            self._wrap_user_model()
        tensors = [*self._user_model.parameters(), *self._user_model.buffers()]
        pull_newer(tensors)
        try:
            compiled, num_instances = self._compiled_for(executable)
        except BaseException:
            self._last_call = _NO_CALL
            self._release()
            raise
        self._compiled, self._signature = compiled, signature
        self._weights = WeightCopy(
            tensors,
            compiled.download_changed(),
            compiled.state.download,
            lambda: self._require_compiled().check_weights(),
        )
        if num_instances > 1:
            self._weights.mark_all_newer()
        if self._link is not None:
            self._link.compiled_to(compiled)
        compile_hooks.after_compile()
        self._compilation_seconds = time.perf_counter() - start
        action, self._when_compiled = self._when_compiled, None
        if action is not None:
            action()
        heartbeat.enter(BETWEEN_CALLS)
        # Last: a model that gets no device is compiled all the same, and attaches when called.
        if self._options.connection_type != enums.ConnectionType.Never and not self._attached:
            self._acquire()

    def _compiled_for(self, executable: Executable | None) -> tuple[Compiled, int]:
        """Compile for the last call; return with it the number of instances that take part."""
        compiling = activities.doing(activities.COMPILING)
        with compiling, progress_bar(shown=self._shows_progress) as advance:
            compiler = self._compiler()
            cache = ExecutableCache.of(
                self._user_model, self._options, compiler.optimizer, self._last_call
            )
            with cache.locked():
                compiled = compiler.compile(self._last_call, executable or cache.load(), advance)
                cache.store(compiled.executable)
        if self._training:
            drawn_orders.check(compiler.communicator)
        return compiled, compiler.communicator.num_instances

    @property
    def _shows_progress(self) -> bool:
        first = self._options.Distributed.processId == 0
        return bool(self._options._show_compilation_progress_bar) and first

    def _compiler(self) -> Compiler:
        return Compiler(
            model=self._model,
            user_model=self._user_model,
            options=self._options,
            optimizer=None if self._link is None else self._link.optimizer,
            transfer=self._transfer,
            communicator=communicator_for(self._options, training=self._training),
            placed=self._placed,
        )

    def _require_compiled(self) -> Compiled:
        if self._compiled is None:
            raise Error(
                "The model has not been compiled or has been destroyed: call it or compile() first"
            )
        return self._compiled

    def _require_weights(self) -> WeightCopy:
        self._require_compiled()
        assert self._weights is not None
        return self._weights

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            Error: not compiled, or the progress bar is switched off.
        """
        if not self._options._show_compilation_progress_bar:
            raise Error("compilationTime() needs Options.showCompilationProgressBar(True)")
        self._require_compiled()
        return datetime.timedelta(seconds=self._compilation_seconds)

    # -- running ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one call's samples; compile it first if need be.

        Raises:
            Error: the arguments differ from those the model was compiled for.
            AssertionError: there is no device, or a batch dimension does not fit.
        """
        with frames_folded:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    return self._call(args, kwargs)
            return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._training:
            context.check_process()  # gradients will be written to shared memory
        if self._compiled is None:
            self._compile(args, kwargs, None)
        else:
            assert self._signature is not None
            self._last_call = self._signature.matched(self._model.forward, args, kwargs)
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device: ConnectionType.Never has none"
        )
        if not self._attached:
            self.attachToDevice()
        with activities.doing(self._activity):
            return self._run(self._last_call)

    def _run(self, call: Call) -> Any:
        compiled, weights = self._require_compiled(), self._require_weights()
        begin = time.monotonic_ns()
        heartbeat.enter(TRAINING if self._training else INFERENCE)
        if self._link is None:
            weights.pull_newer_of_others()
            if weights.needs_upload:
                logger.debug("Implicit copyWeightsToDevice()")
                self.copyWeightsToDevice()
        else:
            self._link.load_pending_state()
            compiled = self._with_hooks(compiled, self._link)
        widen = compiled.executable.widen_integers
        with activities.doing(activities.TRANSFERRING, "inputs"):
            leaves = self._transfer.inputs(call.leaves, widen_integers=widen)
        first_forward = compiled.executable.first_forward
        after_update = None if self._link is None else self._link.after_update
        results = compiled.program.run(call, leaves, after_update)
        if first_forward.changed_inputs:
            self._transfer.write_back(first_forward.changed_inputs, call.leaves, leaves)
        with activities.doing(activities.TRANSFERRING, "results"):
            results = self._transfer.to_host(results)
        if self._training:
            heartbeat.step(call.num_samples, compiled.program.loss_in(results))
        else:
            heartbeat.call()
        if compiled.ipu_rows is not None:
            steps = heartbeat.steps() if self._training else None
            compiled.ipu_rows.draw(begin, time.monotonic_ns(), steps)
        if self._link is not None:
            weights.mark_device_newer()
            self._link.mark_device_ran()
            results = [forbid_backward(result) for result in results]
        if self._options.counts_cycles:
            logger.debug("Total number of IPU cycles: %d", self.cycleCount())
        return first_forward.outputs.rebuild(iter(results))

    def _with_hooks(self, compiled: Compiled, link: OptimizerLink) -> Compiled:
        """Return the compiled model, rebuilt if parameters have got hooks on their gradients."""
        hooks = compiled.state.gradient_hooks
        if hooks is None or not hooks.are_missing:
            return compiled
        self._rebuild(compiled, link)
        return self._require_compiled()

    # -- weights and optimiser ----------------------------------------------------------------

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights and buffers into the user's module."""
        self._require_weights().pull()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Do copyWeightsToHost() if training changed the weights since; return whether it did."""
        return self._weights is not None and self._weights.pull_if_newer()

    def copyWeightsToDevice(self) -> None:
        """Copy the user's weights and buffers to the device, with what other models trained."""
        compiled, weights = self._require_compiled(), self._require_weights()
        weights.pull_newer_of_others()
        compiled.state.upload()
        weights.mark_equal()

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

    def setOptimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        """Use the settings of ``optimizer`` from the next call on.

        The state on the device stays for one of the same kind that brings no state itself.

        Args:
            optimizer: the user's optimiser.
            scheduler: a scheduler of torch, stepped after each weight update inside a call. With
                None, the settings stay as they are until the next setOptimizer().

        Raises:
            AssertionError: an optimiser that the device does not know.
            ValueError: amsgrad, or a mean strategy other than the compiled one.
            Error: an attribute that was constant at compile time has changed, a scheduler that
                cannot be stepped after each weight update, or this is an inference model.
        """
        if self._link is None:
            raise Error(
                "setOptimizer() is for training models: an inference model updates nothing. Give "
                "the optimizer to poptorch.trainingModel()"
            )
        is_other = self._link.replace(optimizer, scheduler)
        if self._compiled is None:
            return
        if self._link.fits_program:
            self._link.sync()
        else:
            with frames_folded:
                self._rebuild(self._compiled, self._link)
        if is_other:
            self._link.connect()

    @_as_on_device
    def _rebuild(self, before: Compiled, link: OptimizerLink) -> None:
        """Make the program again for another optimiser, which may train other parameters."""
        compiled = self._compiler().build(before.executable, before.state, self._last_call)
        compiled.streams.seed_value = before.streams.seed_value
        compiled.program.steps_done = before.program.steps_done
        self._require_weights().change_download(compiled.download_changed())
        self._compiled = compiled
        link.rebuilt_to(compiled)

    # -- device -------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Tell whether the model holds its device."""
        return self._attached

    def _placed(self, num_ipus: int) -> None:
        """Go on with compiling, which is known to need so many IPUs.

        Nobody waits for a device here: compiling goes on meanwhile, and other processes may be
        waiting for its result.
        """
        self._num_ipus = num_ipus
        if self._options.connection_type == enums.ConnectionType.Always and not self._attached:
            self._attached = devices.acquire(self, self._options, num_ipus, patient=False)

    def _acquire(self) -> None:
        self._attached = devices.acquire(self, self._options, self._num_ipus)

    def attachToDevice(self) -> None:
        """Take the device again and upload weights and optimiser state.

        Raises:
            Error: not compiled, attached already, or another model has the device.
            AssertionError: the connection type is Never.
        """
        self._require_compiled()
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to attach to an offline device: ConnectionType.Never has none"
        )
        if self._attached:
            raise Error("The model is already attached to its device")
        self._acquire()
        self.copyWeightsToDevice()

    def detachFromDevice(self) -> None:
        """Fetch weights, optimiser and random state, and give the device back.

        Raises:
            Error: not compiled, or detached already.
        """
        self._require_compiled()
        if not self._attached:
            raise Error("Device is not attached")
        self._fetch()
        self._release()

    def destroy(self) -> None:
        """Fetch weights and optimiser state, give the device back, unwrap the user's module."""
        self._fetch()
        if self._link is not None:
            self._link.disconnect()
        self._compiled = self._weights = self._signature = None
        self._last_call = _NO_CALL
        self._release()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._model = watched_module.shallow_copy(self._user_model)

    def _fetch(self) -> None:
        """Bring the user's module and optimiser up to date."""
        self.copyWeightsToHostIfNeeded()
        if self._link is not None:
            self._link.fetch_state()

    def _release(self) -> None:
        devices.release(self)
        self._attached = False

    # -- state and files ----------------------------------------------------------------------

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

    def instance_state(self) -> dict[str, Any]:
        """Return the part of a training's state that each instance has of its own.

        Raises:
            Error: the model is not compiled, or does not train.
        """
        compiled, _ = self._require_compiled(), self._require_link()
        self.copyWeightsToHostIfNeeded()
        return training_state.instance_state(self._user_model, compiled)

    def training_state(self) -> dict[str, Any]:
        """Return the part of a training's state that all instances have alike.

        Raises:
            Error: the model is not compiled, or does not train.
        """
        self._require_compiled()
        self.copyWeightsToHostIfNeeded()
        shared = training_state.shared_state(self._user_model, self._require_link())
        return {**shared, "rng": self.rng_state}

    def load_training_state(
        self, shared: Mapping[str, Any], instances: Sequence[dict[str, Any]]
    ) -> None:
        """Go on from a state; what only the device holds follows once the model is compiled.

        Args:
            shared: what training_state() returned.
            instances: what instance_state() returned on each instance, in order.

        Raises:
            Error: the model does not train.
        """
        link = self._require_link()
        training_state.load_host_state(self._user_model, link, shared, instances)

        def load_device() -> None:
            compiled = self._require_compiled()
            training_state.load_device_state(compiled, link, shared, instances)
            self.rng_state = shared["rng"]

        if self._compiled is None:
            self._when_compiled = load_device
        else:
            self.copyWeightsToDevice()
            load_device()

    def _require_link(self) -> OptimizerLink:
        if self._link is None:
            raise Error("This is an inference model: only a poptorch.trainingModel has this state")
        return self._link

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
        compiled, signature = self._require_compiled(), self._signature
        assert signature is not None
        self._fetch()
        optimizer = None if self._link is None else self._link.optimizer
        SavedModel(
            options=self._options,
            call=signature.template,
            executable=compiled.executable,
            training=self._training,
            model=self._user_model if export_model else None,
            optimizer=optimizer if export_model else None,
            rng_state=self.rng_state if save_rng_state else None,
        ).write(Path(filename))

    def compileAndExport(
        self, filename: str | Path, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for the arguments, and save(); a compiled model goes on as it is.

        Raises:
            Error: the model was compiled for other arguments.
        """
        with frames_folded:
            if self._signature is None:
                self._compile(args, kwargs, None)
            else:
                self._signature.matched(self._model.forward, args, kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | Path) -> None:
        """Take a compiled model from a file instead of compiling; weights are this wrapper's own.

        Raises:
            Error: the file is none that save() wrote.
        """
        self._take(SavedModel.read(Path(filename)))

    def _take(self, saved: SavedModel) -> None:
        args, kwargs = saved.call.example()
        self._compile(args, kwargs, saved.executable)
        if saved.rng_state is not None:
            self.rng_state = saved.rng_state

    # -- observing ----------------------------------------------------------------------------

    def getTensorNames(self) -> list[str]:
        """Return the names of the tensors inside the compiled model.

        Raises:
            AssertionError: the model is not compiled.
        """
        assert self._compiled is not None, "The model must be compiled first"
        assert self._signature is not None
        return inspection.tensor_names(self._compiled, len(self._signature.template.leaves))

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the last call's value of a tensor named by Options.anchorTensor().

        Raises:
            AssertionError: an unknown name.
        """
        return self._require_compiled().program.anchors.get(short_name)


def _transfer(options: Options) -> Transfer:
    """Return what happens to tensors between host and device.

    Raises:
        Error: a mode of synthetic data that does not exist.
    """
    double_precision = options.Emulator.double_precision
    if not options.synthetic_data:
        return Transfer(double_precision=double_precision)
    return SyntheticTransfer(options.synthetic_mode, double_precision=double_precision)


def _own_options(options: Options, *, training: bool) -> Options:
    """Return a frozen copy for one model, which says what the model's output mode is."""
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(own.resolved_output_mode(training))
    own._freeze()
    return own
