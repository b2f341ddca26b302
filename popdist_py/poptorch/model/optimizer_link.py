"""The user's optimiser and scheduler of a training model, and their state on the device.

This module checks an optimiser, gives its settings and loaded state to the device, steps its
scheduler after each update, and fetches the device's state. The update itself is ``update/``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from popdist_py.poptorch import enums, optim
from popdist_py.poptorch.compilation.compiler import Compiled
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

# The types of a parameter group's values that a checkpoint keeps.
_SETTING: Final = (int, float, bool, tuple, list, torch.Tensor)


class OptimizerLink:
    """The user's optimiser on the host, and what updates the weights on the device.

    Args:
        options: the wrapper's frozen options.
        optimizer: the user's optimiser.
        scheduler: a scheduler of torch, stepped after each weight update; None for no scheduler.

    Attributes:
        optimizer: the user's optimiser at present.

    Raises:
        AssertionError: an optimiser that the device does not know.
        ValueError: amsgrad.
        Error: a scheduler that cannot be stepped after each weight update.
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
        # Whether the device's state may be newer than what the optimiser was last given.
        self._device_ran = False
        self._rules = self._new_rules()
        # Any: one of torch's, and perhaps one of ours, which mypy takes for a contradiction.
        self.optimizer: Any = optimizer
        self._scheduler: lr_scheduler.LRScheduler | None = None
        self._accept(optimizer, scheduler)

    def _new_rules(self) -> OptimizerRules:
        return OptimizerRules(
            relaxed=self._options._relax_optimizer_checks,
            automatic_loss_scaling=self._options.Training.automatic_loss_scaling,
        )

    # -- the program on the device ------------------------------------------------------------

    def compiled_to(self, compiled: Compiled) -> None:
        """Work with a newly compiled model."""
        self._compiled = compiled
        self._layout = Layout.of(self.optimizer)
        self._rules.settle(self.optimizer)
        self.connect()

    def rebuilt_to(self, compiled: Compiled) -> None:
        """Work with a program that was built again; it takes over what still fits."""
        before, self._compiled = self._training, compiled
        layout, self._layout = self._layout, Layout.of(self.optimizer)
        if layout is not None and layout.type is self._layout.type:
            self._training.optimizer.load_state_tensors(before.optimizer.state_tensors())
        self.load_loss_scaling(before.scaler.state() if before.scaler is not None else None)
        compression = self._training.compression
        if compression is not None and layout is not None and layout.trains_as(self._layout):
            compression.take_over(before.compression)

    def disconnect(self) -> None:
        """Fetch the state, and forget the program."""
        self.fetch_state()
        self._compiled = None

    @property
    def _training(self) -> Any:
        """The update on the device, which every compiled training model has."""
        assert self._compiled is not None
        assert self._compiled.program.training is not None
        return self._compiled.program.training

    # -- the user's optimiser -----------------------------------------------------------------

    def replace(
        self, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler | None = None
    ) -> bool:
        """Use ``optimizer`` from now on; return whether it is another object than before.

        The device learns of it by :meth:`sync`.

        Raises:
            AssertionError: an optimiser that the device does not know.
            ValueError: amsgrad, or a mean strategy other than the compiled one.
            Error: an attribute that was constant at compile time has changed, or a scheduler that
                cannot be stepped after each weight update.
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
                    "The model is already compiled with another mean reduction strategy than "
                    f"this optimizer's accumulation type needs ({strategy.name})"
                )
            self._options._unfreeze()
            training.set(**{name: strategy})
            self._options._freeze()
        self.optimizer, self._scheduler = optimizer, scheduler

    @property
    def fits_program(self) -> bool:
        """Whether the compiled program can run the optimiser, with other values at most."""
        return Layout.of(self.optimizer) == self._layout

    def sync(self) -> None:
        """Give the device the optimiser's values."""
        self._training.optimizer.sync(self.optimizer)

    @property
    def after_update(self) -> Callable[[], None] | None:
        """The function to call after each weight update; None without a scheduler."""
        return None if self._scheduler is None else self._step_scheduler

    def _step_scheduler(self) -> None:
        """Step the scheduler, and give the device its values for the next weight update.

        Raises:
            Error: the scheduler changes an attribute that was constant at compile time.
        """
        assert self._scheduler is not None
        self._scheduler.step()
        self._rules.accept(self.optimizer, compiled=True)
        self.sync()

    def connect(self) -> None:
        """Let a PopTorch optimiser read and write its state on the device."""
        # The device does what step() would: learning-rate schedulers ask whether it was called.
        self.optimizer._opt_called = True
        if isinstance(self.optimizer, optim.Optimizer):
            self.optimizer._connect(self.fetch_state)
            if self._options.connection_type != enums.ConnectionType.Never:
                self.load_pending_state()
                self._device_ran = True

    # -- state on the device ------------------------------------------------------------------

    def mark_device_ran(self) -> None:
        """Note that the device updated weights, so that its state is newer than the host's."""
        self._device_ran = True

    def load_pending_state(self) -> None:
        """Give the device the state that the program loaded since the last call.

        Raises:
            Error: it is a state of another model's optimiser.
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
        if self.fits_program:  # the program's own settings were loaded too
            self.sync()
            optimizer: Any = self.optimizer
            self._rules.settle(optimizer)
        device.load_parameter_tensors(split_groups(loaded.settings, parameters))
        self.load_state_tensors(state)

    def fetch_state(self) -> None:
        """Give a PopTorch optimiser its state on the device, if it ran since the last time."""
        if not isinstance(self.optimizer, optim.Optimizer) or self._compiled is None:
            return
        self.load_pending_state()
        device = self._training.optimizer
        if self._device_ran:
            self._device_ran = False
            self.optimizer._set_device_state(join_groups(device.state_tensors()))
        if self.optimizer._ipu_state is not None:
            # Also where nothing ran: the program may have set a learning rate since.
            self.optimizer._set_device_rates(join_groups(device.parameter_tensors(self.optimizer)))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the device's state by name."""
        tensors: dict[str, torch.Tensor] = self._training.optimizer.state_tensors()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the device what :meth:`state_tensors` returned."""
        self._training.optimizer.load_state_tensors(tensors)
        self._device_ran = True

    def loaded_rates(self) -> dict[str, torch.Tensor]:
        """Return the rates on the device that the program loaded instead of setting them."""
        rates: dict[str, torch.Tensor] = self._training.optimizer.loaded_rates()
        return rates

    def load_rates(self, rates: Mapping[str, torch.Tensor]) -> None:
        """Give the device the program's settings, and what :meth:`loaded_rates` returned."""
        if self.fits_program:
            self.sync()
        self._training.optimizer.load_parameter_tensors(rates)

    def loss_scaling(self) -> dict[str, float] | None:
        """Return the state of automatic loss scaling; None if it is off."""
        scaler = self._training.scaler
        state: dict[str, float] | None = None if scaler is None else scaler.state()
        return state

    def load_loss_scaling(self, state: Mapping[str, float] | None) -> None:
        """Restore a state that :meth:`loss_scaling` returned, if automatic loss scaling is on."""
        scaler = self._training.scaler
        if scaler is not None and state is not None:
            scaler.load_state(state)

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the scheduler's ``state_dict()``; None without a scheduler."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def load_scheduler_state(self, state: Mapping[str, Any] | None) -> None:
        """Give the scheduler, if there is one, the result of :meth:`scheduler_state`."""
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(dict(state))

    # -- settings -----------------------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each parameter group that are plain values, such as lr."""
        return [
            {
                key: _plain(value)
                for key, value in group.items()
                if key != "params" and isinstance(value, _SETTING)
            }
            for group in self.optimizer.param_groups
        ]

    def load_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Give the parameter groups what :meth:`settings` returned."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(saved)

    def attributes(self) -> dict[str, Any]:
        """Return the variable numbers that a PopTorch optimiser has outside its groups."""
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
        """Restore the numbers that :meth:`attributes` returned."""
        for name, value in attributes.items():
            if name in getattr(self.optimizer, "_own", {}):
                setattr(self.optimizer, name, value)


def _plain(value: Any) -> Any:
    """Return a setting without NumPy's kind of float, which only looks like Python's."""
    if isinstance(value, tuple | list):
        return type(value)(_plain(each) for each in value)
    return float(value) if isinstance(value, float) else value
