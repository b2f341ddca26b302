"""Train a CNN on CIFAR or ImageNet, with one instance or with several.

python examples/cnns/train.py --config mk2_resnet8_test
poprun-py --num-instances 2 --num-replicas 8 examples/cnns/train.py --data-dir data --model-size 8

Every instance runs this file and feeds its own images to its local replicas. At the end, all
instances have the same weights. Instance 0 shows the progress and writes the log. The page
docs/cnns.md explains the program.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

# This import stands before torch, so that torch's waiting threads sleep after about a millisecond.
from popdist_py import poptorch

# isort: split
sys.path.append(str(Path(__file__).resolve().parents[1]))
import batch_sizes
import checkpoints
import configurations
import datasets
import instances
import log
import models
import torch
from common.running import run as run_program
from training import NotFinite, Result, Training

import popdist_py

__all__ = ["Result", "carry_out", "main", "train"]

_EXAMPLE = "python examples/cnns/train.py --config mk2_resnet8_test --epochs 1"


def main(argv: list[str] | None = None) -> Result | None:
    """Train, and return the result. With --pipeline but without splits, list possible splits."""
    args = configurations.parse(argv, __doc__, _EXAMPLE)
    if args.pipeline and not args.pipeline_splits:
        return _list_splits(args)
    popdist_py.init()
    return carry_out(args)


def _list_splits(args: argparse.Namespace) -> None:
    """Print the layers where the network can be cut, one per line."""
    if popdist_py.getInstanceIndex() != 0:
        return
    with torch.device("meta"):
        possible = models.splits(models.create(args, num_classes=10))
    print(
        "--pipeline-splits takes the first layers of later stages, of these:", *possible, sep="\n"
    )


def carry_out(args: argparse.Namespace, resume: Path | None = None) -> Result:
    """Train, and end the program with one line and an exit code if an error occurs.

    Raises:
        SystemExit: The exit code is 2 for a wrong option, 1 for an error during the training, and
            75 after a stop request.
    """
    try:
        result = train(args, resume)
    except ValueError as error:
        instances.end(error)
    except (NotFinite, poptorch.Error) as error:
        instances.end(error, code=1)
    if result.stopped:
        sys.exit(popdist_py.RESUME_EXIT_CODE)
    return result


def train(args: argparse.Namespace, resume: Path | None = None) -> Result:
    """Train with these options, or continue the training in the folder ``resume``.

    All instances call this function together.

    Raises:
        ValueError: Options, data and checkpoints do not fit together. No weight was updated.
        NotFinite: The loss is infinite or NaN.
        poptorch.Error: The device does not have enough memory for the model.
    """
    if args.seed is not None:
        torch.manual_seed(args.seed)
    seed = datasets.seed_of_order(args)
    found = None if resume is None else checkpoints.newest(resume)
    done = batch_sizes.START if found is None else found.done
    training = instances.together(lambda: Training(args, seed, done))
    try:
        run = log.Run(args, resume)
        with contextlib.closing(run):
            return training.carry_out(run, found)
    finally:
        training.close()


if __name__ == "__main__":
    run_program(main)
