"""The class ``PoplarExecutor``, the wrapper that runs a user's module on emulated IPUs.

The base class ModelOnDevice compiles, attaches and runs the module. The base class DeviceReports
reports the module's memory and time on an IPU. PoplarExecutor adds methods for the user's module,
the optimiser, the training state, and files.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from popdist_py.poptorch.compilation.compiled_model import Executable
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.model import inspection, training_state
from popdist_py.poptorch.model.device_reports import DeviceReports
from popdist_py.poptorch.model.module_text import module_repr
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.model.saved_model import SavedModel
from popdist_py.poptorch.model.training_state import LiveModule
from popdist_py.poptorch.model.user_frames import frames_folded
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.weights.replica_grouping import make_groupable

__all__ = ["PoplarExecutor"]


class PoplarExecutor(DeviceReports):
    """The wrapper of a model on an emulated device, made by trainingModel() or inferenceModel().

    A call of the wrapper runs the model. The first dimension of every input must have the size
    micro-batch x device iterations x (replicas / input group size) x gradient accumulation. The
    results of a call have the same structure as the outputs of the forward method. The first
    dimension of a result contains the outputs of the micro-batches that ``Options.outputMode()``
    selects. Attributes that the wrapper does not have are read from the user's module.
    """

    # -- The user's module --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The user's module, which the wrapper runs."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The wrapper's frozen copy of the options."""
        return self._options

    # Programs for Graphcore's PopTorch read the attributes ``_executable`` and ``_is_attached``, so
    # these attributes must keep their names.

    @property
    def _executable(self) -> Executable | None:
        """The result of the compilation; None before the compilation and after destroy()."""
        return None if self._compiled is None else self._compiled.executable

    @property
    def _is_attached(self) -> bool:
        """Whether the model is attached to its device."""
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

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state dict of the user's module, with the newest weights of the device."""
        self.copyWeightsToHostIfNeeded()
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict into the user's module.

        If the model is attached to a device, the loaded weights are copied to the device.

        Returns:
            The missing keys and the unexpected keys, as ``torch.nn.Module.load_state_dict`` returns
            them.
        """
        self.copyWeightsToHostIfNeeded()
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

    # -- The user's optimiser -----------------------------------------------------------------

    def setOptimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        """Use ``optimizer`` and its settings from the next call of the model on.

        The optimiser state on the device is kept if the new optimiser is of the same kind, such as
        Adam, and no state has been loaded into the new optimiser.

        Args:
            optimizer: The user's new optimiser.
            scheduler: A torch scheduler that is stepped after each weight update inside a call.
                Without a scheduler, the optimiser's settings stay constant until the next call of
                setOptimizer().

        Raises:
            AssertionError: The device does not support the optimiser.
            ValueError: The optimiser uses amsgrad, or needs a different mean reduction strategy
                (way to average gradients) than at compile time.
            Error: An attribute of the optimiser that was constant at compile time has changed, the
                scheduler cannot be stepped after each weight update, or this model is an inference
                model.
        """
        if self._link is None:
            raise Error(
                "setOptimizer() is for training models: an inference model does not update "
                "weights. Pass the optimizer to poptorch.trainingModel()"
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

    # -- Training state and files -------------------------------------------------------------

    @property
    def rng_state(self) -> list[int]:
        """The state of the device's random number generator.

        The state of the device's random number generator consists of the seed and the number of
        micro-batches that have run so far.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._require_compiled()
        return [compiled.streams.seed_value, compiled.program.steps_done]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        compiled = self._require_compiled()
        compiled.streams.seed_value, compiled.program.steps_done = state

    def instance_state(self, live: LiveModule | None = None) -> dict[str, Any]:
        """Return the part of the training state that differs between instances.

        Args:
            live: The result of ``live_module()``. With None, weights are copied to the host.

        Raises:
            Error: The model is not compiled, or is an inference model.
        """
        compiled, _ = self._require_compiled(), self._require_link()
        if live is None:
            self.copyWeightsToHostIfNeeded()
        return training_state.instance_state(self._user_model, compiled, live)

    def training_state(self, live: LiveModule | None = None) -> dict[str, Any]:
        """Return the part of the training state that is equal on all instances.

        Args:
            live: The result of ``live_module()``. The next weight update changes the weights and
                the optimiser state in the result. With None, weights are copied to the host, and
                the optimiser state is copied too.

        Raises:
            Error: The model is not compiled, or is an inference model.
        """
        self._require_compiled()
        if live is None:
            self.copyWeightsToHostIfNeeded()
        shared = training_state.shared_state(self._user_model, self._require_link(), live)
        return {**shared, "rng": self.rng_state}

    def live_module(self) -> LiveModule | None:
        """Return the newest tensors of the user's module in the device's memory.

        Returns:
            The tensors; None if the host has the newest weights, or must compute the state of the
            module.

        Raises:
            Error: The model is not compiled, or is an inference model.
        """
        compiled, _ = self._require_compiled(), self._require_link()
        # If the host has the newest weights, the program may change them at any time.
        if self._weights is None or not self._weights.only_changed_are_newer:
            return None
        compiled.check_weights()
        return training_state.live_module(self._user_model, compiled)

    def load_training_state(
        self, shared: Mapping[str, Any], instances: Sequence[dict[str, Any]]
    ) -> None:
        """Restore the training state that training_state() and instance_state() returned.

        If the model is not compiled yet, the device's part of the training state is restored after
        the compilation.

        Args:
            shared: The result of training_state(), which is equal on all instances.
            instances: The results of instance_state() on all instances, in the order of the
                instances.

        Raises:
            Error: The model is an inference model.
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
            raise Error(
                "This model is an inference model: only a poptorch.trainingModel has training state"
            )
        return self._link

    def save(
        self, filename: str | Path, export_model: bool = True, save_rng_state: bool = True
    ) -> None:
        """Write the compiled model to a file that poptorch.load() or loadExecutable() can read.

        Args:
            filename: The path of the file. If the path ``filename`` is a folder, the file
                ``model.poptorch`` in this folder is written. Parent folders of the path
                ``filename`` that do not exist are made.
            export_model: Whether the file includes the user's module, the weights and the
                optimiser.
            save_rng_state: Whether the file includes the state of the device's random numbers.

        Raises:
            Error: The model is not compiled.
            AssertionError: The parent of the path ``filename`` is a file, and not a folder.
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
        """Compile the model for the arguments of a call, and write it to a file with ``save``.

        A model that is already compiled is not compiled again.

        Raises:
            Error: The model was compiled for other arguments.
        """
        with frames_folded:
            if self._signature is None:
                self._compile(args, kwargs, None)
            else:
                self._signature.matched(self._model.forward, args, kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | Path) -> None:
        """Load a compiled model from a file, instead of compiling the model.

        The weights are not loaded from the file, so the wrapper keeps its own weights.

        Raises:
            Error: The file was not written by ``PoplarExecutor.save``.
        """
        self._take(SavedModel.read(Path(filename)))

    def _take(self, saved: SavedModel) -> None:
        args, kwargs = saved.call.example()
        self._compile(args, kwargs, saved.executable)
        if saved.rng_state is not None:
            self.rng_state = saved.rng_state

    # -- Values of the last compilation and the last call -------------------------------------

    def compilationTime(self) -> datetime.timedelta:
        """Return the time that the compilation of the model took.

        Raises:
            Error: The model is not compiled, or the progress bar is disabled.
        """
        if not self._options._show_compilation_progress_bar:
            raise Error("compilationTime() needs Options.showCompilationProgressBar(True)")
        self._require_compiled()
        return datetime.timedelta(seconds=self._compilation_seconds)

    def getTensorNames(self) -> list[str]:
        """Return the names of the tensors inside the compiled model.

        Raises:
            AssertionError: The model is not compiled.
        """
        assert self._compiled is not None, (
            "The model must be compiled first: call the model, or its method compile()"
        )
        assert self._signature is not None
        return inspection.tensor_names(self._compiled, len(self._signature.template.leaves))

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the value of an anchored tensor (see Options.anchorTensor()) in the last call.

        Args:
            short_name: The name that ``Options.anchorTensor()`` gave to the tensor.

        Raises:
            AssertionError: The name of the tensor is unknown, or the model has not run yet.
        """
        return self._require_compiled().program.anchors.get(short_name)
