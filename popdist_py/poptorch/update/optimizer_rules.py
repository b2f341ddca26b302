"""Checks of the user's optimiser and scheduler, and rules for changes after compiling."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from popdist_py.poptorch import enums, optim
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.update.device_optimizer import is_kept, kind_of

__all__ = ["Layout", "OptimizerRules", "check_optimizer", "check_scheduler", "mean_strategy"]

# The optimiser classes that the device can run. If the user's optimiser is a subclass of a
# supported optimiser class, the device computes the weight update of the parent class.
_KNOWN: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.RMSprop,
    optim.LAMB,
    optim.LARS,
)
_GLOBAL: Final = ("loss_scaling", "max_grad_norm")
_BUILT_IN: Final = (
    "bias_correction",
    "use_tf_variant",
    "use_combined_accum",
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)

# The arguments that choose the implementation of torch's optimisers on the host, and do not affect
# the device.
_SWITCHES_OF_TORCH: Final = ("foreach", "fused", "capturable", "differentiable")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that the device can run ``optimizer``.

    Raises:
        AssertionError: The optimiser's type is not supported, ``centered`` differs between
            parameter groups, or ``betas`` is not a pair.
        ValueError: The optimiser uses amsgrad.
    """
    kind_of(optimizer)
    if type(optimizer) not in _KNOWN:
        parent = next(kind for kind in type(optimizer).__mro__ if kind in _KNOWN)
        logger.warning(
            "The optimizer %s is a subclass of %s: the device runs the arithmetic of the parent "
            "class, and not the Python code of the subclass",
            type(optimizer).__name__,
            parent.__name__,
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(
            "Only non-amsgrad Adam/AdamW optimizers are supported: make the optimizer with "
            "amsgrad=False"
        )
    centered = {bool(group.get("centered", False)) for group in optimizer.param_groups}
    assert len(centered) == 1, (
        "All parameter groups of the optimizer must have the same value for centered"
    )
    for group in optimizer.param_groups:
        if "betas" in group:
            betas = group["betas"]
            is_pair = isinstance(betas, tuple | list) and len(betas) == 2
            assert is_pair, f"The optimizer has betas={betas!r}: expected a pair of numbers"


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check that ``scheduler`` can be stepped after each weight update of ``optimizer``.

    Raises:
        Error: ``scheduler`` is not a learning-rate scheduler of torch, its step() needs a metric,
            or it belongs to another optimiser.
    """
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        name = type(part).__name__
        if isinstance(part, lr_scheduler.ReduceLROnPlateau):
            raise Error(
                f"The argument scheduler contains a {name}, which needs a metric at each step: "
                "instead, call the scheduler's step(metric) between calls of the model, and then "
                "setOptimizer(optimizer) of the model"
            )
        if not isinstance(part, lr_scheduler.LRScheduler):
            raise Error(
                f"The argument scheduler has the type {name}: expected a scheduler of "
                "torch.optim.lr_scheduler, such as LambdaLR(optimizer, function of the number of "
                "updates)"
            )
    if scheduler.optimizer is not optimizer:
        raise Error(
            f"The argument scheduler is a {type(scheduler).__name__} of another optimizer than the "
            "model's optimizer: make the scheduler with the optimizer that you give to the model"
        )


def mean_strategy(optimizer: torch.optim.Optimizer) -> enums.MeanReductionStrategy:
    """Return how gradients are averaged, for the dtype of the optimiser's gradient accumulators.

    Float16 gradient accumulators need a running mean, which keeps the accumulated gradients in the
    range of float16. If the optimiser has the setting ``use_combined_accum``, the mean is computed
    after the accumulation instead.
    """
    half = getattr(optimizer, "accum_type", torch.float32) == torch.float16
    if half and not getattr(optimizer, "use_combined_accum", False):
        return enums.MeanReductionStrategy.Running
    return enums.MeanReductionStrategy.Post


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of an optimiser that must not change after the model is compiled.

    Attributes:
        type: The optimiser class whose arithmetic the device runs.
        groups: For each parameter group, the ``id`` of its parameters and the names of its state
            tensors.
        built_in: Further attributes of the optimiser that affect how the weight update is computed.
    """

    type: type
    groups: tuple[tuple[Any, ...], ...]
    built_in: tuple[Any, ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Layout:
        """Return the ``Layout`` (the fixed properties) of a user's optimiser."""
        kind = kind_of(optimizer)
        groups = tuple(
            (tuple(map(id, group["params"])), *(key for key in kind.state if is_kept(key, group)))
            for group in optimizer.param_groups
        )
        return cls(kind.type, groups, tuple(getattr(optimizer, n, None) for n in _BUILT_IN))

    def trains_as(self, other: Layout) -> bool:
        """Tell whether two optimisers have the same parameters in the same order.

        The two optimisers may divide the parameters into different parameter groups.
        """
        own, others = ([i for ids, *_ in one.groups for i in ids] for one in (self, other))
        return own == others


class OptimizerRules:
    """A check that the program changes only optimiser settings that may change after compiling.

    Args:
        relaxed: Whether warnings about settings are logged only at the debug level.
        automatic_loss_scaling: Whether the loss scaling is adapted automatically.
    """

    def __init__(self, *, relaxed: bool, automatic_loss_scaling: bool = False) -> None:
        self._automatic_loss_scaling = automatic_loss_scaling
        self._level = logging.DEBUG if relaxed else logging.WARNING
        self._known: dict[str, set[str]] = {}
        self._said: set[str] = set()
        self._constants: dict[str, Any] = {}
        self._values: dict[str, Any] | None = None
        self._ignored: list[Any] | None = None

    def accept(self, optimizer: torch.optim.Optimizer, *, compiled: bool) -> bool:
        """Check and store the optimiser's settings, and return whether a setting has changed.

        Args:
            optimizer: The user's optimiser.
            compiled: Whether the model has already been compiled.

        Raises:
            Error: A setting of the optimiser that is constant has changed since the model was
                compiled.
        """
        if self._automatic_loss_scaling and isinstance(optimizer, optim.Optimizer):
            optimizer.variable_attrs.markAsVariable("loss_scaling")
        self._look_for_unexpected(optimizer)
        self._look_for_ignored(optimizer)
        if self._values is None:
            self._look_for_idle(optimizer)
        values = _settings(optimizer)
        if compiled and self._values is not None:
            for name, value in self._constants.items():
                if name in values and values[name] != value and not _is_marked(optimizer, name):
                    raise Error(
                        f"The setting {name} of {type(optimizer).__name__} was the constant "
                        f"{value} when the model was compiled, and is now {values[name]}. To make "
                        f"the setting variable, {_how_to_vary(optimizer, name)}"
                    )
        else:
            self.settle(optimizer)
        changed = values != self._values
        self._values = values
        return changed

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the present values of the optimiser settings that must not change after compiling.

        A PopTorch optimiser stores which of its settings may change after compiling (variable
        settings). In a torch optimiser, the learning rate may change after compiling. Any other
        setting that has torch's default value is constant.
        """
        self._constants = {
            name: value
            for name, value in _settings(optimizer).items()
            if not _is_variable(optimizer, name)
        }

    def _look_for_unexpected(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        attributes = {
            "optimizer attribute": set(vars(optimizer)) - _HOOK_ATTRIBUTES,
            "default group variable": set(optimizer.defaults),
        }
        for index, group in enumerate(optimizer.param_groups):
            attributes[f"group {index} attribute"] = set(group) - _SCHEDULER_ENTRIES
        for what, present in attributes.items():
            allowed = self._known.get(what)
            if allowed is None:
                self._known[what] = present
                continue
            unexpected = sorted(present - allowed)
            if unexpected:
                self._say(f"Ignoring unexpected {what} in {kind} optimizer: {unexpected}")

    def _look_for_ignored(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if ``velocity_scaling`` has changed, but the chosen variant of SGD ignores it.

        The optimiser's constructor has already warned about the first value of
        ``velocity_scaling``.
        """
        ignored = [
            group.get("velocity_scaling")
            for group in optimizer.param_groups
            if not _scales_velocity(optimizer)
        ]
        if self._ignored not in (None, ignored):
            self._say(optim.VELOCITY_SCALING_IGNORED)
        self._ignored = ignored

    def _look_for_idle(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn about arguments that only choose torch's implementation on the host."""
        groups = optimizer.param_groups
        found = [name for name in _SWITCHES_OF_TORCH if any(group.get(name) for group in groups)]
        if found:
            self._say(
                f"{type(optimizer).__name__} got arguments without effect ({', '.join(found)}): "
                "the device has its own implementation of the weight update"
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(self._level, text)


# The attributes that torch's learning-rate schedulers add to an optimiser.
_HOOK_ATTRIBUTES: Final = {"step", "_step_count", "_opt_called", "_step_supports_amp_scaling"}
# The entries that torch's schedulers store in parameter groups for their own use. Optimisers do not
# read the entries that schedulers store.
_SCHEDULER_ENTRIES: Final = {
    *("initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("base_momentum", "max_momentum"),
}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimiser settings that the device uses, with keys such as ``lr of group 0``."""
    names = kind_of(optimizer).settings
    if _scales_velocity(optimizer):
        names = (*names, "velocity_scaling")
    values = {
        f"{name} of group {index}": group[name]
        for index, group in enumerate(optimizer.param_groups)
        for name in names
        if name in group
    }
    values.update({name: getattr(optimizer, name) for name in _GLOBAL if hasattr(optimizer, name)})
    return values


def _scales_velocity(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the optimiser is the variant of SGD that uses ``velocity_scaling``."""
    return bool(getattr(optimizer, "use_combined_accum", False))


def _is_marked(optimizer: torch.optim.Optimizer, setting: str) -> bool:
    """Tell whether the program marked a PopTorch optimiser's setting as variable."""
    attributes = getattr(optimizer, "variable_attrs", None)
    return attributes is not None and setting.split(" of ")[0] in attributes._variable_attributes


def _how_to_vary(optimizer: torch.optim.Optimizer, setting: str) -> str:
    """Return advice on how a program can allow changes of an optimiser setting."""
    name = setting.split(" of ")[0]
    cycled = any("max_momentum" in group for group in optimizer.param_groups)
    scheduler = ", or make the scheduler with cycle_momentum=False" if cycled else ""
    if hasattr(optimizer, "variable_attrs"):
        return (
            f"pass {name} to the constructor of the optimizer, or call "
            f"optimizer.variable_attrs.markAsVariable({name!r}) before the model is "
            f"compiled{scheduler}"
        )
    kind = kind_of(optimizer).type.__name__
    return (
        f"use poptorch.optim.{kind} and pass {name} to its constructor, or pass a {name} to "
        f"torch.optim.{kind} that is not the default value{scheduler}"
    )


def _is_variable(optimizer: torch.optim.Optimizer, setting: str) -> bool:
    """Tell whether a setting of the optimiser may change after the model is compiled."""
    if hasattr(optimizer, "variable_attrs"):
        return _is_marked(optimizer, setting)
    name = setting.split(" of ")[0]
    if name == "lr":
        return True
    default = inspect.signature(kind_of(optimizer).type).parameters.get(name)
    if default is None:
        return True
    return any(group.get(name) != default.default for group in optimizer.param_groups)
