"""The optimiser on the device: torch's own update over the device's copy of the weights.

Settings come from the user's optimiser; which of torch's implementations runs is decided here, and
so are the names of the state that programs read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from popdist_py.poptorch import optim
from popdist_py.poptorch.update.rounding import stochastic_half
from popdist_py.poptorch.update.tf_rmsprop import TensorFlowRMSprop

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
        f"Unsupported optimizer type {type(source)}: expected SGD, Adam, AdamW, RMSprop or LAMB"
    )


@dataclass(frozen=True, slots=True)
class _Shadow:
    """A half parameter and the float32 tensor in which its update is computed."""

    half: torch.Tensor
    single: torch.Tensor


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
        self._stochastic = stochastic_rounding
        self._names = {id(parameter): name for name, parameter in names.items()}
        self._shadows: list[_Shadow] = []
        self._groups = parameter_groups(source, device_of, names)
        self.parameters = [parameter for group in self._groups for parameter in group]
        groups = [
            {"params": [t for p in used for t in self._updated(p)], **self._settings(group)}
            for used, group in zip(self._groups, source.param_groups, strict=True)
        ]
        self._optimizer = _make(self._kind.type, groups, source)
        self.sync(source)

    def _updated(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the tensors that torch's optimiser updates for a device parameter."""
        if parameter.dtype != torch.float16:
            return [parameter]
        single = parameter.detach().float().requires_grad_()
        self._shadows.append(_Shadow(parameter, single))
        self._names[id(single)] = self._names[id(parameter)]
        return [single]

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._kind.settings if name in group}

    def sync(self, source: torch.optim.Optimizer) -> None:
        """Take the present settings of the user's optimiser."""
        for mine, theirs in zip(self._optimizer.param_groups, source.param_groups, strict=True):
            mine.update(self._settings(theirs))
        self.loss_scaling = float(getattr(source, "loss_scaling", 1.0))
        self.max_grad_norm = float(getattr(source, "max_grad_norm", float("inf")))

    @torch.no_grad()
    def step(self, loss_scale: float) -> None:
        """Update the parameters from their ``grad``, which is ``loss_scale`` times too large."""
        for shadow in self._shadows:
            shadow.single.copy_(shadow.half)
            shadow.single.grad = (
                None if shadow.half.grad is None else shadow.half.grad.to(torch.float32)
            )
        self._update(loss_scale)
        for shadow in self._shadows:
            single = shadow.single
            shadow.half.copy_(stochastic_half(single) if self._stochastic else single)

    def _update(self, loss_scale: float) -> None:
        updated = self._all()
        gradients = [p.grad for p in updated if p.grad is not None]
        if loss_scale != 1.0:
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
        """Return copies of the state by the device's names, zeros where no step was made yet."""
        return {
            f"{prefix}___{self._names[id(parameter)]}": _state_value(
                self._optimizer.state[parameter].get(key), key, parameter
            )
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for key, prefix in self._kind.state.items()
            if is_kept(key, group)
        }

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
                    state["step"] = torch.zeros(())  # all of torch's but SGD count
                    for key in self._kind.state:
                        if is_kept(key, group):
                            state[key] = _state_value(None, key, parameter)
                for key, value in loaded.items():
                    shape = () if key == "step" else parameter.shape
                    dtype = torch.float32 if key == "step" else parameter.dtype
                    state[key] = value.to(dtype).reshape(shape)

    def parameter_tensors(self) -> dict[str, torch.Tensor]:
        """Return the settings by the device's names."""
        values = {"lossScaling_FLOAT": torch.tensor(self.loss_scaling)}
        for parameters, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            for parameter in parameters:
                name = self._names[id(parameter)]
                lr, decay = float(group["lr"]), float(group["weight_decay"])
                if self._kind.type is torch.optim.SGD:
                    rate = lr * (1 - float(group["dampening"]))
                    values[f"scaledLearningRate0___specific___{name}"] = torch.tensor(
                        rate / self.loss_scaling
                    )
                    values[f"weightDecayScaleFactor0___specific___{name}"] = torch.tensor(
                        1 - rate * decay
                    )
                else:
                    values[f"learningRate___specific___{name}"] = torch.tensor(lr)
                    values[f"weightDecay___specific___{name}"] = torch.tensor(decay)
        return values


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


def _state_value(value: Any, key: str, parameter: torch.Tensor) -> torch.Tensor:
    if value is None:
        return torch.zeros(()) if key == "step" else torch.zeros_like(parameter).detach()
    return torch.as_tensor(value, dtype=torch.float32 if key == "step" else None).clone()


def _make(
    kind: type, groups: list[dict[str, Any]], source: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Build torch's optimiser over device parameters in its fastest form."""
    if kind is optim.LAMB:
        return optim.LAMB(groups)
    if kind is torch.optim.RMSprop:
        if getattr(source, "use_tf_variant", False):
            return TensorFlowRMSprop(groups)
        return torch.optim.RMSprop(groups, foreach=True)
    return kind(groups, lr=1.0, fused=True)  # type: ignore[no-any-return]
