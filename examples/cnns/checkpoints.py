"""The checkpoints of a training, in the folder of its run: saved, gone on from, and read.

A checkpoint holds weights, optimiser, position in the data and random numbers, and what the loop of
each instance adds up itself. The last ones are kept: three, or as many as an average needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import instances
import ipu_utils
import log
import torch

import popdist_py
from popdist_py import checkpoint as files
from popdist_py.poptorch.checkpoint import TrainingCheckpoints, Weights, weights_of
from popdist_py.poptorch.errors import Error

__all__ = ["Checkpoints", "Newest", "check_weights", "newest", "read", "weights"]

_FOLDER = "ckpt"
_FEWEST = 3  # kept
_NETWORK = "network."  # what models.ForTraining calls the network in it


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a run that is not damaged.

    Attributes:
        weights: its weights and settings.
        damaged: the steps of later checkpoints, all of which are damaged.
    """

    weights: Weights
    damaged: tuple[int, ...]

    @property
    def done(self) -> ipu_utils.Progress:
        """The number of weight updates that the training had made."""
        kept = self.weights.extra
        images = kept["done"] * kept["sizes"]["call"]
        return ipu_utils.Progress(self.weights.step, images // kept["sizes"]["global_batch"])


class Checkpoints:
    """The checkpoints of the training that ``run`` logs; all methods but ``batches`` collective.

    Args:
        run: whose folder they are in.
        model: the ``poptorch.trainingModel``.
        loader: of the training data; read it through ``batches()``.
        args: of the training.
    """

    def __init__(self, run: log.Run, model, loader, args: argparse.Namespace) -> None:
        self._run = run
        self._model = model
        self._calls = len(loader)  # of an epoch
        self._done = 0  # of this epoch
        self._training = TrainingCheckpoints(
            run.folder / _FOLDER, model, loader, keep=max(_FEWEST, args.weight_avg_count)
        )
        self._sizes = {
            "global_batch": ipu_utils.sizes(args).global_batch,
            "call": loader.combinedBatchSize * popdist_py.getNumInstances(),
        }

    def batches(self) -> Iterator[Any]:
        """Read the rest of the current epoch, call by call.

        The epoch is complete with its last batch: a checkpoint after it begins the next one.
        """
        batches = self._training.batches()
        for batch in batches:
            self._done += 1
            if self._done == self._calls:
                next(batches, None)
                self._done = 0
            yield batch
        self._done = 0

    def save(self, step: int, epoch: float, own: Mapping[str, Any] | None = None) -> None:
        """Save the training.

        Args:
            step: weight updates done.
            epoch: how far it is, such as 1.25.
            own: plain values and tensors of this instance.
        """
        owns = popdist_py.all_gather_object(dict(own or {}))
        kept = {"epoch": epoch, "done": self._done, "sizes": self._sizes, "own": owns}
        with log.private():
            self._training.save(step, kept)

    def resume(self, found: Newest) -> Mapping[str, Any]:
        """Go on from the newest checkpoint, and cut off what was logged after it.

        Returns:
            The state that this instance saved; that of instance 0 if the number of instances has
            changed.

        Raises:
            ValueError: the checkpoint is of another model or global batch; nothing was changed.
        """
        instances.together(lambda: self._check(found.weights))
        step, kept = self._training.resume()
        self._done = found.done.of_epoch * self._sizes["global_batch"] // self._sizes["call"]
        for lost in found.damaged:
            self._run.line(f"checkpoint of step {lost} is damaged: going on from step {step}")
        self._run.go_on(step)
        owns, index = kept["own"], popdist_py.getInstanceIndex()
        same_number = len(owns) == popdist_py.getNumInstances()
        return owns[index if same_number else 0]

    def _check(self, found: Weights) -> None:
        where = f"the checkpoint of step {found.step} in {self._run.folder}"
        check_weights(found, self._model.model.network, where)
        saved = found.extra["sizes"]
        if saved["global_batch"] != self._sizes["global_batch"]:
            raise ValueError(
                f"{where} is of a global batch of {saved['global_batch']:,} images, not "
                f"{self._sizes['global_batch']:,}: change replicas or --gradient-accumulation-count"
            )


# --- for those who read them ------------------------------------------------------------------


def read(folder: Path, count: int | None = None) -> list[Weights]:
    """Return the newest ``count`` whole checkpoints of a run, or all, the oldest first.

    ``model`` of each is the network's ``state_dict()``.

    Raises:
        ValueError: there is none, or one is no training's.
    """
    found = []
    for checkpoint in files.Checkpoints(folder / _FOLDER).newest_first():
        try:
            found.append(_of_the_network(weights_of(checkpoint, folder / _FOLDER)))
        except Error as error:
            raise ValueError(str(error)) from None
        if "sizes" not in found[-1].extra:
            raise ValueError(
                f"checkpoint of step {checkpoint.step} in {folder / _FOLDER} is of another "
                "program: give a folder that train.py made"
            )
        if len(found) == count:
            break
    if not found:
        damaged = files.Checkpoints(folder / _FOLDER).steps()
        why = "only damaged checkpoints" if damaged else "no checkpoint"
        raise ValueError(
            f"{folder} has {why} in {_FOLDER}/: train.py saves --ckpts-per-epoch of them; "
            "start it again"
        )
    return found[::-1]


def _of_the_network(found: Weights) -> Weights:
    """Return a checkpoint with the names that ``models.create(...).state_dict()`` has."""
    return replace(
        found, model={name.removeprefix(_NETWORK): value for name, value in found.model.items()}
    )


def weights(folder: Path) -> Weights:
    """Return the newest whole checkpoint of a run; ``model`` is the network's ``state_dict()``.

    Raises:
        ValueError: there is none.
    """
    return read(folder, 1)[0]


def check_weights(found: Weights, network: torch.nn.Module, where: str) -> None:
    """Check that weights are of a network's shapes.

    Raises:
        ValueError: they are not; says which differs first.
    """
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in found.model.items()}
    for name in [*wanted, *saved]:
        if wanted.get(name) != saved.get(name):
            raise ValueError(
                f"{where} is of another model: {name} is {_shape(saved.get(name))} there and "
                f"{_shape(wanted.get(name))} here; give the data and the options of that training"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"[{', '.join(map(str, shape))}]"


def newest(folder: Path) -> Newest:
    """Return the newest checkpoint of a run that is whole; collective.

    Raises:
        ValueError: there is none, or it is no training's.
    """

    def read_it() -> Newest:
        found = weights(folder)
        steps = files.Checkpoints(folder / _FOLDER).steps()
        return Newest(found, tuple(step for step in steps if step > found.step))

    return instances.on_instance_0(read_it)
