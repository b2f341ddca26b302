"""Batch sizes: the numbers of images in a micro-batch, a weight update and a call of the device."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import popdist_py

__all__ = [
    "START",
    "Progress",
    "Sizes",
    "Updates",
    "accumulation",
    "device_iterations",
    "is_pipelined",
    "replicas",
    "sizes",
    "updates",
]


@dataclass(frozen=True)
class Sizes:
    """The sizes that make up the global batch of one weight update.

    Attributes:
        micro_batch: The number of images in one forward and backward pass of a replica.
        accumulation: The number of forward and backward passes of a replica before an update.
        replicas: The number of replicas of all instances.
        instances: The number of processes that share the replicas.
    """

    micro_batch: int
    accumulation: int
    replicas: int
    instances: int

    @property
    def global_batch(self) -> int:
        """The number of images for one weight update, over all replicas and all passes."""
        return self.micro_batch * self.accumulation * self.replicas


def sizes(args: argparse.Namespace) -> Sizes:
    """Return the batch sizes of a training."""
    return Sizes(
        args.batch_size,
        args.gradient_accumulation_count,
        replicas(args),
        popdist_py.getNumInstances(),
    )


def replicas(args: argparse.Namespace) -> int:
    """Return the number of replicas of all instances.

    If the launcher started the program, the launcher's number of replicas is used.
    """
    launched = popdist_py.isPopdistEnvSet()
    return popdist_py.getNumTotalReplicas() if launched else args.replicas


def accumulation(args: argparse.Namespace) -> int:
    """Return the micro-batches of one update, for a missing --gradient-accumulation-count.

    Raises:
        ValueError: The global batch size is not a multiple of micro-batch size x replicas.
    """
    if args.global_batch_size is None:
        return 2 * args.shards if is_pipelined(args) else 1
    at_once = args.batch_size * replicas(args)
    count, rest = divmod(args.global_batch_size, at_once)
    if rest:
        near = [at_once * count] * bool(count) + [at_once * (count + 1)]
        raise ValueError(
            f"--global-batch-size {args.global_batch_size:,} is given, {replicas(args)} replicas "
            f"with micro-batches of {args.batch_size} reach multiples of {at_once}: "
            f"take {' or '.join(f'{size:,}' for size in near)}"
        )
    return count


def is_pipelined(args: argparse.Namespace) -> bool:
    """Return whether the IPUs of a replica compute different micro-batches at the same time."""
    return args.pipeline and args.shards > 1 and args.pipeline_schedule != "Sequential"


@dataclass(frozen=True)
class Updates:
    """The numbers of weight updates of a training.

    These numbers do not depend on how many updates one call of the device makes.

    Attributes:
        of_epoch: The number of updates in one epoch. Images that do not fill a global batch are
            left out.
        total: The number of updates in the whole training.
    """

    of_epoch: int
    total: int


def updates(args: argparse.Namespace, num_samples: int) -> Updates:
    """Return the numbers of weight updates of a training.

    Args:
        args: All options.
        num_samples: The number of images of an epoch.

    Raises:
        ValueError: The images are too few for one update.
    """
    global_batch = sizes(args).global_batch
    of_epoch = num_samples // global_batch
    if not of_epoch:
        raise ValueError(
            f"{num_samples:,} images are fewer than a global batch of {global_batch:,}: "
            "lower --batch-size, --gradient-accumulation-count or the replicas"
        )
    return Updates(of_epoch, args.iterations or args.epochs * of_epoch)


@dataclass(frozen=True)
class Progress:
    """The number of weight updates that a training has made.

    Attributes:
        total: The number of updates since the start of the training.
        of_epoch: The number of updates since the start of the current epoch.
    """

    total: int = 0
    of_epoch: int = 0


START = Progress()


def device_iterations(args: argparse.Namespace, num_samples: int, done: Progress = START) -> int:
    """Return the number of weight updates in one call of the device.

    ``--batches-per-step`` and the number of updates between two log lines limit this number. The
    numbers of updates in an epoch and in the training are multiples of it, so that no update is
    left out.

    Args:
        args: All options.
        num_samples: The number of images of an epoch.
        done: The updates that the training has already made.

    Raises:
        ValueError: The images are too few for one update.
    """
    wanted = updates(args, num_samples)
    most = max(1, args.batches_per_step // sizes(args).accumulation)
    most = max(1, min(most, wanted.of_epoch // args.logs_per_epoch))
    whole = math.gcd(wanted.of_epoch, done.of_epoch, max(0, wanted.total - done.total))
    return next(n for n in range(min(most, whole), 0, -1) if whole % n == 0)
