"""The list of replica back ends, with rules for choosing the back end of a model.

To add a back end, write a class that runs replicas, and call ``register()`` with a ``Backend``
object. Every instance of a job must add the same rows (back ends) to ``BACKENDS``. The first row of
``BACKENDS`` is the reference back end ``LoopReplicas``, which runs one replica after the other. By
definition, the results of ``LoopReplicas`` are correct. When a model is compiled for the first
time, the results of other back ends are compared with the results of ``LoopReplicas``.

With ``replicaExecution("auto")``, the library tries the back ends from the last row of ``BACKENDS``
to the first row. A replica back end is worthwhile for a model if it is expected to be faster than
``LoopReplicas``. The library uses the first worthwhile back end whose results agree with the
results of ``LoopReplicas``. The choice of a back end does not depend on measured times, so a
program uses the same back end in every run. The rules about worthwhile back ends were derived from
the times of training steps in the following table. Each entry of the table is the time of a
training step with a back end, divided by the time with ``LoopReplicas``. The times were measured
with one thread on a machine of two cores:

=========================  ========  =========  ===========  =========
layers                     replicas  graph      fused graph  fused
=========================  ========  =========  ===========  =========
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
=========================  ========  =========  ===========  =========
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.device_context import Mode
from popdist_py.poptorch.execution.replica_graphs.graph_replicas import GraphReplicas
from popdist_py.poptorch.execution.replicas import (
    DeviceModel,
    FusedReplicas,
    LoopReplicas,
    Replicas,
)
from popdist_py.poptorch.execution.torch_modes import MixedPrecision
from popdist_py.poptorch.group_norms.batch_norm import GroupNorms
from popdist_py.poptorch.options.emulator_options import EXECUTIONS

__all__ = ["BACKENDS", "ONE_REPLICA", "Backend", "register", "why_not_copied"]

# The reason why back ends that compute several replicas at once do not run a single replica. For a
# single replica, the library uses ``LoopReplicas`` instead, and does not raise an error.
ONE_REPLICA: Final = "there is one replica only"

# The torch functions that are slower in a recorded graph, because recorded graphs do not use
# torch's fast kernel for LSTM layers.
_LSTM: Final = frozenset({"lstm"})
_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# For LSTM layers, one vectorised pass over all replicas is faster than torch's LSTM kernel if there
# are at least _MANY_REPLICAS replicas, and at most _FEW_SAMPLES samples per micro-batch.
_MANY_REPLICAS, _FEW_SAMPLES = 4, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A replica back end, as one row of the list ``BACKENDS``.

    Attributes:
        name: The name of the back end, which is stored in executables (compiled models).
        option: The value of the option ``replicaExecution`` that selects the back end; None if only
            "auto" can select it. If the same value of ``replicaExecution`` selects several back
            ends, the library uses the first back end whose results agree with the results of
            ``LoopReplicas``.
        can_run: A function that gets a model and returns the reason why the back end cannot run the
            model; None if the back end can run the model.
        make: A function that returns an object that runs a model's replicas. The arguments of
            ``make`` are the model, the arguments of a call, and one tensor for each input of the
            model, with a micro-batch for each group of replicas that get the same inputs. If
            ``make`` raises an error, the library does not use the back end.
        is_worthwhile: A function that returns whether "auto" tries the back end, given the model
            and the number of samples in a micro-batch.
    """

    name: str
    option: str | None = None
    can_run: Callable[[DeviceModel], str | None]
    make: Callable[[DeviceModel, Call, Sequence[torch.Tensor]], Replicas]
    is_worthwhile: Callable[[DeviceModel, int], bool] = lambda *_: True


def _always(_: DeviceModel) -> None:
    """Return None, because ``LoopReplicas`` can run every model."""


def _why_not_recorded(model: DeviceModel) -> str | None:
    if any(_kind(mode) not in (MixedPrecision, GroupNorms) for mode in model.context.modes):
        return (
            "a recorded graph cannot represent the torch modes (TorchFunctionMode or "
            "TorchDispatchMode) in which the model runs"
        )
    if model.training and not model.first_forward.loss_has_gradient:
        return "the loss does not depend on any trained parameter"
    return model.only_loop


def _kind(mode: Mode) -> Any:
    """Return the class of a torch mode, which is given as a class or a ``partial`` of a class."""
    return mode.func if isinstance(mode, partial) else mode


def why_not_copied(model: DeviceModel) -> str | None:
    """Return why ``CopyingReplicas`` cannot run a model; None if it can run the model."""
    if any(_kind(mode) is not MixedPrecision for mode in model.context.modes):
        return "the forward pass runs in torch modes that read values in the memory of the CPU"
    return model.only_loop


def _why_not_recorded_alone(model: DeviceModel) -> str | None:
    if model.norm_groups is not None and model.batching.replicas > 1:
        return "batch norms exchange statistics between the local replicas of a group"
    return _why_not_recorded(model)


def _why_not_fused(model: DeviceModel) -> str | None:
    if model.batching.replicas == 1:
        return ONE_REPLICA
    return model.only_loop


def _why_not_fused_and_recorded(model: DeviceModel) -> str | None:
    if model.first_forward.is_random:
        return (
            "the model draws random numbers, and each replica has its own random stream, which a "
            "recorded graph cannot represent"
        )
    return _why_not_fused(model) or _why_not_recorded(model)


def _layers(model: DeviceModel) -> set[str]:
    """Return the names of the torch functions that the forward pass calls."""
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


BACKENDS: Final[list[Backend]] = [
    Backend(
        name="loop",
        option="loop",
        can_run=_always,
        make=lambda model, *_: LoopReplicas(model),
    ),
    Backend(
        name="graph",
        can_run=_why_not_recorded_alone,
        make=partial(GraphReplicas, vectorised=False),
        is_worthwhile=_has_no_lstm,
    ),
    Backend(
        name="fused graph",
        option="fused",
        can_run=_why_not_fused_and_recorded,
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
]


def register(row: Backend) -> None:
    """Add a back end to ``BACKENDS``, and its option value to the values of ``replicaExecution``.

    With ``replicaExecution("auto")``, the library tries the new back end before all other back
    ends.

    Raises:
        ValueError: The list ``BACKENDS`` already contains a back end with the name of the new back
            end.
    """
    if row.name in {other.name for other in BACKENDS}:
        raise ValueError(
            f"a replica back end with the name {row.name!r} is registered already: choose another "
            "name"
        )
    BACKENDS.append(row)
    if row.option is not None and row.option not in EXECUTIONS:
        EXECUTIONS.append(row.option)
