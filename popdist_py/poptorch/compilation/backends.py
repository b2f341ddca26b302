"""The replica back ends: which there are, and for which models each can run and is worthwhile.

To add a back end, write a class that runs replicas and add a row. A new value of
``replicaExecution`` is also added to the setter in ``options/groups.py``. The first row defines the
result: results of other rows are compared with it when a model is first compiled.

"auto" tries the rows from the last to the first, and takes the first one that is worthwhile and
agrees. No time is measured, so that a program takes the same back end in every run. The rule comes
from measured steps, here as parts of a step of the loop, on one thread of two cores:

=========================  =======  ==========  ===========  ==========
layers                     replicas  graph      fused graph  fused
=========================  =======  ==========  ===========  ==========
linear, CNN, transformer   1        0.64-0.94
linear, CNN, transformer   2        0.62-0.90   0.45-0.82
linear, CNN, transformer   8        0.60-0.88   0.22-0.81
the same with dropout      2        0.76-0.91                1.02-1.63
the same with dropout      8        0.67-0.92                0.68-1.15
LSTM, up to 4 samples      2        1.81-1.93   1.17-1.40
LSTM, up to 4 samples      4 to 16  2.20-3.08   0.45-0.98
LSTM, 16 samples           4 to 16  2.28-2.71   1.28-1.40
LSTM with dropout          4 to 16  2.17-3.23                0.40-0.91
GRU                        2 to 16  0.65-0.77   0.10-0.51
GRU with dropout           4 to 16  0.70-0.80                0.15-0.56
=========================  =======  ==========  ===========  ==========
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.device_context import Mode
from popdist_py.poptorch.execution.modes import MixedPrecision
from popdist_py.poptorch.execution.replica_graphs.graph_replicas import GraphReplicas
from popdist_py.poptorch.execution.replicas import (
    DeviceModel,
    FusedReplicas,
    LoopReplicas,
    Replicas,
)
from popdist_py.poptorch.group_norms.batch_norm import GroupNorms

__all__ = ["BACKENDS", "Backend"]

# A layer whose kernel no captured graph has.
_LSTM: Final = frozenset({"lstm"})
_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# With so many replicas and so few samples, one pass over all replicas is faster than the kernel.
_MANY_REPLICAS, _FEW_SAMPLES = 4, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One row of the registry.

    Attributes:
        name: what an executable remembers.
        option: the value of ``replicaExecution`` that asks for it; None if only "auto" finds it.
            Of the rows with the same value, the first that agrees with the reference counts.
        can_run: returns why it cannot run a model, or None.
        make: returns what runs a model's replicas, from the model, arguments of a call, and a
            combined micro-batch of each input. Whatever it raises is a reason not to take it.
        is_worthwhile: Tells whether "auto" tries it, from the model and the number of samples of a
            micro-batch.
    """

    name: str
    option: str | None = None
    can_run: Callable[[DeviceModel], str | None]
    make: Callable[[DeviceModel, Call, Sequence[torch.Tensor]], Replicas]
    is_worthwhile: Callable[[DeviceModel, int], bool] = lambda *_: True


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


def _layers(model: DeviceModel) -> set[str]:
    """Return the names of torch's functions that the forward calls."""
    names = (name.rpartition("/")[2] for name, _ in model.first_forward.placement.operations)
    return {name.partition(":")[0] for name in names}


def _has_no_lstm(model: DeviceModel, _: int) -> bool:
    return not _layers(model) & _LSTM


def _has_no_lstm_or_many_replicas(model: DeviceModel, num_samples: int) -> bool:
    has_many = model.batching.replicas >= _MANY_REPLICAS and num_samples <= _FEW_SAMPLES
    return has_many or _has_no_lstm(model, num_samples)


def _is_random_and_recurrent(model: DeviceModel, _: int) -> bool:
    has_many = model.batching.replicas >= _MANY_REPLICAS
    return has_many and model.first_forward.is_random and bool(_layers(model) & _RECURRENT)


BACKENDS: Final[tuple[Backend, ...]] = (
    Backend(
        name="loop",
        option="loop",
        can_run=_always,
        make=lambda model, *_: LoopReplicas(model),
    ),
    Backend(
        name="graph",
        can_run=_why_not_captured_alone,
        make=partial(GraphReplicas, vectorised=False),
        is_worthwhile=_has_no_lstm,
    ),
    Backend(
        name="fused graph",
        option="fused",
        can_run=_why_not_fused_and_captured,
        make=partial(GraphReplicas, vectorised=True),
        is_worthwhile=_has_no_lstm_or_many_replicas,
    ),
    Backend(
        name="fused",
        option="fused",
        can_run=_why_not_fused,
        make=lambda model, *_: FusedReplicas(model),
        is_worthwhile=_is_random_and_recurrent,
    ),
)
