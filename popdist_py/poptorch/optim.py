"""The optimisers of the PopTorch API: torch's, with what the device adds.

These objects hold a program's settings; the update itself runs on the device's copy of the weights
(``update/device_optimizer.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from popdist_py.poptorch import layerwise, old_spellings
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.optimizer import Optimizer, VariableAttributes

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

Params = Iterable[Any]
# Which argument is the format of each state tensor of Adam and its kin.
_MOMENTS: Final = {
    "Accl1": "first_order_momentum_accum_type",
    "Accl2": "second_order_momentum_accum_type",
}
_MOMENT_TYPES: Final = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}

# Said when it is given, and when it changes later.
VELOCITY_SCALING_IGNORED: Final = (
    "velocity_scaling is ignored: it only applies with use_combined_accum=True"
)

_VELOCITY_SCALING_IDLE: Final = (
    "velocity_scaling has no effect here: on hardware it changes how a half velocity is rounded; "
    "here the velocity is kept unscaled"
)


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with torch.optim.SGD's arithmetic.

    Args:
        loss_scaling: factor on the loss before, and divisor of the gradients after the backward.
        velocity_scaling: factor on the velocity of the combined accumulator. It has no effect here.
        use_combined_accum: let velocity and gradient accumulator share one tensor.
        accum_type: float32 or float16, the format of the gradient accumulator.
        velocity_accum_type: the same for the velocity.
        max_grad_norm: the gradients' global 2-norm is clipped to this.
    """

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    _own_per_group = ("velocity_scaling",)
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = {"Accl1": "velocity_accum_type"}  # noqa: RUF012

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(torch.optim.SGD, locals())
        default = self._own["velocity_scaling"]
        is_given = velocity_scaling is not None or any(
            group["velocity_scaling"] != default for group in self.param_groups
        )
        if is_given:
            logger.warning(
                _VELOCITY_SCALING_IDLE if use_combined_accum else VELOCITY_SCALING_IGNORED
            )


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with torch.optim.Adam's arithmetic; the extra arguments are those of SGD."""

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES, "max_grad_norm": math.inf}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.Adam()")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(torch.optim.Adam, locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, with torch.optim.AdamW's arithmetic.

    Args:
        bias_correction: False leaves out the correction of the moments, which begin at zero. This
            has an effect on the device only: ``step()`` on the CPU is torch's, and corrects.
    """

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **_MOMENT_TYPES,
        "max_grad_norm": math.inf,
    }
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.AdamW()")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(torch.optim.AdamW, locals())


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, with torch.optim.RMSprop's arithmetic or TensorFlow's.

    Args:
        use_tf_variant: the mean square starts at ones, eps is inside the root, and the learning
            rate is folded into the momentum buffer.
    """

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES, "use_tf_variant": False}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = {  # noqa: RUF012
        "Accl1": "second_order_momentum_accum_type",
        "Accl2": "first_order_momentum_accum_type",
        "Accl3": "first_order_momentum_accum_type",
    }

    @old_spellings.takes("poptorch.optim.RMSprop()")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._begin(torch.optim.RMSprop, locals())


class LAMB(Optimizer, layerwise.LAMB):
    """Layer-wise adaptive moments; ``step()`` also works on the CPU, as a reference.

    The update is ``m / (sqrt(v) + eps) + weight_decay * w`` with bias-corrected moments m and v;
    the trust ratio is ``min(|w|, max_weight_norm) / |update|``, or 1 where either is 0.
    """

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.LAMB()")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        self._begin(layerwise.LAMB, locals())


class LARS(Optimizer, layerwise.LARS):
    """SGD with layer-wise adaptive rates; ``step()`` also works on the CPU, as a reference.

    For a parameter w with gradient g and velocity v, which starts at 0::

        trust = eeta * |w| / (|g| + weight_decay * |w| + epsilon), or 1 where |w| or |g| is 0
        v = momentum * v + trust * lr * (g + weight_decay * w)
        w = w - v

    The norms are of whole parameters, and of gradients without loss scaling. The learning rate is
    inside the velocity, so a new one counts from then on; in torch's SGD it is outside. This is
    algorithm 1 of You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    2017; epsilon and what holds at norms of 0 are those of MLPerf's ResNet-50 (LARSOptimizer).
    PopTorch has no LARS.

    Args:
        eeta: the trust coefficient.
        epsilon: added to the divisor.
        adapt: False lets trust be 1. Norms and biases usually have a parameter group with
            ``{"adapt": False, "weight_decay": 0.0}``.
        loss_scaling, accum_type, velocity_accum_type, max_grad_norm: as for SGD.

    Raises:
        ValueError: a number is below 0.
    """

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = {"Accl1": "velocity_accum_type"}  # noqa: RUF012

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        weight_decay: float | None = None,
        eeta: float | None = None,
        epsilon: float | None = None,
        adapt: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(layerwise.LARS, locals())


if not TYPE_CHECKING:  # a type checker goes on finding names that do not exist
    __getattr__ = old_spellings.module_names("poptorch.optim", __name__)
