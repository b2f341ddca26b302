"""The class ``OptimizerLink``, which connects the user's optimiser with the device.

OptimizerLink checks the optimiser, and copies the optimiser's settings and loaded state to the
device. OptimizerLink also steps the learning-rate scheduler after each weight update, and copies
the optimiser state on the device to the host. The package ``update`` computes the weight updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from popdist_py.poptorch import enums, optim
from popdist_py.poptorch.compilation.compiled_model import Compiled
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.update.optimizer_rules import (
    Layout,
    OptimizerRules,
    check_optimizer,
    check_scheduler,
    mean_strategy,
)
from popdist_py.poptorch.weights.replica_grouping import join_groups, split_groups

__all__ = ["OptimizerLink"]

# A checkpoint stores only those values of an optimiser's parameter group that have one of the types
# in ``_SETTING``.
_SETTING: Final = (int, float, bool, tuple, list, torch.Tensor)


class OptimizerLink:
    """Connects the user's optimiser on the host with the weight update on the device.

    Args:
        options: The wrapper's frozen options.
        optimizer: The user's optimiser.
        scheduler: A learning-rate scheduler of torch to step after each weight update; None without
            a scheduler.

    Attributes:
        optimizer: The user's current optimiser.

    Raises:
        AssertionError: The device does not support the optimiser.
        ValueError: The optimiser uses amsgrad.
        Error: The learning-rate scheduler cannot be stepped after each weight update.
    """

    def __init__(
        self,
        options: Options,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self._options = options
        self._compiled: Compiled | None = None
        self._layout: Layout | None = None
        # Whether the optimiser state on the device may be newer than the state in the user's
        # optimiser.
        self._device_ran = False
        self._rules = self._new_rules()
        # The attribute ``optimizer`` has the type Any, because mypy does not accept that one object
        # may be both an optimiser of torch.optim and an optimiser of poptorch.optim.
        self.optimizer: Any = optimizer
        self._scheduler: lr_scheduler.LRScheduler | None = None
        self._accept(optimizer, scheduler)

    def _new_rules(self) -> OptimizerRules:
        return OptimizerRules(
            relaxed=self._options._relax_optimizer_checks,
            automatic_loss_scaling=self._options.Training.automatic_loss_scaling,
        )

    # -- The program on the device ------------------------------------------------------------

    def compiled_to(self, compiled: Compiled) -> None:
        """Connect the optimiser to a newly compiled model."""
        self._compiled = compiled
        self._layout = Layout.of(self.optimizer)
        self._rules.settle(self.optimizer)
        self.connect()

    def rebuilt_to(self, compiled: Compiled) -> None:
        """Connect the optimiser to a rebuilt program, and keep its state if still possible."""
        before, self._compiled = self._training, compiled
        layout, self._layout = self._layout, Layout.of(self.optimizer)
        if layout is not None and layout.type is self._layout.type:
            self._training.optimizer.load_state_tensors(before.optimizer.state_tensors())
        self.load_loss_scaling(before.scaler.state() if before.scaler is not None else None)
        compression = self._training.compression
        if compression is not None and layout is not None and layout.trains_as(self._layout):
            compression.take_over(before.compression)

    def disconnect(self) -> None:
        """Copy the device's optimiser state to the host, and disconnect the user's optimiser."""
        self.fetch_state()
        self._compiled = None

    @property
    def _training(self) -> Any:
        """The part of a compiled training model that updates the weights on the device."""
        assert self._compiled is not None
        assert self._compiled.program.training is not None
        return self._compiled.program.training

    # -- The user's optimiser -----------------------------------------------------------------

    def replace(
        self, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler | None = None
    ) -> bool:
        """Use ``optimizer`` from now on, and return whether it differs from the previous optimiser.

        The optimiser's settings are not copied to the device until :meth:`sync` is called.

        Raises:
            AssertionError: The device does not support the optimiser.
            ValueError: The optimiser uses amsgrad, or the optimiser needs another mean reduction
                strategy (way to average gradients) than at compile time.
            Error: An optimiser attribute that was constant at compile time has changed, or the
                scheduler cannot be stepped after each weight update.
        """
        is_other = optimizer is not self.optimizer
        if is_other:
            self.fetch_state()
            self._rules = self._new_rules()
        self._accept(optimizer, scheduler)
        return is_other

    def _accept(
        self, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler | None
    ) -> None:
        check_optimizer(optimizer)
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        is_compiled = self._compiled is not None
        self._rules.accept(optimizer, compiled=is_compiled)
        training = self._options.Training
        strategy = mean_strategy(optimizer)
        name = "meanAccumulationAndReplicationReductionStrategy"
        if strategy == enums.MeanReductionStrategy.Running and strategy != training(name):
            if is_compiled:
                raise ValueError(
                    "The accumulation type of the new optimizer needs the mean reduction strategy "
                    f"{strategy.name}, but the model is already compiled with another mean "
                    "reduction strategy"
                )
            self._options._unfreeze()
            training.set(**{name: strategy})
            self._options._freeze()
        self.optimizer, self._scheduler = optimizer, scheduler

    @property
    def fits_program(self) -> bool:
        """Whether the compiled program can run the user's optimiser without being built again.

        The compiled program need not be built again for other values of settings such as the
        learning rate.
        """
        return Layout.of(self.optimizer) == self._layout

    def sync(self) -> None:
        """Copy the current settings of the optimiser to the device."""
        self._training.optimizer.sync(self.optimizer)

    @property
    def after_update(self) -> Callable[[], None] | None:
        """The function that steps the scheduler after a weight update; None without a scheduler."""
        return None if self._scheduler is None else self._step_scheduler

    def _step_scheduler(self) -> None:
        """Step the learning-rate scheduler, and copy the optimiser's new settings to the device.

        Raises:
            Error: The scheduler has changed an optimiser attribute that was constant at compile
                time.
        """
        assert self._scheduler is not None
        self._scheduler.step()
        self._rules.accept(self.optimizer, compiled=True)
        self.sync()

    def connect(self) -> None:
        """Connect a PopTorch optimiser to its state on the device."""
        # The device updates the weights, so the program does not call step() of the optimiser.
        # Torch's learning-rate schedulers read the attribute ``_opt_called``, and would warn that
        # step() was not called.
        self.optimizer._opt_called = True
        if isinstance(self.optimizer, optim.Optimizer):
            self.optimizer._connect(self.fetch_state)
            if self._options.connection_type != enums.ConnectionType.Never:
                self.load_pending_state()
                self._device_ran = True

    # -- The optimiser state on the device ----------------------------------------------------

    def mark_device_ran(self) -> None:
        """Record that the optimiser state on the device is newer than the state on the host."""
        self._device_ran = True

    def load_pending_state(self) -> None:
        """If the program has loaded an optimiser state since the last call, copy it to the device.

        Raises:
            Error: The loaded optimiser state belongs to the optimiser of another model.
        """
        if not isinstance(self.optimizer, optim.Optimizer) or self._compiled is None:
            return
        loaded = self.optimizer._state_to_load()
        if loaded is None:
            return
        self.optimizer._note_loaded()
        parameters, device = self._compiled.state.parameters, self._training.optimizer
        state = split_groups(loaded.state, parameters)
        device.check_state_tensors(state)
        # A loaded optimiser state also contains settings of the parameter groups, such as the
        # learning rate.
        if self.fits_program:
            self.sync()
            optimizer: Any = self.optimizer
            self._rules.settle(optimizer)
        device.load_parameter_tensors(split_groups(loaded.settings, parameters))
        self.load_state_tensors(state)

    def fetch_state(self) -> None:
        """Copy the device's optimiser state to a PopTorch optimiser, if the device has run."""
        if not isinstance(self.optimizer, optim.Optimizer) or self._compiled is None:
            return
        self.load_pending_state()
        device = self._training.optimizer
        if self._device_ran:
            self._device_ran = False
            self.optimizer._set_device_state(join_groups(device.state_tensors()))
        if self.optimizer._ipu_state is not None:
            # Rates, such as the learning rate, are copied even if the device did not run, because
            # the program may have set another learning rate.
            self.optimizer._set_device_rates(join_groups(device.parameter_tensors(self.optimizer)))

    def state_tensors(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimiser state on the device, by name.

        Args:
            copied: Whether the tensors are copies. With False, the next weight update may change
                the tensors.
        """
        tensors: dict[str, torch.Tensor] = self._training.optimizer.state_tensors(copied=copied)
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors from the result of :meth:`state_tensors` to the device."""
        self._training.optimizer.load_state_tensors(tensors)
        self._device_ran = True

    def loaded_rates(self) -> dict[str, torch.Tensor]:
        """Return the rates on the device that come from a loaded optimiser state.

        Rates are settings of the optimiser such as the learning rate. The result does not contain
        rates that the program has changed after it loaded the optimiser state.
        """
        rates: dict[str, torch.Tensor] = self._training.optimizer.loaded_rates()
        return rates

    def load_rates(self, rates: Mapping[str, torch.Tensor]) -> None:
        """Copy the optimiser's settings and the result of :meth:`loaded_rates` to the device."""
        if self.fits_program:
            self.sync()
        self._training.optimizer.load_parameter_tensors(rates)

    def loss_scaling(self) -> dict[str, float] | None:
        """Return the state of automatic loss scaling; None without automatic loss scaling."""
        scaler = self._training.scaler
        state: dict[str, float] | None = None if scaler is None else scaler.state()
        return state

    def load_loss_scaling(self, state: Mapping[str, float] | None) -> None:
        """Restore a state that :meth:`loss_scaling` returned, if automatic loss scaling is on."""
        scaler = self._training.scaler
        if scaler is not None and state is not None:
            scaler.load_state(state)

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the scheduler's ``state_dict()``; None if there is no scheduler."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def load_scheduler_state(self, state: Mapping[str, Any] | None) -> None:
        """Load the result of :meth:`scheduler_state` into the scheduler, if one exists."""
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(dict(state))

    # -- The optimiser's settings -------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each parameter group (such as lr) that a checkpoint can store."""
        return [
            {
                key: _plain(value)
                for key, value in group.items()
                if key != "params" and isinstance(value, _SETTING)
            }
            for group in self.optimizer.param_groups
        ]

    def load_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of :meth:`settings` into the optimiser's parameter groups."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(saved)

    def attributes(self) -> dict[str, Any]:
        """Return the numeric attributes of a PopTorch optimiser that may change after compiling.

        The returned attributes do not include settings of the parameter groups, such as lr. For an
        optimiser of torch.optim, the returned dictionary is empty.
        """
        if not isinstance(self.optimizer, optim.Optimizer):
            return {}
        variable = self.optimizer.variable_attrs
        return {
            name: _plain(getattr(self.optimizer, name))
            for name in self.optimizer._own
            if name not in self.optimizer._own_per_group
            and isinstance(getattr(self.optimizer, name), int | float)
            and not variable.isConstant(name)
        }

    def load_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set the optimiser's attributes to the values that :meth:`attributes` returned."""
        for name, value in attributes.items():
            if name in getattr(self.optimizer, "_own", {}):
                setattr(self.optimizer, name, value)


def _plain(value: Any) -> Any:
    """Return a setting with Python floats in place of NumPy floats.

    A NumPy float64 also passes the check for ``float``, because its class is a subclass of float.
    """
    if isinstance(value, tuple | list):
        return type(value)(_plain(each) for each in value)
    return float(value) if isinstance(value, float) else value
