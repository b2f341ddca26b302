"""The class BackendChoice, which chooses the code (replica back end) that runs the replicas.

The results of a replica back end must agree with the results of the reference back end
``LoopReplicas``, which runs one replica after the other. The choice of a back end depends only on
the model and not on measured times, so that a program computes the same bits in every run. The
module ``backends.py`` contains the list of back ends, and the rules about the models for which each
back end is faster than the reference back end ``LoopReplicas``.
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
from popdist_py.poptorch.compilation.backend_comparison import BackendComparison
from popdist_py.poptorch.compilation.backends import Backend
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution.replicas import DeviceModel, Replicas
from popdist_py.poptorch.logger import logger

__all__ = ["BackendChoice", "Chosen"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The replica back end that was chosen for a model.

    Attributes:
        name: The name of the chosen replica back end.
        replicas: The object that runs the replicas with the chosen back end.
    """

    name: str
    replicas: Replicas


class BackendChoice:
    """Chooses the replica back end (the code that runs the replicas) of a model.

    Args:
        model: The compiled model on the device.
        call: Example arguments for calling the model.
        inputs: One tensor for each input of the model, with a micro-batch for each group of
            replicas that get the same inputs.
        communicator: The communicator that connects the instances. All instances choose the same
            replica back end.
        tell: A function that updates the progress bar of the compilation. The function gets a short
            text about what ``BackendChoice`` does next.
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
        self._comparison = BackendComparison(model, call, inputs)

    def choose(self, wanted: str, chosen_before: str | None = None) -> Chosen:
        """Return the first replica back end with correct results on all instances.

        If the results of every other back end are wrong, ``choose`` returns the reference back end
        ``LoopReplicas``, which runs one replica after the other.

        Args:
            wanted: The requested back end: the back end's name, a value of the option
                ``replicaExecution``, or "auto".
            chosen_before: The name of the back end that was chosen in an earlier compilation of the
                same model. If ``chosen_before`` is given, the results of this back end are not
                compared with the results of the reference back end ``LoopReplicas`` again.

        Raises:
            Error: The option ``replicaExecution`` selects a kind of replica back end, and no back
                end of the selected kind can run the model.
        """
        # While back ends are compared, the instances may run different numbers of micro-batches.
        # Therefore batch norms must not wait for other instances during the comparison.
        alone = self._model.norm_groups.alone() if self._model.norm_groups else nullcontext()
        with alone, self._model.state.attributes.contents_kept():
            chosen = self._trusted(chosen_before) or self._first_agreeing(wanted)
        if chosen is None:
            self._say_why(wanted)
            loop = backends.BACKENDS[0]
            chosen = Chosen(loop.name, loop.make(self._model, self._call, self._inputs))
        logger.debug("The replicas run with the back end %r", chosen.name)
        # The comparison of replica back ends leaves fragmented free memory that training steps
        # could not reuse. Therefore the free memory is returned to the operating system.
        give_back_kept_memory()
        return chosen

    def _trusted(self, name: str | None) -> Chosen | None:
        """Return the back end ``name``; None if the instances chose different back ends earlier."""
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
        """Return the back ends to compare with ``LoopReplicas``, the preferred back end first."""
        others = backends.BACKENDS[1:]
        if wanted != "auto":
            return [row for row in others if wanted in (row.name, row.option)]
        first = self._model.batching.inputs_of_replicas(self._inputs)[0]
        samples = max((len(tensor) for tensor in first if tensor.dim()), default=1)
        return [row for row in reversed(others) if row.is_worthwhile(self._model, samples)]

    def _common(self, row: Backend, *, compares: bool) -> Chosen | None:
        """Return an object of a back end; None if it cannot run the replicas of every instance."""
        reason = row.can_run(self._model)
        if reason is not None:
            self._reasons.append(reason)
        replicas = self._made(row, compares=compares) if reason is None else None
        if not self._smallest(int(replicas is not None)):
            return None
        assert replicas is not None
        return Chosen(row.name, replicas)

    def _smallest(self, number: int) -> int:
        """Return the smallest of the numbers that the instances pass to ``_smallest``."""
        together = np.array([number], np.float64)
        if self._communicator.num_instances > 1:
            self._communicator.all_reduce(together, "min", "replica back ends")
        return int(together[0])

    def _made(self, row: Backend, *, compares: bool) -> Replicas | None:
        """Return an object that runs the replicas with a back end; None if its results are wrong.

        Results are wrong if they differ from the results of the reference back end ``LoopReplicas``
        by more than rounding errors. The result is also None if the tried back end raises an error.
        """
        try:
            with _silent():
                if compares and not self._comparison.is_prepared:
                    self._tell("running the replicas in a loop")
                    self._comparison.prepare()
                self._tell(f"preparing the back end {row.name!r}")
                # A forward pass inside ``vmap`` may store tensors in a list of the model, and later
                # forward passes cannot use these tensors. Therefore ``contents_kept`` undoes the
                # changes that a tried back end makes to the lists of the model. The changes that
                # the reference back end ``LoopReplicas`` makes to lists are undone only after a
                # back end has been chosen. If these changes to lists were undone earlier, the
                # comparison of back ends would not detect that a forward pass counts its calls in a
                # list.
                with self._model.state.attributes.contents_kept():
                    with self._model.context.enter(), _collections_paused():
                        replicas = row.make(self._model, self._call, self._inputs)
                    if not compares:
                        return replicas
                    self._tell(f"checking the back end {row.name!r}")
                    reason = self._comparison.difference(replicas)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        if reason is None:
            return replicas
        logger.debug("Replica back end %s is not used: %s", row.name, reason)
        self._reasons.append(f"{row.name}: {reason}")
        return None

    def _say_why(self, wanted: str) -> None:
        """Log why the replicas run one after the other, unless there is only one replica.

        Raises:
            Error: The option ``replicaExecution`` selects a kind of replica back end that cannot
                run the model.
        """
        reasons = list(dict.fromkeys(self._reasons))
        is_option = wanted in {row.option for row in backends.BACKENDS[1:]}
        is_alone = self._model.batching.replicas == 1
        if is_alone and (not is_option or reasons == [backends.ONE_REPLICA]):
            return
        reason = "; ".join(reasons)
        if is_option:
            raise Error(
                f"Options.Emulator.replicaExecution({wanted!r}) is not possible for this model "
                f"({reason or 'another instance cannot use it'}): choose 'auto' or 'loop'"
            )
        if reason:
            logger.info(
                "The replicas of this model are computed one after the other, not at once: %s",
                reason,
            )


@contextmanager
def _silent() -> Iterator[None]:
    """Discard the text that the current thread prints in the ``with`` block.

    The choice of a replica back end runs the forward pass several times, but the user expects
    printed text from only one forward pass. On a real IPU, PopTorch traces the forward pass only
    once.
    """
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
    """A text stream that discards the text of threads with the context variable ``_is_silent``.

    Each thread has its own value of the context variable ``_is_silent``. Text from all other
    threads is written to the original stream.
    """

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
    """Disable Python's cyclic garbage collector in the ``with`` block.

    Recording a graph of a model's operations makes tens of thousands of Python objects that remain
    in use. As the number of Python objects grows, the garbage collector would search all objects
    again and again. Without ``_collections_paused``, searches by the garbage collector took 6 per
    cent of the time to compile ResNet-101.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
