"""Saving a training and going on where it stopped, to the bit.

Knows what the state of a training is and how it is gathered from the instances; files are
``popdist_py.checkpoint``'s matter.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from popdist_py import context
from popdist_py.checkpoint import Checkpoints
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.model.executor import PoplarExecutor
from popdist_py.poptorch.model.training_state import own_state

__all__ = ["TrainingCheckpoints"]

_VERSION = 2
# Where torch's and our loaders and samplers keep what they go through.
_LINKS = ("sampler", "batch_sampler", "_batches", "_order", "_sampler")
_GENERATORS = ("generator", "_generator")
_COUNTERS = ("_epoch", "epoch")


class TrainingCheckpoints:
    """The checkpoints of one training: model, optimiser, position in the data, random numbers.

    Every instance makes one of these and calls the same methods; instance 0 reads and writes the
    files. After ``resume()`` the training goes on with the very numbers that it would have had.
    With another number of instances than before it goes on too, but what is left of the epoch may
    come in another order, and the host's own random numbers are those of instance 0.

    Args:
        folder: where the files are, on instance 0's host.
        model: the ``poptorch.trainingModel``.
        loader: what ``batches()`` reads; any iterable that starts a new epoch each time.
        keep: how many checkpoints are kept.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: PoplarExecutor,
        loader: Any = (),
        keep: int = 3,
    ) -> None:
        self._files = Checkpoints(folder, keep)
        self._model = model
        self._loader = loader
        self._epoch = 0
        self._done = 0  # batches of this epoch that were given out
        self._epoch_start: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """Number of epochs that are complete."""
        return self._epoch

    def batches(self) -> Iterator[Any]:
        """Read the rest of the current epoch, batch by batch."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._epoch_start = {"random": _host_random(), "loader": _loader_state(self._loader)}
            batches = iter(self._loader)
        else:
            batches = self._wind_forward(resumed)
        for batch in batches:
            self._done += 1
            yield batch
        self._epoch += 1
        self._done = 0

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save the training after ``step`` steps; all instances call this together.

        Args:
            step: the number of steps done.
            extra: more to keep, such as a scheduler's ``state_dict()``: tensors, numbers, texts,
                and lists, tuples and dictionaries of them.

        Raises:
            Error: the model has not run yet, or ``extra`` holds something else.
        """
        _check_extra(extra or {})
        own = {
            "random": _host_random(),
            "epoch_start": self._epoch_start,
            **self._model.instance_state(),
        }
        communicator = context.communicator()
        instances = communicator.all_gather_object(_to_bytes(own))
        if communicator.instance_index != 0:
            return
        state = {
            "version": _VERSION,
            "training": self._model.training_state(),
            "instances": list(instances),
            "epoch": self._epoch,
            "done": self._done,
            "extra": dict(extra or {}),
        }
        self._files.save(step, _to_bytes(state))

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Load the newest whole checkpoint, if there is one; all instances call this together.

        Call it before the model runs.

        Returns:
            The number of steps done, 0 to start from the beginning, and what was saved as
            ``extra``.

        Raises:
            Error: the checkpoint is of another version, or no training's.
        """
        communicator = context.communicator()
        newest = self._files.latest() if communicator.instance_index == 0 else None
        newest = communicator.broadcast_object(newest)
        if newest is None:
            return 0, {}
        try:
            state = _from_bytes(newest.data)
            version = state["version"]
        except Exception as error:
            raise Error(
                f"checkpoint of step {newest.step} in {self._files.folder} holds no training "
                f"({type(error).__name__}): give each training a folder of its own"
            ) from None
        if version != _VERSION:
            raise Error(
                f"checkpoint of step {newest.step} in {self._files.folder} has version "
                f"{version}: expected {_VERSION}. Resume with the version of this package that "
                "saved it, or give the training another folder"
            )
        instances = [_from_bytes(data) for data in state["instances"]]
        self._model.load_training_state(state["training"], instances)
        own = own_state(instances)
        self._epoch, self._done = state["epoch"], state["done"]
        self._epoch_start = own["epoch_start"]
        self._resumed = {"random": own["random"]}
        return newest.step, state["extra"]

    def _wind_forward(self, resumed: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the epoch as it began, and skip the batches that were trained on."""
        if getattr(self._loader, "_accessor", None) is not None:
            # Another process loads, whose samplers are out of reach: it reads all epochs again.
            for _ in range(self._epoch):
                for _ in self._loader:
                    pass
        elif self._epoch_start:
            _load_loader_state(self._loader, self._epoch_start["loader"])
        if self._epoch_start:
            _load_host_random(self._epoch_start["random"])
        batches: Iterator[Any] = iter(self._loader)
        for _ in range(self._done):
            next(batches)
        _load_host_random(resumed["random"])
        return batches


# --- bytes ------------------------------------------------------------------------------------


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse now what ``resume()`` could not load."""
    for key, value in extra.items():
        try:
            _from_bytes(_to_bytes({key: value}))
        except Exception:
            raise Error(
                f"extra[{key!r}] holds more than a checkpoint can: {value!r:.200}; expected "
                "tensors, numbers of Python, texts, and lists, tuples and dictionaries of them"
            ) from None


def _from_bytes(data: bytes) -> Any:
    """Load tensors and plain values only: a file cannot run code."""
    return torch.load(io.BytesIO(data), weights_only=True)


# --- the host's random numbers ----------------------------------------------------------------


def _host_random() -> dict[str, Any]:
    """Return the state of the generators that a program on the host draws from."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {
            **numpy,
            "state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]},
        },
    }


def _load_host_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})


# --- the loader -------------------------------------------------------------------------------


def _parts(loader: Any) -> Iterator[Any]:
    """Return the loader and the samplers that it reads through, each once."""
    seen: set[int] = set()
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [vars(part)[name] for name in _LINKS if name in getattr(part, "__dict__", {})]


def _loader_state(loader: Any) -> list[dict[str, Any]]:
    """Return the generators and epoch counters of a loader and its samplers."""
    state: list[dict[str, Any]] = []
    for part in _parts(loader):
        values = getattr(part, "__dict__", {})
        found: dict[str, Any] = {
            name: values[name].get_state()
            for name in _GENERATORS
            if isinstance(values.get(name), torch.Generator)
        }
        found |= {name: values[name] for name in _COUNTERS if isinstance(values.get(name), int)}
        state.append(found)
    return state


def _load_loader_state(loader: Any, state: list[dict[str, Any]]) -> None:
    for part, found in zip(_parts(loader), state, strict=False):
        values = getattr(part, "__dict__", {})
        for name, value in found.items():
            # A loader made for another number of instances may have other samplers.
            if isinstance(value, torch.Tensor) and isinstance(values.get(name), torch.Generator):
                values[name].set_state(value)
            elif isinstance(values.get(name), int):
                setattr(part, name, value)
