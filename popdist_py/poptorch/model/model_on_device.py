"""The class ``ModelOnDevice``, which compiles a module, attaches it to a device and runs it.

The class ``PoplarExecutor`` is the public subclass of ``ModelOnDevice``. Other modules compute the
results of model calls, and write compiled models to files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from popdist_py.poptorch.compilation.compiled_model import Compiled, Executable
from popdist_py.poptorch.compilation.compiler import compile_model
from popdist_py.poptorch.compilation.executable_cache import ExecutableCache
from popdist_py.poptorch.compilation.program_builder import build_program
from popdist_py.poptorch.compilation.source_model import SourceModel
from popdist_py.poptorch.data import sampler_order_check
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.model import compile_hooks, devices, inspection
from popdist_py.poptorch.model.communicator_choice import communicator_for
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.model.progress import progress_bar
from popdist_py.poptorch.model.user_frames import frames_folded
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.weights import copy_before_read
from popdist_py.poptorch.weights.newer_weights import WeightCopy, pull_newer

__all__ = ["ModelOnDevice"]

_NO_CALL: Final = Call((), (), [])
# Autograd on the device must not depend on torch.inference_mode() in the user's program. The
# decorator ``_as_on_device`` switches off the inference mode of the user's program.
_as_on_device: Final = torch.inference_mode(False)


class ModelOnDevice:
    """A user's module with its options, its compiled program and its device.

    Args:
        model: The user's module, which contains the weights on the host.
        options: The options of the model, which cannot be changed afterwards.
        training: Whether the wrapper is for training (trainingModel()) and not for inference.
        optimizer: The user's optimiser; None for an inference model.
        scheduler: A torch scheduler that is stepped after each weight update inside a call.
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
        self._model = copy_before_read.shallow_copy(model)
        self._options = _own_options(options, training=training)
        self._training = training
        self._activity = activities.COMPUTING if training else activities.VALIDATING
        self._transfer = _transfer(options)
        self._attached = False
        self._num_ipus = 1
        self._unwatch: Callable[[], None] | None = None
        # The arguments of the last call of the model, for building the program again with another
        # optimiser. The value ``_NO_CALL`` means that the model is not compiled.
        self._last_call = _NO_CALL
        # The method ``_compile`` sets the attributes ``_compiled``, ``_signature``, ``_weights``
        # and ``_compilation_seconds``.
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

    def _wrap_user_model(self) -> None:
        if copy_before_read.is_wrapped(self._user_model):
            raise RuntimeError(
                f"{type(self._user_model).__name__} has already been wrapped in a "
                "poptorch.trainingModel: call destroy() on that wrapper first"
            )
        self._unwatch = copy_before_read.watch(
            self._user_model, self.copyWeightsToHostIfNeeded, self.destroy
        )

    # -- Compilation of the model -------------------------------------------------------------

    def isCompiled(self) -> bool:
        """Return whether the model is compiled, and was not destroyed after the compilation."""
        return self._compiled is not None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments of the same structure, shapes and dtypes.

        If the model is already compiled, the method ``compile`` only logs a warning.
        """
        if self._compiled is not None:
            logger.warning("Call to compile() ignored: the model is already compiled")
            return
        with frames_folded:
            self._compile(args, kwargs, None)

    @_as_on_device
    def _compile(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], executable: Executable | None
    ) -> None:
        """Compile the model for arguments of the same structure, shapes and dtypes.

        If ``executable`` (the result of an earlier compilation) is given, the forward method is not
        traced again.
        """
        signature, self._last_call = CallSignature.of(
            self._model.forward, args, kwargs, self._options.batching(self._training).num_slices
        )
        if self._last_call.has_dictionary:
            self._transfer.warn_once(
                "Dictionaries in the inputs of the model are flattened in the order of their keys"
            )
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
        # The model attaches to its device at the end of the compilation. If attaching to a device
        # raises an error, the model remains compiled, and its next call tries to attach again.
        if self._options.connection_type != enums.ConnectionType.Never and not self._attached:
            self._acquire()

    def _compiled_for(self, executable: Executable | None) -> tuple[Compiled, int]:
        """Return the model compiled for the last call's arguments, and the number of instances."""
        compiling = activities.doing(activities.COMPILING)
        with compiling, progress_bar(shown=self._shows_progress) as advance:
            source = self._source()
            cache = ExecutableCache.of(
                self._user_model, self._options, source.optimizer, self._last_call
            )
            with cache.locked():
                earlier = executable or cache.load()
                compiled = compile_model(source, self._last_call, earlier, advance, self._placed)
                cache.store(compiled.executable)
        if self._training:
            sampler_order_check.check(source.communicator)
        return compiled, source.communicator.num_instances

    @property
    def _shows_progress(self) -> bool:
        first = self._options.Distributed.processId == 0
        return bool(self._options._show_compilation_progress_bar) and first

    def _source(self) -> SourceModel:
        return SourceModel(
            model=self._model,
            user_model=self._user_model,
            options=self._options,
            optimizer=None if self._link is None else self._link.optimizer,
            transfer=self._transfer,
            communicator=communicator_for(self._options, training=self._training),
        )

    def _require_compiled(self) -> Compiled:
        if self._compiled is None:
            raise Error(
                "The model has not been compiled or has been destroyed: call the model, or its "
                "method compile(), first"
            )
        return self._compiled

    def _require_weights(self) -> WeightCopy:
        self._require_compiled()
        assert self._weights is not None
        return self._weights

    # -- Calls of the compiled model ----------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the given samples, and compile the model first if necessary.

        Raises:
            Error: The arguments differ from the arguments that the model was compiled for.
            AssertionError: The connection type is Never, or the batch dimension of an input has a
                wrong size.
        """
        with frames_folded:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    return self._call(args, kwargs)
            return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._training:
            # A training model writes gradients to memory that the instances share, so a forked
            # process must not run the model.
            context.check_process()
        if self._compiled is None:
            self._compile(args, kwargs, None)
        else:
            assert self._signature is not None
            self._last_call = self._signature.matched(self._model.forward, args, kwargs)
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device: a model with ConnectionType.Never has "
            "no device"
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
            cycles = inspection.cycle_count(compiled, self._options)
            logger.debug("Total number of IPU cycles: %d", cycles)
        return first_forward.outputs.rebuild(iter(results))

    def _with_hooks(self, compiled: Compiled, link: OptimizerLink) -> Compiled:
        """Return the compiled model, after rebuilding it if parameters have new gradient hooks."""
        hooks = compiled.state.gradient_hooks
        if hooks is None or not hooks.are_missing:
            return compiled
        self._rebuild(compiled, link)
        return self._require_compiled()

    # -- Copies of weights between host and device --------------------------------------------

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights and buffers into the user's module."""
        self._require_weights().pull()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy weights to the host if training has changed them since the last copy.

        Returns:
            Whether weights were copied to the host.
        """
        return self._weights is not None and self._weights.pull_if_newer()

    def copyWeightsToDevice(self) -> None:
        """Copy the weights and buffers of the user's module to the device.

        If another wrapper has trained some of the weights, these weights are first copied from the
        other wrapper's device to the host.
        """
        compiled, weights = self._require_compiled(), self._require_weights()
        weights.pull_newer_of_others()
        compiled.state.upload()
        weights.mark_equal()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that ``Options.updatableNamedBuffers()`` names to the device.

        Raises:
            Error: The model is not compiled, or the options do not name any buffer.
        """
        compiled = self._require_compiled()
        names = self._options.updatable_buffers
        if not names:
            raise Error(
                "copyNamedBuffersToDevice() copies the buffers that "
                "Options.updatableNamedBuffers([names]) names: set this option first"
            )
        compiled.state.upload(only=frozenset(names))

    @_as_on_device
    def _rebuild(self, before: Compiled, link: OptimizerLink) -> None:
        """Build the compiled program again, for another optimiser or for new gradient hooks.

        The new optimiser may train other parameters than the previous optimiser.
        """
        # A back end (way to run the replicas) is chosen again, because the results of the rebuilt
        # program must agree with the results of the loop over replicas.
        executable = replace(before.executable, back_end=None)
        compiled = build_program(self._source(), executable, before.state, self._last_call)
        compiled.streams.seed_value = before.streams.seed_value
        compiled.program.steps_done = before.program.steps_done
        self._require_weights().change_download(compiled.download_changed())
        self._compiled = compiled
        link.rebuilt_to(compiled)

    # -- The device of the model --------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is attached to its device."""
        return self._attached

    def _placed(self, num_ipus: int) -> None:
        """Store the number of IPUs, and attach the model if its connection type is Always.

        The compiler calls ``_placed`` as soon as the number of IPUs is known. The method
        ``_placed`` does not wait for a device that is in use, because other processes may be
        waiting for the result of the compilation. After the compilation, the method ``_compile``
        waits for the device.
        """
        self._num_ipus = num_ipus
        if self._options.connection_type == enums.ConnectionType.Always and not self._attached:
            self._attached = devices.acquire(self, self._options, num_ipus, patient=False)

    def _acquire(self) -> None:
        self._attached = devices.acquire(self, self._options, self._num_ipus)

    def attachToDevice(self) -> None:
        """Attach the model to its device again, and copy the weights to the device.

        Raises:
            Error: The model is not compiled or is already attached, or another model holds the
                device.
            AssertionError: The connection type is Never.
        """
        self._require_compiled()
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to attach to an offline device: a model with ConnectionType.Never has no device"
        )
        if self._attached:
            raise Error("The model is already attached to its device")
        self._acquire()
        self.copyWeightsToDevice()

    def detachFromDevice(self) -> None:
        """Copy the weights and the optimiser state to the host, and release the device.

        Raises:
            Error: The model is not compiled, or is not attached.
        """
        self._require_compiled()
        if not self._attached:
            raise Error("The model is not attached to a device")
        self._fetch()
        self._release()

    def destroy(self) -> None:
        """Release the device, and remove the wrapping of the user's module.

        The weights and the optimiser state are copied to the host before the device is released.
        """
        self._fetch()
        if self._link is not None:
            self._link.disconnect()
        self._compiled = self._weights = self._signature = None
        self._last_call = _NO_CALL
        self._release()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._model = copy_before_read.shallow_copy(self._user_model)

    def _fetch(self) -> None:
        """Copy the weights and the optimiser state to the host, if the device has newer values."""
        self.copyWeightsToHostIfNeeded()
        if self._link is not None:
            self._link.fetch_state()

    def _release(self) -> None:
        devices.release(self)
        self._attached = False


def _transfer(options: Options) -> Transfer:
    """Return a ``Transfer``, which converts tensors between the host and the device.

    Raises:
        Error: The options contain an unknown mode of synthetic data.
    """
    double_precision = options.Emulator.double_precision
    if not options.synthetic_data:
        return Transfer(double_precision=double_precision)
    return SyntheticTransfer(options.synthetic_mode, double_precision=double_precision)


def _own_options(options: Options, *, training: bool) -> Options:
    """Return a frozen copy of the options of one model.

    If the output mode (which outputs a call returns) in ``options`` is Default, the copy contains
    the mode that Default means for the model.
    """
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(own.resolved_output_mode(training))
    own._freeze()
    return own
