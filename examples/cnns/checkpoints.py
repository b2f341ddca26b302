"""Checkpoints of a training: functions that save them, resume from them and read them.

A checkpoint holds the weights, the optimiser's state, the position in the data, the state of the
random generators, and the sums of each instance since the last log line. The newest three
checkpoints are kept, or more if --weight-avg-count is larger.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import batch_sizes
import instances
import log
import torch
from file_writing import private

import popdist_py
from popdist_py import checkpoint as files
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints, Weights, weights_of

__all__ = ["Checkpoints", "Newest", "check_weights", "newest", "read", "weights"]

_FOLDER = "ckpt"
_FEWEST = 3  # the least number of checkpoints that are kept
_NETWORK = "network."  # prefix of the network's weights in models.ForTraining


@dataclass(frozen=True)
class Newest:
    """The newest undamaged checkpoint of a run.

    Attributes:
        weights: The weights and settings of the checkpoint.
        damaged: The steps of the damaged checkpoints that were saved after this checkpoint.
    """

    weights: Weights
    damaged: tuple[int, ...]

    @property
    def done(self) -> batch_sizes.Progress:
        """The number of weight updates that the training had made."""
        kept = self.weights.extra
        images = kept["done"] * kept["sizes"]["call"]
        return batch_sizes.Progress(self.weights.step, images // kept["sizes"]["global_batch"])


class Checkpoints:
    """The checkpoints of one training. All methods except ``batches`` are collective.

    Args:
        run: The log of the training. The checkpoints are in its folder.
        model: The training model of PopTorch.
        loader: The loader of the training data. The training reads it through ``batches()``.
        args: The options of the training.
    """

    def __init__(self, run: log.Run, model, loader, args: argparse.Namespace) -> None:
        self._run = run
        self._model = model
        self._calls = len(loader)  # calls of an epoch
        self._done = 0  # calls of the current epoch
        self._training = TrainingCheckpoints(
            run.folder / _FOLDER, model, loader, keep=max(_FEWEST, args.weight_avg_count)
        )
        self._sizes = {
            "global_batch": batch_sizes.sizes(args).global_batch,
            "call": loader.combinedBatchSize * popdist_py.getNumInstances(),
        }

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch, one per call.

        The last batch completes the epoch. A training that resumes from a checkpoint after this
        batch begins with the next epoch.
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
            step: The number of weight updates.
            epoch: The progress of the training in epochs, such as 1.25.
            own: Plain values and tensors of this instance, which ``resume`` returns.
        """
        owns = popdist_py.all_gather_object(dict(own or {}))
        kept = {"epoch": epoch, "done": self._done, "sizes": self._sizes, "own": owns}
        with private():
            self._training.save(step, kept)

    def resume(self, found: Newest) -> Mapping[str, Any]:
        """Continue from the newest checkpoint, and remove later lines from the log.

        Returns:
            The state that this instance saved. If the number of instances has changed, this is the
            state of instance 0.

        Raises:
            ValueError: The checkpoint has another model or global batch size. The training is
                unchanged.
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


# --- reading checkpoints without a training ---------------------------------------------------


def read(folder: Path, count: int | None = None) -> list[Weights]:
    """Return the newest ``count`` undamaged checkpoints of a run, or all of them, oldest first.

    The attribute ``model`` of each checkpoint is the ``state_dict()`` of the network.

    Raises:
        ValueError: The run does not have a checkpoint, or a checkpoint is not from a training.
    """
    found = []
    for checkpoint in files.Checkpoints(folder / _FOLDER).newest_first():
        try:
            found.append(_of_the_network(weights_of(checkpoint, folder / _FOLDER)))
        except poptorch.Error as error:
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
    """Return a checkpoint whose weights have the names of ``models.create(...).state_dict()``."""
    return replace(
        found, model={name.removeprefix(_NETWORK): value for name, value in found.model.items()}
    )


def weights(folder: Path) -> Weights:
    """Return the newest undamaged checkpoint of a run, with the network's ``state_dict()``.

    Raises:
        ValueError: The run does not have a checkpoint.
    """
    return read(folder, 1)[0]


def check_weights(found: Weights, network: torch.nn.Module, where: str) -> None:
    """Check that the weights of a checkpoint have the same shapes as the weights of a network.

    Raises:
        ValueError: The shapes differ. The message names the first weight with another shape.
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
    """Return the newest undamaged checkpoint of a run. This call is collective.

    Raises:
        ValueError: The run does not have a checkpoint, or the newest is not from a training.
    """

    def read_it() -> Newest:
        found = weights(folder)
        steps = files.Checkpoints(folder / _FOLDER).steps()
        return Newest(found, tuple(step for step in steps if step > found.step))

    return instances.on_instance_0(read_it)
