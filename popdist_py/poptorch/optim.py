"""The optimisers of the PopTorch API, which are subclasses of torch's optimisers.

Each optimiser in the module ``optim`` stores only the settings of the program. The module
``update/device_optimizer.py`` updates the weights on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from popdist_py.poptorch import lamb_and_lars, old_spellings
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.optimizer import Optimizer, VariableAttributes

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

Params = Iterable[Any]
# For each state tensor of Adam, AdamW and LAMB, the name of the argument that sets the tensor's
# dtype.
_MOMENTS: Final = {
    "Accl1": "first_order_momentum_accum_type",
    "Accl2": "second_order_momentum_accum_type",
}
_MOMENT_TYPES: Final = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}

# The text of the warning that is logged if a program sets or changes ``velocity_scaling``.
VELOCITY_SCALING_IGNORED: Final = (
    "The optimizer ignores velocity_scaling, which has an effect only with use_combined_accum=True"
)

_VELOCITY_SCALING_IDLE: Final = (
    "velocity_scaling has no effect on emulated IPUs, which store the velocity without scaling. "
    "On real IPUs, velocity_scaling changes how a float16 velocity is rounded"
)


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with the arithmetic of torch.optim.SGD.

    Args:
        loss_scaling: The factor that multiplies the loss before the backward pass and divides the
            gradients after it.
        velocity_scaling: On real IPUs, a factor on the velocity (momentum) if one tensor stores the
            velocity and the accumulated gradients. The emulation ignores ``velocity_scaling``.
        use_combined_accum: Whether one tensor stores the velocity and also the accumulated
            gradients.
        accum_type: The dtype of the gradient accumulator, float32 or float16.
        velocity_accum_type: The dtype of the velocity, float32 or float16.
        max_grad_norm: The maximum of the 2-norm of all gradients together. If the 2-norm of all
            gradients is larger than ``max_grad_norm``, the gradients are scaled down.
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
    """Adam, with the arithmetic of torch.optim.Adam.

    The docstring of the class SGD describes the arguments that torch.optim.Adam does not have.
    """

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
    """Adam with decoupled weight decay, with the arithmetic of torch.optim.AdamW.

    Args:
        bias_correction: Whether the device corrects the bias of the moments, which begin at zero.
            The method ``step()`` on the CPU is torch's method, and always corrects the bias of the
            moments.
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
    """RMSprop, with the arithmetic of torch.optim.RMSprop or of TensorFlow.

    Args:
        use_tf_variant: Whether to use TensorFlow's arithmetic of RMSprop instead of torch's. In
            TensorFlow's RMSprop, the mean square starts at ones, eps is inside the square root, and
            the momentum buffer includes the learning rate.
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


class LAMB(Optimizer, lamb_and_lars.LAMB):
    """Layer-wise adaptive moments (LAMB), whose method ``step()`` also works on the CPU.

    LAMB's update of a weight w is ``m / (sqrt(v) + eps) + weight_decay * w`` with bias-corrected
    moments m and v. LAMB multiplies the learning rate by the trust ratio. The trust ratio is
    ``min(|w|, max_weight_norm) / |update|``, or 1 if ``|w|`` or ``|update|`` is 0.
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
        self._begin(lamb_and_lars.LAMB, locals())


class LARS(Optimizer, lamb_and_lars.LARS):
    """SGD with layer-wise adaptive rates (LARS), whose ``step()`` also works on the CPU.

    LARS computes the following values for a parameter w with gradient g and velocity v, which
    starts at 0::

        trust = eeta * |w| / (|g| + weight_decay * |w| + epsilon), or 1 where |w| or |g| is 0
        v = momentum * v + trust * lr * (g + weight_decay * w)
        w = w - v

    In the formula of LARS, |w| and |g| are norms of a whole parameter and of its gradient without
    loss scaling. The velocity of LARS includes the learning rate, so a new learning rate affects
    only later gradients. In torch's SGD, the velocity does not include the learning rate.

    LARS is algorithm 1 of You, Gitman and Ginsburg, "Large Batch Training of Convolutional
    Networks", 2017. The argument ``epsilon`` and the rule for norms of 0 follow LARSOptimizer in
    MLPerf's ResNet-50. Graphcore's PopTorch does not have the optimiser LARS.

    Args:
        eeta: The trust coefficient in the formula of LARS.
        epsilon: The number that is added to the divisor in the formula for ``trust``.
        adapt: Whether to compute the factor ``trust`` for the parameters of the parameter group. If
            ``adapt`` is False, the factor ``trust`` is 1. The parameters of norm layers and the
            biases usually have their own parameter group with ``{"adapt": False, "weight_decay":
            0.0}``.
        loss_scaling, accum_type, velocity_accum_type, max_grad_norm: The same arguments as of the
            class ``SGD``.

    Raises:
        ValueError: A numeric setting of LARS is below 0.
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
        self._begin(lamb_and_lars.LARS, locals())


# Type checkers do not see the function ``__getattr__``, because they would then accept every
# unknown name of the module.
if not TYPE_CHECKING:
    __getattr__ = old_spellings.module_names("poptorch.optim", __name__)
