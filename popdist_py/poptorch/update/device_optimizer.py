"""The class DeviceOptimizer, which runs torch's optimisers on the device's copy of the weights.

DeviceOptimizer copies its settings, such as learning rates, from the user's optimiser. The module
``device_optimizer`` chooses torch's implementation of the weight update. The module also defines
the names of the optimiser's state tensors that programs read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Final

import torch

from popdist_py.errors import PopdistError
from popdist_py.poptorch import optim
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.optimizer_state import Rates
from popdist_py.poptorch.update import rates
from popdist_py.poptorch.update.half_weights import HalfWeights
from popdist_py.poptorch.update.tf_rmsprop import TensorFlowRMSprop
from popdist_py.poptorch.update.uncorrected_adamw import UncorrectedAdamW
from popdist_py.poptorch.weights.parameter_gradients import (
    clear_gradients,
    gradients_replaced,
    set_gradients,
)

__all__ = ["DeviceOptimizer", "Kind", "is_kept", "kind_of", "parameter_groups"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of an optimiser class that the device supports.

    Attributes:
        type: The class of the optimiser in torch, or in ``poptorch.optim`` if torch lacks the
            optimiser.
        settings: The names of those settings in a parameter group that affect the weight update,
            such as ``lr``.
        state: The device's name of each state tensor of the optimiser, keyed by torch's name of the
            state tensor.
        is_elementwise: Whether the update of each weight element is independent of all other
            elements.
    """

    type: type
    settings: tuple[str, ...]
    state: Mapping[str, str]
    is_elementwise: bool = True


_ADAM_STATE: Final = {"exp_avg": "Accl1", "exp_avg_sq": "Accl2", "step": "Step"}

# AdamW must come before Adam, because torch's AdamW is a subclass of Adam.
_KINDS: Final = (
    Kind(
        optim.LAMB,
        ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_weight_norm"),
        _ADAM_STATE,
        is_elementwise=False,
    ),
    Kind(
        optim.LARS,
        ("lr", "momentum", "weight_decay", "eeta", "epsilon", "adapt"),
        {"momentum_buffer": "Accl1"},
        is_elementwise=False,
    ),
    Kind(torch.optim.AdamW, ("lr", "betas", "eps", "weight_decay", "maximize"), _ADAM_STATE),
    Kind(torch.optim.Adam, ("lr", "betas", "eps", "weight_decay", "maximize"), _ADAM_STATE),
    Kind(
        torch.optim.SGD,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        {"momentum_buffer": "Accl1"},
    ),
    Kind(
        torch.optim.RMSprop,
        ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
        {"square_avg": "Accl1", "momentum_buffer": "Accl2", "grad_avg": "Accl3"},
    ),
)


def kind_of(source: torch.optim.Optimizer) -> Kind:
    """Return the element of ``_KINDS`` (supported optimiser classes) that fits a user's optimiser.

    Raises:
        AssertionError: The device does not support the optimiser.
    """
    for kind in _KINDS:
        if isinstance(source, kind.type):
            return kind
    raise AssertionError(
        f"Unsupported optimizer type {type(source)}: expected SGD, Adam, AdamW, RMSprop, LAMB or "
        "LARS"
    )


class DeviceOptimizer:
    """An optimiser that updates device parameters with the settings of the user's optimiser.

    Args:
        source: The user's optimiser.
        device_of: A function that returns the device parameters of a host parameter.
        names: The device parameters that an optimiser step updates, keyed by their names.
        stochastic_rounding: Whether updates of float16 parameters are rounded at random.

    Attributes:
        parameters: The device parameters that the optimiser updates, in the order of the parameter
            groups.
        max_grad_norm: The largest Euclidean norm of all gradients together, to which larger
            gradients are scaled down; infinity to disable this clipping.
        loss_scaling: The loss scaling on the device, a number that multiplies the loss.

    Raises:
        AssertionError: The device does not support the optimiser.
    """

    def __init__(
        self,
        source: torch.optim.Optimizer,
        device_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        names: Mapping[str, torch.Tensor],
        *,
        stochastic_rounding: bool = False,
    ) -> None:
        self._kind = kind_of(source)
        self._names = {id(parameter): name for name, parameter in names.items()}
        self._halves = HalfWeights(at_random=stochastic_rounding)
        self._groups = parameter_groups(source, device_of, names)
        self.parameters = [parameter for group in self._groups for parameter in group]
        self._targets = {id(p): self._updated(p) for p in self.parameters}
        groups = [
            {"params": [t for p in used for t in self._targets[id(p)]], **self._settings(group)}
            for used, group in zip(self._groups, source.param_groups, strict=True)
        ]
        self._optimizer = _make(self._kind.type, groups, source)
        # For each parameter group of torch's optimiser on the device, the index of the
        # corresponding parameter group of the user's optimiser.
        self._group_indices = list(range(len(groups)))
        # The rates (such as learning rates) that a program loaded and that differ from the rates of
        # the user's optimiser.
        self._loaded_rates: dict[str, torch.Tensor] = {}
        self._rates: Rates | None = None
        # Whether an instance was lost in the middle of a weight update, so that only some
        # parameters were updated.
        self._is_half_done = False
        self.sync(source)

    def _updated(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the tensors that torch's optimiser updates for a device parameter."""
        if parameter.dtype != torch.float16:
            return [parameter]
        single = self._halves.add(parameter)
        self._names[id(single)] = self._names[id(parameter)]
        return [single]

    @property
    def _is_sgd(self) -> bool:
        return self._kind.type is torch.optim.SGD

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._kind.settings if name in group}

    def sync(self, source: torch.optim.Optimizer) -> None:
        """Copy the present settings of the user's optimiser to the device's optimiser.

        If a rate (such as the learning rate) of the user's optimiser has changed since the last
        call, the user's rates replace all loaded rates.
        """
        self._present = [self._settings(group) for group in source.param_groups]
        self.max_grad_norm = float(getattr(source, "max_grad_norm", float("inf")))
        wanted = Rates.of(source)
        if wanted != self._rates:
            self._rates, self._loaded_rates = wanted, {}
            self.loss_scaling = wanted.loss_scaling
        self._set_groups()

    def _set_groups(self) -> None:
        """Apply the user's settings and the loaded rates to the device's parameter groups.

        If the parameters of one parameter group have different loaded rates (such as learning
        rates), the parameter group is divided into several groups of torch's optimiser.
        """
        groups = self._optimizer.param_groups
        if not self._loaded_rates and len(groups) == len(self._present):
            for mine, settings in zip(groups, self._present, strict=True):
                mine.update(settings)
            return
        like = dict(zip(self._group_indices, groups, strict=True))
        divided: list[dict[str, Any]] = []
        self._group_indices = []
        for index, (parameters, settings) in enumerate(
            zip(self._groups, self._present, strict=True)
        ):
            targets: dict[tuple[Any, Any], list[torch.Tensor]] = {}
            for parameter in parameters:
                own = rates.of_parameter(self._names[id(parameter)], self._loaded_rates)
                given = rates.given(settings, own, self.loss_scaling, is_sgd=self._is_sgd)
                targets.setdefault(given, []).extend(self._targets[id(parameter)])
            if not targets:  # Parameter groups without trained parameters are kept too.
                targets[settings["lr"], settings["weight_decay"]] = []
            for (lr, decay), tensors in targets.items():
                rest = {"lr": lr, "weight_decay": decay, "params": tensors}
                divided.append({**like[index], **settings, **rest})
                self._group_indices.append(index)
        self._optimizer.param_groups = divided

    @torch.no_grad()
    def step(self, loss_scale: float) -> None:
        """Update the parameters with the gradients in their attributes ``grad``.

        Args:
            loss_scale: The factor that multiplied the loss in the backward passes. The weight
                update divides the gradients by ``loss_scale``.
        """
        if not self._halves:
            self._update(loss_scale)
            return
        each_alone = self.max_grad_norm == float("inf")
        self._halves.begin_step(self._optimizer, loss_scale, each_alone=each_alone)
        self._update(loss_scale)
        self._halves.end_step()

    @property
    def updates_each_alone(self) -> bool:
        """Whether a parameter can be updated before other parameters' gradients are summed."""
        return not self._halves and self.max_grad_norm == float("inf")

    def step_in_parts(self, loss_scale: float, parts: Iterable[Sequence[torch.Tensor]]) -> None:
        """Update some parameters after the others; ``updates_each_alone`` must be True.

        Args:
            loss_scale: The factor that multiplied the loss in the backward passes. The weight
                update divides the gradients by ``loss_scale``.
            parts: An iterable that yields lists of parameters as soon as their gradients are summed
                over all instances. While the parameters of one list are updated, the gradients of
                later lists may still be incomplete.
        """
        remaining = iter(parts)
        # The gradients of all parameters are needed until ``parts`` yields the first list of
        # parameters.
        first = next(remaining, ())
        # Torch's optimiser updates each parameter that has a gradient. Therefore only the
        # parameters of the present list have gradients while they are updated.
        no_gradients = [None] * len(self.parameters)
        try:
            with gradients_replaced(self.parameters, no_gradients) as gradients:
                gradient_of = dict(zip(map(id, self.parameters), gradients, strict=True))
                for part in chain([first], remaining):
                    ready = [parameter for parameter in part if id(parameter) in gradient_of]
                    set_gradients(ready, [gradient_of[id(parameter)] for parameter in ready])
                    self._update(loss_scale)
                    clear_gradients(ready)
        except PopdistError:
            self._is_half_done = True
            raise

    def check_whole(self) -> None:
        """Check that all weights and state tensors belong to the same optimiser step.

        Raises:
            Error: An instance was lost during a weight update.
        """
        if self._is_half_done:
            raise Error(
                "Another instance was lost during the weight update, so that only some of the "
                "weights were updated. Continue the training from the last checkpoint"
            )

    def _update(self, loss_scale: float) -> None:
        if loss_scale != 1.0:
            gradients = [p.grad for p in self._all() if p.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, loss_scale)
        if self.max_grad_norm != float("inf"):
            self._clip(self._all())
        self._optimizer.step()

    def _clip(self, updated: Sequence[torch.Tensor]) -> None:
        """Scale all gradients so that their Euclidean norm is at most ``max_grad_norm``."""
        torch.nn.utils.clip_grad_norm_(updated, self.max_grad_norm)

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    # -- methods for the state tensors that programs can read and write -----------------------

    def state_tensors(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """Return copies of the optimiser's state tensors, keyed by their names on the device.

        Before the first optimiser step, the state tensors contain the initial values, usually
        zeros.

        Args:
            copied: Whether the tensors are copies. With False, the tensors may share the memory of
                the optimiser, which the next optimiser step changes.

        Raises:
            Error: An instance was lost during a weight update.
        """
        self.check_whole()
        return {
            f"{prefix}___{self._names[id(parameter)]}": self._state_value(
                self._optimizer.state[parameter].get(key), key, parameter, copied=copied
            )
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for key, prefix in self._kind.state.items()
            if is_kept(key, group)
        }

    def check_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that loaded state tensors fit the parameters of the optimiser.

        Raises:
            Error: None of the state tensors belongs to this optimiser, or a state tensor has a
                wrong shape.
        """
        shapes = {
            f"{prefix}___{self._names[id(parameter)]}": () if key == "step" else parameter.shape
            for parameter in self.parameters
            for key, prefix in self._kind.state.items()
        }
        if tensors and not shapes.keys() & tensors.keys():
            raise Error(
                "The loaded optimizer state belongs to another model: it contains "
                f"{_some(tensors)}, but the optimizer of this model has {_some(shapes)}. Load the "
                "optimizer state that was saved with this model"
            )
        for name, shape in shapes.items():
            if name in tensors and tensors[name].numel() != prod(shape):
                raise Error(
                    f"The tensor {name} of the loaded optimizer state has the shape "
                    f"{list(tensors[name].shape)}: expected the shape {list(shape)}. Load the "
                    "optimizer state that was saved with this model"
                )

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state tensors in ``tensors``, and do not change other state tensors."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                loaded = {
                    key: tensors[f"{prefix}___{name}"].clone()
                    for key, prefix in self._kind.state.items()
                    if f"{prefix}___{name}" in tensors and is_kept(key, group)
                }
                state = self._optimizer.state[parameter]
                if not state:
                    # All optimiser classes except SGD and LARS count their steps.
                    state["step"] = torch.zeros(())
                    for key in self._kind.state:
                        if is_kept(key, group):
                            state[key] = self._state_value(None, key, parameter)
                for key, value in loaded.items():
                    shape = () if key == "step" else parameter.shape
                    dtype = torch.float32 if key == "step" else parameter.dtype
                    # The state tensors must be contiguous, because torch's fused updates ignore
                    # strides.
                    state[key] = value.to(dtype).reshape(shape).contiguous()

    def _state_value(
        self, value: Any, key: str, parameter: torch.Tensor, *, copied: bool = True
    ) -> torch.Tensor:
        """Return a state tensor, or the initial state tensor if ``value`` is None."""
        if value is None:
            return torch.full(
                () if key == "step" else parameter.shape,
                self._first_value(key),
                dtype=torch.float32 if key == "step" else parameter.dtype,
            )
        tensor = torch.as_tensor(value, dtype=torch.float32 if key == "step" else None)
        return tensor.clone() if copied else tensor

    def _first_value(self, key: str) -> float:
        """Return the number to which all elements of a state tensor are initialised."""
        is_tensorflows = isinstance(self._optimizer, TensorFlowRMSprop)
        return TensorFlowRMSprop.FIRST_SQUARE if is_tensorflows and key == "square_avg" else 0.0

    def parameter_tensors(
        self, source: torch.optim.Optimizer | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the loss scaling, the learning rates and the weight decays of all parameters.

        The keys of the result are the device's names of the loss scaling, the learning rates and
        the weight decays, which ``rates.name_of`` makes.

        Args:
            source: The user's optimiser. If the learning rates or weight decays of ``source`` have
                changed since the last ``sync()``, the new rates are returned. If ``source`` is
                None, the device's learning rates and weight decays are returned.
        """
        groups, loss_scaling, loaded = self._present, self.loss_scaling, self._loaded_rates
        if source is not None and (wanted := Rates.of(source)) != self._rates:
            groups = [self._settings(group) for group in source.param_groups]
            loss_scaling, loaded = wanted.loss_scaling, {}
        values = {rates.LOSS_SCALING: torch.tensor(loss_scaling)}
        for parameters, group in zip(self._groups, groups, strict=True):
            of_group = rates.device_rates(group, loss_scaling, is_sgd=self._is_sgd)
            for parameter in parameters:
                for key, value in of_group.items():
                    values[rates.name_of(key, self._names[id(parameter)])] = value.clone()
        return {**values, **loaded}

    def loaded_rates(self) -> dict[str, torch.Tensor]:
        """Return the loaded rates (such as learning rates) that are still in use."""
        return dict(self._loaded_rates)

    def load_parameter_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the learning rates and weight decays in ``tensors``, and reset all others."""
        assert self._rates is not None
        self._loaded_rates = {}
        self.loss_scaling = self._rates.loss_scaling
        # The loss scaling is loaded first, because the learning rates that the device stores depend
        # on the loss scaling.
        self._take_rate(rates.LOSS_SCALING, torch.tensor(self.loss_scaling), tensors)
        if rates.LOSS_SCALING in self._loaded_rates:
            self.loss_scaling = float(self._loaded_rates[rates.LOSS_SCALING])
        for name, value in self.parameter_tensors().items():
            self._take_rate(name, value, tensors)
        self._set_groups()

    def _take_rate(
        self, name: str, present: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Load one learning rate or weight decay, unless it equals the present number in float32.

        If a loaded rate (such as a learning rate) equals the present rate in float32, the present
        rate is kept, because it may be more precise than float32.
        """
        loaded = tensors.get(name)
        if loaded is not None and float(loaded.to(torch.float32)) != float(present):
            self._loaded_rates[name] = loaded.detach().to(torch.float32, copy=True).reshape(())


def _some(names: Iterable[str]) -> str:
    """Return a text with the first three of ``names`` and the count of all names."""
    every = sorted(names)
    return f"{', '.join(every[:3])}{', ...' if len(every) > 3 else ''} ({len(every)} in all)"


def parameter_groups(
    source: torch.optim.Optimizer,
    device_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    names: Mapping[str, torch.Tensor],
) -> list[list[torch.Tensor]]:
    """Return the device parameters that each parameter group of the user's optimiser updates.

    Args:
        source: The user's optimiser.
        device_of: A function that returns the device parameters of a host parameter.
        names: The device parameters that an optimiser step updates, keyed by their names.
    """
    used = {id(parameter) for parameter in names.values()}
    return [
        [p for host in group["params"] for p in device_of(host) if id(p) in used]
        for group in source.param_groups
    ]


def is_kept(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether a parameter group with the settings ``group`` needs the state tensor ``key``."""
    if key == "momentum_buffer":
        return float(group.get("momentum", 0)) != 0
    return key != "grad_avg" or bool(group.get("centered"))


def _make(
    kind: type, groups: list[dict[str, Any]], source: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Return an optimiser for device parameters that uses torch's fastest implementation."""
    if kind in (optim.LAMB, optim.LARS):
        return kind(groups, lr=1.0)
    if kind is torch.optim.RMSprop:
        if getattr(source, "use_tf_variant", False):
            return TensorFlowRMSprop(groups)
        return torch.optim.RMSprop(groups, foreach=True)
    if kind is torch.optim.AdamW and not getattr(source, "bias_correction", True):
        return UncorrectedAdamW(groups)
    return kind(groups, lr=1.0, fused=True)  # type: ignore[no-any-return]
