"""Average the weights of a training's last checkpoints, which often improves the accuracy.

The mean gives all checkpoints the same weight. The exponential average gives newer checkpoints more
weight. The program validates the average and the newest checkpoint, and writes the better weights
to ``weights.pt`` in the folder of the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import checkpoints
import configurations
import datasets
import idle_options
import instances
import ipu_options
import models
import torch
from arguments import make_parser
from common.running import run as run_program
from file_writing import private, replaced_at_end
from torch import nn
from validation import Validation, arguments_of, network_for

import popdist_py

__all__ = ["Averaged", "average", "main", "mean_of", "shares", "with_statistics"]

_EXAMPLE = "python examples/cnns/weight_avg.py --restore-path logs/RN20_bs32_BN_16.16_v0.2.0_x7Q"
_FILE = "weights.pt"
_IMAGES = 2048  # images for new estimates of the batch norm statistics
_ANEW = ", with statistics of training images"

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Averaged:
    """The result of an average.

    Attributes:
        path: The file of the better weights, for ``torch.load``.
        count: The number of averaged checkpoints.
        last: The accuracy of the newest checkpoint in per cent; None without a validation.
        average: The accuracy of the averaged weights in per cent; None without a validation.
    """

    path: Path
    count: int
    last: float | None
    average: float | None


def average(folder: Path, args: argparse.Namespace, say: Callable[[str], None]) -> Averaged:
    """Write the average of the last weights, or the newest weights if they are better. Collective.

    Args:
        folder: The folder of the run.
        args: The options of the training. ``weight_avg``, ``weight_avg_count`` and
            ``weight_avg_decay`` choose the average.
        say: A function that prints a line.

    Raises:
        ValueError: A checkpoint is missing or of another model.
    """
    found = instances.on_instance_0(lambda: checkpoints.read(folder, args.weight_avg_count))
    states = [each.model for each in found]
    images = instances.together(lambda: datasets.load(args, training=True))
    network = instances.together(lambda: network_for(found, folder, args, images))
    made = {"": mean_of(states, shares(args, len(states)))}
    if args.norm == "batch":
        made[_ANEW] = with_statistics(made[""], args, images)
    path = folder / _FILE
    if not args.validation:
        kept = made.get(_ANEW, made[""])
        instances.on_instance_0(lambda: _write(path, kept))
        say(f"{args.weight_avg} of {len(states)} without a validation: {path}")
        return Averaged(path, len(states), None, None)
    others = instances.together(lambda: datasets.load(args, training=False))
    validation = Validation(network, args, others)
    last = validation.accuracy(states[-1])
    accuracies = {how: validation.accuracy(state) for how, state in made.items()}
    validation.close()
    best = max(accuracies, key=accuracies.__getitem__)
    kept = made[best] if accuracies[best] >= last else states[-1]
    instances.on_instance_0(lambda: _write(path, kept))
    result = Averaged(path, len(states), last, accuracies[best])
    say(_said(result, args.weight_avg, best))
    return result


def _said(result: Averaged, kind: str, how: str) -> str:
    gain = result.average - result.last
    kept = "average" if gain >= 0 else "last weights"
    return (
        f"last epoch {result.last:.1f} %, {kind} of {result.count} {result.average:.1f} % "
        f"({gain:+.1f}{how}): {result.path} has the {kept}"
    )


def shares(args: argparse.Namespace, count: int) -> list[float]:
    """Return the share of each checkpoint in the average, oldest first. The sum of shares is 1."""
    decay = args.weight_avg_decay if args.weight_avg == "exponential" else 1.0
    parts = [decay ** (count - 1 - index) for index in range(count)]
    return [part / sum(parts) for part in parts]


def mean_of(states: Sequence[State], parts: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of states, computed in float64.

    Integers in the result are from the newest state.
    """
    made = {}
    for name, newest in states[-1].items():
        if newest.is_floating_point():
            total = sum(
                part * state[name].double() for part, state in zip(parts, states, strict=True)
            )
            made[name] = total.to(newest.dtype)
        else:
            made[name] = newest.clone()
    return made


def with_statistics(
    state: State, args: argparse.Namespace, images: datasets.Images
) -> dict[str, torch.Tensor]:
    """Return a state with new batch norm statistics from training images. Collective.

    The mean of several checkpoints' statistics differs from the statistics of the averaged weights.
    The host computes the new statistics in float32, with the micro-batch size of the training.
    """
    plain = argparse.Namespace(**{**vars(args), "precision": "32.32"})
    network = models.create(plain, images.num_classes)
    network.load_state_dict(state)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    _show_images(models.ForTraining(network, plain, images).train(), args, images)
    fresh = {
        name: popdist_py.all_reduce(value, "mean")
        for name, value in network.named_buffers()
        if value.is_floating_point()
    }
    return {name: fresh.get(name, value).to(value.dtype) for name, value in state.items()}


@torch.no_grad()
def _show_images(module: nn.Module, args: argparse.Namespace, images: datasets.Images) -> None:
    """Run the network on this instance's part of the first training images."""
    loader = datasets.loader(args, ipu_options.training_options(args), images, training=True)
    left = max(_IMAGES // popdist_py.getNumInstances(), 1)
    for pictures, _ in loader:
        for some in pictures.split(args.batch_size):
            module.network(module.images(some))
        left -= len(pictures)
        if left <= 0:
            break
    loader.terminate()


def _write(path: Path, state: State) -> None:
    """Write weights into a complete file that only its owner can read."""
    with private(), replaced_at_end(path) as partial, partial.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def main(argv: list[str] | None = None) -> Averaged:
    """Average the checkpoints of ``--restore-path``."""
    parser = make_parser(__doc__.splitlines()[0], _EXAMPLE)
    folder, own = configurations.given_for_run(parser, argv)
    popdist_py.init()
    try:
        args = arguments_of(folder, own)
        own_too = ("weight_avg", "weight_avg_count", "weight_avg_decay", "batch_size", "seed")
        if line := idle_options.line_of_validation(own, besides=own_too):
            instances.say(line)
        args.weight_avg = args.weight_avg or "mean"
        return average(folder, args, instances.say)
    except ValueError as error:
        instances.end(error)


if __name__ == "__main__":
    run_program(main)
