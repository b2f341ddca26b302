"""The optimiser on the device: torch's own update over the device's copy of the weights.

Settings come from the user's optimiser; which of torch's implementations runs is decided here, and
so are the names of the state that programs read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

__all__ = ["DeviceOptimizer", "Kind", "is_kept", "kind_of", "parameter_groups"]


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimiser that the device knows.

    Attributes:
        type: torch's class, or ours where torch has none.
        settings: names of its settings that count for a group.
        state: the device's name of each state tensor, by torch's.
        is_elementwise: whether no element's update depends on another element.
    """

    type: type
    settings: tuple[str, ...]
    state: Mapping[str, str]
    is_elementwise: bool = True


_ADAM_STATE: Final = {"exp_avg": "Accl1", "exp_avg_sq": "Accl2", "step": "Step"}

# AdamW derives from Adam in torch, so it comes first.
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
    """Return which of the known optimisers ``source`` is.

    Raises:
        AssertionError: none of them.
    """
    for kind in _KINDS:
        if isinstance(source, kind.type):
            return kind
    raise AssertionError(
        f"Unsupported optimizer type {type(source)}: expected SGD, Adam, AdamW, RMSprop, LAMB or "
        "LARS"
    )


class DeviceOptimizer:
    """Runs the update of the user's optimiser on device parameters.

    Args:
        source: the user's optimiser.
        device_of: the device parameters of a host parameter.
        names: the device parameters that a step updates, by name.
        stochastic_rounding: round updates of half parameters at random.

    Raises:
        AssertionError: an optimiser that the device does not know.
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
        self._group_indices = list(range(len(groups)))  # of the program's, for each of torch's
        # Rates that a program loaded and that differ from those that its settings make.
        self._loaded_rates: dict[str, torch.Tensor] = {}
        self._rates: Rates | None = None
        # Whether an instance was lost while some parameters were updated and others were not.
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
        """Take the present settings of the user's optimiser; new rates replace loaded ones."""
        self._present = [self._settings(group) for group in source.param_groups]
        self.max_grad_norm = float(getattr(source, "max_grad_norm", float("inf")))
        wanted = Rates.of(source)
        if wanted != self._rates:
            self._rates, self._loaded_rates = wanted, {}
            self.loss_scaling = wanted.loss_scaling
        self._set_groups()

    def _set_groups(self) -> None:
        """Give torch's groups their settings; loaded rates may divide a group."""
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
            if not targets:  # a group that the program keeps for parameters that are not trained
                targets[settings["lr"], settings["weight_decay"]] = []
            for (lr, decay), tensors in targets.items():
                rest = {"lr": lr, "weight_decay": decay, "params": tensors}
                divided.append({**like[index], **settings, **rest})
                self._group_indices.append(index)
        self._optimizer.param_groups = divided

    @torch.no_grad()
    def step(self, loss_scale: float) -> None:
        """Update the parameters from their ``grad``, which is ``loss_scale`` times too large."""
        each_alone = self.max_grad_norm == float("inf")
        self._halves.begin_step(self._optimizer, loss_scale, each_alone=each_alone)
        self._update(loss_scale)
        self._halves.end_step()

    @property
    def updates_each_alone(self) -> bool:
        """Whether a parameter's update depends on no other parameter's gradient."""
        return not self._halves and self.max_grad_norm == float("inf")

    def step_in_parts(self, loss_scale: float, parts: Iterable[Sequence[torch.Tensor]]) -> None:
        """Do as ``step``, some parameters at a time; only if ``updates_each_alone``.

        Args:
            loss_scale: as for ``step``.
            parts: parameters whose gradients are there; while some are updated, those of others may
                be on their way.
        """
        gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        try:
            for part in parts:
                if not gradients:  # the first part: all parameters have their gradients' memory
                    gradients = [(p, p.grad) for p in self.parameters]
                    for parameter in self.parameters:
                        parameter.grad = None
                own = {id(parameter) for parameter in part}
                ready = [(p, gradient) for p, gradient in gradients if id(p) in own]
                for parameter, gradient in ready:
                    parameter.grad = gradient
                self._update(loss_scale)
                for parameter, _ in ready:
                    parameter.grad = None
        except PopdistError:
            self._is_half_done = bool(gradients)
            raise
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def check_whole(self) -> None:
        """Check that weights and state are those of one step.

        Raises:
            Error: an instance was lost during an update.
        """
        if self._is_half_done:
            raise Error(
                "Another instance was lost while the weights were updated: some are those of this "
                "step, some of the one before. Go on from the last checkpoint"
            )

    def _update(self, loss_scale: float) -> None:
        updated = self._all()
        gradients = [p.grad for p in updated if p.grad is not None]
        if gradients and loss_scale != 1.0:
            torch._foreach_div_(gradients, loss_scale)
        if self.max_grad_norm != float("inf"):
            self._clip(updated)
        self._optimizer.step()

    def _clip(self, updated: Sequence[torch.Tensor]) -> None:
        """Scale all gradients so that their Euclidean norm is at most ``max_grad_norm``."""
        torch.nn.utils.clip_grad_norm_(updated, self.max_grad_norm)

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    # -- state that programs see --------------------------------------------------------------

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the state by the device's names, as it begins where no step was made.

        Raises:
            Error: an instance was lost during an update.
        """
        self.check_whole()
        return {
            f"{prefix}___{self._names[id(parameter)]}": self._state_value(
                self._optimizer.state[parameter].get(key), key, parameter
            )
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for key, prefix in self._kind.state.items()
            if is_kept(key, group)
        }

    def check_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that state tensors are of these parameters.

        Raises:
            Error: none of them is, or one has another shape.
        """
        shapes = {
            f"{prefix}___{self._names[id(parameter)]}": () if key == "step" else parameter.shape
            for parameter in self.parameters
            for key, prefix in self._kind.state.items()
        }
        if tensors and not shapes.keys() & tensors.keys():
            raise Error(
                f"The loaded optimizer state is of another model: it has {_some(tensors)}, but "
                f"this model's optimizer has {_some(shapes)}. Load the state that was saved with "
                "this model"
            )
        for name, shape in shapes.items():
            if name in tensors and tensors[name].numel() != prod(shape):
                raise Error(
                    f"{name} of the loaded optimizer state has shape {list(tensors[name].shape)}: "
                    f"expected {list(shape)}. Load the state that was saved with this model"
                )

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the state tensors that ``tensors`` names; the others keep their values."""
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
                    state["step"] = torch.zeros(())  # all but SGD and LARS count
                    for key in self._kind.state:
                        if is_kept(key, group):
                            state[key] = self._state_value(None, key, parameter)
                for key, value in loaded.items():
                    shape = () if key == "step" else parameter.shape
                    dtype = torch.float32 if key == "step" else parameter.dtype
                    # Torch's fused updates look at no strides.
                    state[key] = value.to(dtype).reshape(shape).contiguous()

    def _state_value(self, value: Any, key: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of a state tensor; what it begins with if there is none yet."""
        if value is None:
            return torch.full(
                () if key == "step" else parameter.shape,
                self._first_value(key),
                dtype=torch.float32 if key == "step" else parameter.dtype,
            )
        return torch.as_tensor(value, dtype=torch.float32 if key == "step" else None).clone()

    def _first_value(self, key: str) -> float:
        """Return what the elements of a state tensor are before the first step."""
        is_tensorflows = isinstance(self._optimizer, TensorFlowRMSprop)
        return TensorFlowRMSprop.FIRST_SQUARE if is_tensorflows and key == "square_avg" else 0.0

    def parameter_tensors(
        self, source: torch.optim.Optimizer | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the settings by the device's names.

        Args:
            source: the user's optimiser, whose rates count where it has other ones than at its
                last sync(); None takes those of the device.
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
        """Return those of the settings that a program loaded and did not set since."""
        return dict(self._loaded_rates)

    def load_parameter_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the rates that ``tensors`` names; the others are those of the program's settings."""
        assert self._rates is not None
        self._loaded_rates = {}
        self.loss_scaling = self._rates.loss_scaling
        # First, because the other rates depend on it.
        self._take_rate(rates.LOSS_SCALING, torch.tensor(self.loss_scaling), tensors)
        if rates.LOSS_SCALING in self._loaded_rates:
            self.loss_scaling = float(self._loaded_rates[rates.LOSS_SCALING])
        for name, value in self.parameter_tensors().items():
            self._take_rate(name, value, tensors)
        self._set_groups()

    def _take_rate(
        self, name: str, present: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Take a loaded rate, unless the present one is the same: that one may be more precise."""
        loaded = tensors.get(name)
        if loaded is not None and float(loaded.to(torch.float32)) != float(present):
            self._loaded_rates[name] = loaded.detach().to(torch.float32, copy=True).reshape(())


def _some(names: Iterable[str]) -> str:
    """Return the first names, and how many there are."""
    every = sorted(names)
    return f"{', '.join(every[:3])}{', ...' if len(every) > 3 else ''} ({len(every)} in all)"


def parameter_groups(
    source: torch.optim.Optimizer,
    device_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    names: Mapping[str, torch.Tensor],
) -> list[list[torch.Tensor]]:
    """Return the device parameters that each group of the user's optimiser updates.

    Args:
        source: the user's optimiser.
        device_of: the device parameters of a host parameter.
        names: the device parameters that a step updates, by name.
    """
    used = {id(parameter) for parameter in names.values()}
    return [
        [p for host in group["params"] for p in device_of(host) if id(p) in used]
        for group in source.param_groups
    ]


def is_kept(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether an optimiser with these settings keeps the state tensor ``key``."""
    if key == "momentum_buffer":
        return float(group.get("momentum", 0)) != 0
    return key != "grad_avg" or bool(group.get("centered"))


def _make(
    kind: type, groups: list[dict[str, Any]], source: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Build torch's optimiser over device parameters in its fastest form."""
    if kind in (optim.LAMB, optim.LARS):
        return kind(groups, lr=1.0)
    if kind is torch.optim.RMSprop:
        if getattr(source, "use_tf_variant", False):
            return TensorFlowRMSprop(groups)
        return torch.optim.RMSprop(groups, foreach=True)
    if kind is torch.optim.AdamW and not getattr(source, "bias_correction", True):
        return UncorrectedAdamW(groups)
    return kind(groups, lr=1.0, fused=True)  # type: ignore[no-any-return]
