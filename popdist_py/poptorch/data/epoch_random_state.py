"""The state of all random generators that determine the order of a DataLoader's batches.

A saved state of random generators consists of numbers and tensors, in tuples, lists and
dictionaries. Loading a saved state of random generators from a file therefore executes no code. The
classes DataLoader and AsynchronousDataAccessor count the batches of an epoch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.poptorch.data.samplers import load_sampler_state, sampler_state
from popdist_py.torch_states.host_random import load_python_random, python_random

__all__ = ["Draws", "own_random"]


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampler and the random generator that determine the order of a DataLoader's batches.

    Attributes:
        sampler: The sampler that yields the order, or None without a sampler.
        generator: The DataLoader's random generator; None if the DataLoader uses the process's
            random generator.
        loader: The torch DataLoader whose worker processes may stay alive between epochs; None for
            other loaders.
    """

    sampler: Any = None
    generator: torch.Generator | None = None
    loader: torch.utils.data.DataLoader[Any] | None = None

    @classmethod
    def of(cls, loader: torch.utils.data.DataLoader[Any]) -> Draws:
        """Return the sampler and the random generator of a torch DataLoader."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return cls(sampler, loader.generator, loader)

    def state(self, *, with_random: bool) -> dict[str, Any]:
        """Return the state of the sampler and the random generators at the start of an epoch.

        Args:
            with_random: Whether the returned state includes the process's random generators.
        """
        return {
            "random": (torch.get_rng_state(), python_random()) if with_random else None,
            "generator": None if self.generator is None else self.generator.get_state(),
            "sampler": sampler_state(self.sampler),
            "has_workers": self._has_workers,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore an epoch's saved random state, so that the next epoch repeats its numbers."""
        if state["has_workers"] and self.loader is not None and not self._has_workers:
            # Torch draws a seed when it starts worker processes, but the saved epoch used worker
            # processes that existed already. The worker processes are therefore started before the
            # state of the random generators is restored.
            with own_random():
                torch.utils.data.DataLoader.__iter__(self.loader)
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
        load_sampler_state(self.sampler, state["sampler"])
        if state["random"] is not None:
            torch_state, python_state = state["random"]
            torch.set_rng_state(torch_state)
            load_python_random(python_state)
        if self._has_workers and not state["has_workers"]:
            # At the start of the saved epoch, torch drew a seed for new worker processes. Torch
            # does not draw a seed for existing worker processes. One random number is drawn here in
            # place of the seed for new worker processes.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def end_workers(self) -> None:
        """End the worker processes of an earlier epoch.

        New worker processes will get a new copy of the data set.
        """
        if self._has_workers:
            self.loader._iterator = None  # type: ignore[union-attr]

    @property
    def _has_workers(self) -> bool:
        """Whether worker processes of an earlier epoch, which torch stores, still run."""
        return getattr(self.loader, "_iterator", None) is not None


@contextlib.contextmanager
def own_random() -> Iterator[None]:
    """Restore the state of the process's random generators at the end of the ``with`` block."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
