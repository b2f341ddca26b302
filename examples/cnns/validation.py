"""Validate the checkpoints of a training, and print the same accuracy as the training.

Every image of the validation set counts once, for any number of instances and replicas.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import checkpoints
import configurations
import datasets
import idle_options
import instances
import ipu_options
import log
import models
import run_folder
import torch
from arguments import make_parser
from common.running import run
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import Weights

__all__ = ["Validation", "arguments_of", "main", "network_for"]

_EXAMPLE = "python examples/cnns/validation.py --restore-path logs/RN20_bs32_BN_16.16_v0.2.0_x7Q"

# Options that must fit the replicas of a training, and that a validation does not use.
_ONLY_OF_TRAINING = {
    "global_batch_size": None,
    "gradient_accumulation_count": None,
    "replicas": 1,
    "bn_span": 1,
}


class Validation:
    """A validation with its own copy of a network, so that the training of the network can go on.

    Args:
        network: The network, made by ``models.create``.
        args: The options of the program.
        images: The validation set.
    """

    def __init__(
        self, network: nn.Module, args: argparse.Namespace, images: datasets.Images
    ) -> None:
        options = ipu_options.validation_options(args)
        self._network = copy.deepcopy(network).eval()
        self._number = len(images.data)
        self._loader = datasets.loader(args, options, images, training=False)
        module = models.ForValidation(self._network, args, images).eval()
        self._model = poptorch.inferenceModel(module, options)

    def accuracy(self, weights: Mapping[str, torch.Tensor] | None = None) -> float:
        """Return the accuracy on the validation set, in per cent. Collective.

        Args:
            weights: The ``state_dict()`` of a network; None keeps the current weights. All
                instances use the batch norm statistics of instance 0, as checkpoints do.

        Raises:
            Agreed: Images are damaged. All instances raise this error.
        """
        if weights is not None:
            self._network.load_state_dict(weights)
        popdist_py.broadcast(dict(self._network.named_buffers()))
        if self._model.isCompiled():
            self._model.copyWeightsToDevice()
        right = instances.together(self._right_answers)
        return 100 * popdist_py.all_reduce(right) / self._number

    def _right_answers(self) -> int:
        answers = ((self._model(pictures), labels) for pictures, labels in self._loader)
        return sum(int((answer == labels).sum()) for answer, labels in answers)

    def close(self) -> None:
        """Release the device."""
        self._model.destroy()
        self._loader.terminate()


def main(argv: list[str] | None = None) -> list[float]:
    """Print and return the accuracy of the newest checkpoint or of all of them, in per cent."""
    parser = make_parser(__doc__.splitlines()[0], _EXAMPLE)
    parser.add_argument("--all", action="store_true", help="all checkpoints, not only the newest")
    folder, own = configurations.given_for_run(parser, argv)
    is_all = own.pop("all")
    popdist_py.init()
    try:
        args = arguments_of(folder, own)
        if line := idle_options.line_of_validation(own):
            instances.say(line)
        return _validate_all(folder, args, None if is_all else 1)
    except ValueError as error:
        instances.end(error)


def arguments_of(folder: Path, own: Mapping[str, Any]) -> argparse.Namespace:
    """Return the arguments of the run in ``folder``, overridden by ``own``. Collective.

    Raises:
        ValueError: The folder does not hold a run, or the options do not fit together.
    """
    values = instances.on_instance_0(lambda: run_folder.read_arguments(folder))
    saved = vars(configurations.from_dict(values))
    return instances.together(lambda: _for_validation(folder, saved, own))


def _for_validation(
    folder: Path, saved: Mapping[str, Any], own: Mapping[str, Any]
) -> argparse.Namespace:
    if "config" in own and own["config"] != saved["config"]:
        raise ValueError(
            f"--config {own['config']} is given, and {folder} was trained with "
            f"{saved['config'] or 'none'}, whose options count: leave it out"
        )
    return configurations.complete(configurations.with_options(saved, {**_ONLY_OF_TRAINING, **own}))


def network_for(
    found: Sequence[Weights], folder: Path, args: argparse.Namespace, images: datasets.Images
) -> nn.Module:
    """Return a network whose weights have the same shapes as the weights of the checkpoints.

    Raises:
        ValueError: The checkpoints belong to another model.
    """
    network = models.create(args, images.num_classes)
    for each in found:
        where = f"the checkpoint of step {each.step} in {folder}"
        checkpoints.check_weights(each, network, where)
    return network


def _validate_all(folder: Path, args: argparse.Namespace, count: int | None) -> list[float]:
    found: list[Weights] = instances.on_instance_0(lambda: checkpoints.read(folder, count))
    images = instances.together(lambda: datasets.load(args, training=False))
    network = instances.together(lambda: network_for(found, folder, args, images))
    validation = Validation(network, args, images)
    accuracies = []
    for each in found:
        accuracies.append(validation.accuracy(each.model))
        instances.say(log.validation_line(each.step, each.extra["epoch"], accuracies[-1]))
    validation.close()
    return accuracies


if __name__ == "__main__":
    run(main)
