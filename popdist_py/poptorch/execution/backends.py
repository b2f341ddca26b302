"""The replica back ends: which there are, which models each can run, and how each is made.

To add a back end, write a class that runs replicas and add a row here.
``compilation/backend_choice.py`` chooses among the rows without knowing their names. A new value of
``replicaExecution`` is also added to the setter in ``options/groups.py``. The first row defines the
result: results of other rows are compared with it when a model is first compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.device_context import Mode
from popdist_py.poptorch.execution.graph_replicas import GraphReplicas
from popdist_py.poptorch.execution.modes import MixedPrecision
from popdist_py.poptorch.execution.replicas import (
    DeviceModel,
    FusedReplicas,
    LoopReplicas,
    Replicas,
)
from popdist_py.poptorch.group_norms.batch_norm import GroupNorms

__all__ = ["BACKENDS", "Backend"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One row of the registry.

    Attributes:
        name: what an executable remembers.
        option: the value of ``replicaExecution`` that asks for it; None if only "auto" finds it.
            Of the rows with the same value, the first that agrees with the reference counts.
        can_run: returns why it cannot run a model, or None.
        by_rule: whether it is taken untimed where the time must not decide; of several, the last.
        make: returns what runs a model's replicas, from the model, arguments of a call, and a
            combined micro-batch of each input. Whatever it raises is a reason not to take it.
    """

    name: str
    option: str | None = None
    by_rule: bool = False
    can_run: Callable[[DeviceModel], str | None]
    make: Callable[[DeviceModel, Call, Sequence[torch.Tensor]], Replicas]


def _always(_: DeviceModel) -> None:
    """Every model runs as it is written."""


def _why_not_captured(model: DeviceModel) -> str | None:
    if any(_kind(mode) not in (MixedPrecision, GroupNorms) for mode in model.context.modes):
        return "a captured graph knows nothing of the modes that the model runs in"
    if model.training and not model.first_forward.loss_has_gradient:
        return "no parameter leads to the loss"
    return model.only_loop


def _kind(mode: Mode) -> Any:
    """Return what makes a mode, without its arguments."""
    return mode.func if isinstance(mode, partial) else mode


def _why_not_captured_alone(model: DeviceModel) -> str | None:
    if model.norm_groups is not None and model.batching.replicas > 1:
        return "batch norms of several local replicas wait for one another"
    return _why_not_captured(model)


def _why_not_fused(model: DeviceModel) -> str | None:
    if model.batching.replicas == 1:
        return "there is one replica only"
    return model.only_loop


def _why_not_fused_and_captured(model: DeviceModel) -> str | None:
    if model.first_forward.is_random:
        return "random numbers of one pass over all replicas need Python: each has its own stream"
    return _why_not_fused(model) or _why_not_captured(model)


BACKENDS: Final[tuple[Backend, ...]] = (
    Backend(
        name="loop",
        option="loop",
        can_run=_always,
        make=lambda model, *_: LoopReplicas(model),
    ),
    Backend(
        name="graph",
        by_rule=True,
        can_run=_why_not_captured_alone,
        make=partial(GraphReplicas, vectorised=False),
    ),
    Backend(
        name="fused graph",
        option="fused",
        by_rule=True,
        can_run=_why_not_fused_and_captured,
        make=partial(GraphReplicas, vectorised=True),
    ),
    Backend(
        name="fused",
        option="fused",
        can_run=_why_not_fused,
        make=lambda model, *_: FusedReplicas(model),
    ),
)
