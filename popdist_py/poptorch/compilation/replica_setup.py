"""How a model's replicas run: which back ends are wanted, and what is known from earlier runs.

Made while compiling. Which back ends agree with the loop is ``backend_choice.py``'s matter, and
which of them is the fastest that of ``execution/fastest_replicas.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import nn

from popdist_py import measured_values
from popdist_py.collectives import Communicator
from popdist_py.collectives.freed_memory import give_back_kept_memory
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.backend_choice import Agreed, BackendChoice, Wanted
from popdist_py.poptorch.compilation.model_key import model_key
from popdist_py.poptorch.execution.fastest_replicas import FastestReplicas
from popdist_py.poptorch.execution.replicas import DeviceModel
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.tracing.block_places import Placement

__all__ = ["ReplicaSetup"]

# The file of measured values that holds which back end is the fastest for a model.
_FASTEST: Final = "back_ends"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSetup:
    """Chooses what runs the replicas.

    Attributes:
        user_model: the user's module.
        options: the wrapper's options.
        optimizer: the user's optimiser; None for inference.
        communicator: the other instances; one alone for inference.
    """

    user_model: nn.Module
    options: Options
    optimizer: torch.optim.Optimizer | None
    communicator: Communicator

    def make(
        self,
        model: DeviceModel,
        call: Call,
        inputs: Sequence[torch.Tensor],
        *,
        how: str,
        placement: Placement,
        trusted: Agreed,
        tell: Callable[[str], None],
    ) -> tuple[FastestReplicas, Agreed]:
        """Return what runs the replicas, and the back ends that need no comparison from now on.

        These are not all that agree with the loop if the one that was the fastest in an earlier run
        was compared alone.

        Args:
            model: what runs.
            call: arguments of a call.
            inputs: a combined micro-batch of each input.
            how: "auto", or the name or the option of a back end.
            placement: what the first forward did where.
            trusted: what agreed when this very model was compiled before.
            tell: told what happens, in a word or two.
        """
        is_repeatable = (
            self.options.exists("random_seed") or self.options.Emulator.deterministic_reduction
        )
        by_rule = how == "auto" and is_repeatable
        if by_rule and _has_lstm(placement):
            how = "loop"  # it has a kernel of its own, which no captured graph has
        key = ""
        if how == "auto" and not by_rule and model.only_loop is None:
            threads = f"{torch.get_num_threads()} threads"
            key = f"{model_key(self.user_model, self.options, self.optimizer, call)}/{threads}"

        choice = BackendChoice(model, call, inputs, common=self._common, tell=tell)
        fastest_before = self._fastest_before(key)
        # Instances need not be in step while they compare.
        with model.norm_groups.alone() if model.norm_groups else nullcontext():
            candidates = choice.candidates(
                Wanted(name=how, fastest_before=fastest_before, trusted=trusted, by_rule=by_rule)
            )
        replicas = FastestReplicas(
            candidates,
            window=model.batching.gradient_accumulation,
            slowest=self._slowest,
            on_change=partial(_begin_afresh, model),
            on_settled=partial(self._settled, key),
        )
        is_one_of_several = fastest_before is not None and len(candidates) == 1
        return replicas, Agreed(
            trusted.names | frozenset(candidates), trusted.are_all or not is_one_of_several
        )

    def _settled(self, key: str, best: str, seconds: Mapping[str, float]) -> None:
        """Say what runs the replicas from now on, and remember it under a key, if there is one."""
        times = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in seconds.items())
        logger.info("Replicas run as %s from now on; measured: %s", best, times)
        # Of instances that are connected, only what the first one stores is read again.
        is_read = self.communicator.num_instances == 1 or self.communicator.instance_index == 0
        if key and is_read:
            measured_values.remember(_FASTEST, key, best)

    def _fastest_before(self, key: str) -> str | None:
        """Return what instance 0 knows to be the fastest; None if nothing, or without a key."""
        found = measured_values.recall(_FASTEST, key) if key else None
        if self.communicator.num_instances > 1:
            found = self.communicator.broadcast_object(found)
        return found if isinstance(found, str) else None

    def _common(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on all instances."""
        together = np.array(flags, np.float64)
        if self.communicator.num_instances > 1:
            self.communicator.all_reduce(together, "min", "replica back ends")
        return [bool(flag) for flag in together]

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest of each number over all instances."""
        together = np.array(seconds)
        if self.communicator.num_instances > 1:
            self.communicator.all_reduce(together, "max", "seconds of replica back ends")
        return [float(second) for second in together]


def _begin_afresh(model: DeviceModel) -> None:
    """Let the window that begins, of another back end, have what the one before needed.

    Each back end allocates in another order and other sizes: beside the memory that one has left in
    pieces, the next would take its own.
    """
    if model.gradients is None:
        return
    model.gradients.forget_order()
    for parameter in model.trained:
        parameter.grad = None  # the window begins without, in any case
    give_back_kept_memory()


def _has_lstm(placement: Placement) -> bool:
    names = (name.rpartition("/")[2] for name, _ in placement.operations)
    return any(name.partition(":")[0] == "lstm" for name in names)
