"""The choice of a replica back end: the preferred one that computes what the loop computes.

The choice depends on the model alone and not on times, so that a program computes the same bits in
every run. ``compilation/backends.py`` has the back ends and the models that each is worthwhile for.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.freed_memory import give_back_kept_memory
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation import backends
from popdist_py.poptorch.compilation.agreement import Agreement
from popdist_py.poptorch.compilation.backends import Backend
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.replicas import DeviceModel, Replicas
from popdist_py.poptorch.logger import logger

__all__ = ["BackendChoice", "Chosen"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A back end and what runs the replicas with it.

    Attributes:
        name: The name of the back end.
        replicas: Runs the replicas.
    """

    name: str
    replicas: Replicas


class BackendChoice:
    """Finds the back end that runs the replicas of a model.

    Args:
        model: The model that runs.
        call: The arguments of a call.
        inputs: A combined micro-batch of each input.
        communicator: The other instances, which all choose the same back end.
        tell: Called with a few words about what happens.
    """

    def __init__(
        self,
        model: DeviceModel,
        call: Call,
        inputs: Sequence[torch.Tensor],
        communicator: Communicator,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._communicator = communicator
        self._tell = tell
        self._reasons: list[str] = []
        self._agreement = Agreement(model, call, inputs)

    def choose(self, wanted: str, chosen_before: str | None = None) -> Chosen:
        """Return the first back end that agrees with the loop on all instances, or the loop.

        Args:
            wanted: "auto" for the preferred back end, or the name or the option of a back end.
            chosen_before: The back end that was chosen when the same model was compiled before. It
                is not compared again.

        Raises:
            Error: ``wanted`` is an option, and none of its back ends can run the replicas.
        """
        # Instances need not be in step while they compare.
        alone = self._model.norm_groups.alone() if self._model.norm_groups else nullcontext()
        with alone, self._model.state.contents_kept():
            chosen = self._trusted(chosen_before) or self._first_agreeing(wanted)
        if chosen is None:
            self._say_why(wanted)
            loop = backends.BACKENDS[0]
            chosen = Chosen(loop.name, loop.make(self._model, self._call, self._inputs))
        logger.debug("Replicas run as %s", chosen.name)
        # The memory that the comparison has left in pieces is of no use to the steps.
        give_back_kept_memory()
        return chosen

    def _trusted(self, name: str | None) -> Chosen | None:
        """Return a back end that was chosen before, if all instances have chosen the same."""
        row = next((row for row in backends.BACKENDS if row.name == name), None)
        position = -1 if row is None else backends.BACKENDS.index(row)
        if self._smallest(position) != position or -self._smallest(-position) != position:
            return None
        return None if row is None else self._common(row, compares=False)

    def _first_agreeing(self, wanted: str) -> Chosen | None:
        for row in self._candidates(wanted):
            chosen = self._common(row, compares=True)
            if chosen is not None:
                return chosen
        return None

    def _candidates(self, wanted: str) -> list[Backend]:
        """Return the back ends to try, the best one first; the loop is not among them."""
        others = backends.BACKENDS[1:]
        if wanted != "auto":
            return [row for row in others if wanted in (row.name, row.option)]
        first = self._model.batching.inputs_of_replicas(self._inputs)[0]
        samples = max((len(tensor) for tensor in first if tensor.dim()), default=1)
        return [row for row in reversed(others) if row.is_worthwhile(self._model, samples)]

    def _common(self, row: Backend, *, compares: bool) -> Chosen | None:
        """Return a back end if it can run the replicas of all instances."""
        reason = row.can_run(self._model)
        if reason is not None:
            self._reasons.append(reason)
        replicas = self._made(row, compares=compares) if reason is None else None
        if not self._smallest(int(replicas is not None)):
            return None
        assert replicas is not None
        return Chosen(row.name, replicas)

    def _smallest(self, number: int) -> int:
        """Return the smallest number of all instances."""
        together = np.array([number], np.float64)
        if self._communicator.num_instances > 1:
            self._communicator.all_reduce(together, "min", "replica back ends")
        return int(together[0])

    def _made(self, row: Backend, *, compares: bool) -> Replicas | None:
        """Return what runs the replicas by this back end, or None if it does not agree."""
        try:
            with _silent():
                if compares and not self._agreement.is_prepared:
                    self._tell("running the loop")
                    self._agreement.prepare()
                self._tell(f"making the {row.name}")
                # A vectorised forward may leave tensors in a list that no other run can read. What
                # the loop left there stays: a forward that counts in a list has to show.
                with self._model.state.contents_kept():
                    with self._model.context.enter(), _collections_paused():
                        replicas = row.make(self._model, self._call, self._inputs)
                    if not compares:
                        return replicas
                    self._tell(f"checking the {row.name}")
                    reason = self._agreement.difference(replicas)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        if reason is None:
            return replicas
        logger.debug("Replica back end %s is not taken: %s", row.name, reason)
        self._reasons.append(f"{row.name}: {reason}")
        return None

    def _say_why(self, wanted: str) -> None:
        """Say why replicas run one after the other, if somebody may have expected more."""
        if self._model.batching.replicas == 1:
            return
        reason = "; ".join(dict.fromkeys(self._reasons))
        if wanted in {row.option for row in backends.BACKENDS[1:]}:
            raise Error(
                f"The replicas cannot run {wanted}, use 'auto' or 'loop': "
                f"{reason or 'another instance cannot'}"
            )
        if reason:
            logger.info("Replicas run one after the other: %s", reason)


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what this thread prints: trying repeats a forward that a device traces once."""
    stdout = sys.stdout
    sys.stdout = _OtherThreads(stdout)
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)
        sys.stdout = stdout


_is_silent: Final[ContextVar[bool]] = ContextVar("is_silent", default=False)


class _OtherThreads:
    """A text stream that takes nothing from a silent thread, and from those in its context."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if _is_silent.get():
            return len(text)
        return int(self._stream.write(text))


@contextmanager
def _collections_paused() -> Iterator[None]:
    """Let Python look for cycles later than in this block.

    Capturing makes tens of thousands of objects that live on. While their number grows, Python
    looks through them and all others again and again: 6 per cent of compiling ResNet-101.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
