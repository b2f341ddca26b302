"""Where an epoch of a loader begins: all that its order is drawn from, as a value.

States are numbers, tensors, and tuples, lists and dictionaries of them: they can be saved and
loaded without running code. How far an epoch has come is counted by whoever hands the batches out.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.poptorch.data.samplers import load_sampler_state, sampler_state

__all__ = ["Draws", "own_random"]


@dataclass(frozen=True, slots=True)
class Draws:
    """What the order of a loader's batches is drawn from.

    Attributes:
        sampler: gives the order, if there is a sampler.
        generator: the loader's own; None if it draws from the process's random numbers.
        loader: the torch DataLoader whose workers may outlive an epoch, if there is one.
    """

    sampler: Any = None
    generator: torch.Generator | None = None
    loader: torch.utils.data.DataLoader[Any] | None = None

    @classmethod
    def of(cls, loader: torch.utils.data.DataLoader[Any]) -> Draws:
        """Return what a torch DataLoader draws from."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return cls(sampler, loader.generator, loader)

    def state(self, *, with_random: bool) -> dict[str, Any]:
        """Return the state before an epoch, which ``load`` begins again.

        Args:
            with_random: whether the process's own random numbers are part of it.
        """
        return {
            "random": (torch.get_rng_state(), random.getstate()) if with_random else None,
            "generator": None if self.generator is None else self.generator.get_state(),
            "sampler": sampler_state(self.sampler),
            "has_workers": self._has_workers,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Draw from now on what was drawn after ``state`` was taken."""
        if state["has_workers"] and self.loader is not None and not self._has_workers:
            # Torch draws a seed when it starts workers. That epoch had its workers already.
            with own_random():
                torch.utils.data.DataLoader.__iter__(self.loader)
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
        load_sampler_state(self.sampler, state["sampler"])
        if state["random"] is not None:
            torch_state, python_state = state["random"]
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
        if self._has_workers and not state["has_workers"]:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as for a seed

    def end_workers(self) -> None:
        """End the workers of an earlier epoch: new workers get the data set as it is now."""
        if self._has_workers:
            self.loader._iterator = None  # type: ignore[union-attr]

    @property
    def _has_workers(self) -> bool:
        """Whether workers of an earlier epoch go on: torch keeps their iterator."""
        return getattr(self.loader, "_iterator", None) is not None


@contextlib.contextmanager
def own_random() -> Iterator[None]:
    """Draw random numbers inside without a change to those that the process draws afterwards."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
