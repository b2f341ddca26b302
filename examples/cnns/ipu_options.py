"""PopTorch's options from the options of a program: replicas, batches, precision and placement.

This module also checks that the options of a program fit together.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.popart import RecomputationType

__all__ = [
    "START",
    "Progress",
    "Sizes",
    "Updates",
    "accumulation",
    "check",
    "check_devices",
    "device_iterations",
    "distribution",
    "ignored",
    "replicas",
    "sizes",
    "training_options",
    "updates",
    "validation_options",
]


@dataclass(frozen=True)
class Sizes:
    """The sizes that make up the global batch of one weight update.

    Attributes:
        micro_batch: The images of one forward and backward pass of a replica.
        accumulation: The passes of a replica before an update.
        replicas: The number of replicas of all instances.
        instances: The number of processes that share the replicas.
    """

    micro_batch: int
    accumulation: int
    replicas: int
    instances: int

    @property
    def global_batch(self) -> int:
        """The images of one weight update, over all replicas and all passes."""
        return self.micro_batch * self.accumulation * self.replicas


def sizes(args: argparse.Namespace) -> Sizes:
    """Return the sizes of a training."""
    return Sizes(
        args.batch_size,
        args.gradient_accumulation_count,
        replicas(args),
        popdist_py.getNumInstances(),
    )


@dataclass(frozen=True)
class Updates:
    """The numbers of weight updates of a training. They do not depend on the length of a call.

    Attributes:
        of_epoch: The updates of one epoch. Images that do not fill a global batch are left out.
        total: The updates of the whole training.
    """

    of_epoch: int
    total: int


@dataclass(frozen=True)
class Progress:
    """The number of weight updates that a training has made.

    Attributes:
        total: The updates since the start of the training.
        of_epoch: The updates since the start of the current epoch.
    """

    total: int = 0
    of_epoch: int = 0


START = Progress()


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


def replicas(args: argparse.Namespace) -> int:
    """Return the number of replicas of all instances, which the launcher sets if there is one."""
    launched = popdist_py.isPopdistEnvSet()
    return popdist_py.getNumTotalReplicas() if launched else args.replicas


def accumulation(args: argparse.Namespace) -> int:
    """Return the micro-batches of an update if --gradient-accumulation-count is not given.

    Raises:
        ValueError: The global batch size is not a multiple of micro-batch size x replicas.
    """
    if args.global_batch_size is None:
        return 2 * args.shards if _is_pipelined(args) else 1
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


def _is_pipelined(args: argparse.Namespace) -> bool:
    """Return whether the IPUs of a replica compute different micro-batches at the same time."""
    return args.pipeline and args.shards > 1 and args.pipeline_schedule != "Sequential"


def check(args: argparse.Namespace) -> None:
    """Check that the options fit together.

    Raises:
        ValueError: Two options contradict each other. The text names accepted values.
    """
    found = sizes(args)
    if args.global_batch_size not in (None, found.global_batch):
        raise ValueError(_other_global_batch(args, found))
    if found.replicas % args.bn_span:
        spans = [str(n) for n in range(1, found.replicas + 1) if found.replicas % n == 0]
        raise ValueError(
            f"--BN-span {args.bn_span} is given, a divisor of the {found.replicas} replicas is "
            f"accepted: {', '.join(spans)}"
        )
    if args.pipeline_splits and not args.pipeline:
        raise ValueError("--pipeline-splits is given without --pipeline: add it, or leave it out")
    least = 2 * args.shards - 1  # fewer micro-batches do not fill the pipeline
    if _is_pipelined(args) and found.accumulation < least:
        raise ValueError(
            f"a pipeline over {args.shards} IPUs accumulates {least} micro-batches or more, and "
            f"{found.accumulation} are asked for: take --gradient-accumulation-count {least}"
        )
    if args.distributed and args.batches_per_step != 1:
        raise ValueError(
            f"--distributed is given with --batches-per-step {args.batches_per_step}: only 1 is "
            "accepted with it; give --batches-per-step 1, or leave --distributed out, which the "
            "launcher does not need"
        )
    _proportions(args)
    _ipu_ids(args)


def _other_global_batch(args: argparse.Namespace, found: Sizes) -> str:
    per_replica = found.micro_batch * found.accumulation
    fits = [f"--global-batch-size {found.global_batch}"]
    if args.global_batch_size % per_replica == 0:
        where = "--num-replicas" if popdist_py.isPopdistEnvSet() else "--replicas"
        fits.append(f"{where} {args.global_batch_size // per_replica}")
    at_once = found.micro_batch * found.replicas
    if args.global_batch_size % at_once == 0:
        fits.append(f"--gradient-accumulation-count {args.global_batch_size // at_once}")
    return (
        f"a global batch of {args.global_batch_size:,} images is asked for, and micro-batch "
        f"{found.micro_batch} x accumulation {found.accumulation} x {found.replicas} replicas are "
        f"{found.global_batch:,}: take {' or '.join(fits)}"
    )


def ignored(args: argparse.Namespace) -> str | None:
    """Return the log line that names options that the launcher overrides, if there are any."""
    if not popdist_py.isPopdistEnvSet():
        return None
    found = []
    if args.replicas not in (1, replicas(args)):
        found.append(f"--replicas {args.replicas}")
    if args.select_ipus:
        found.append(f"--select-ipus {' '.join(args.select_ipus)}")
    if not found:
        return None
    return f"{' and '.join(found)}: ignored, the launcher gives {replicas(args)} replicas"


def distribution(args: argparse.Namespace) -> str | None:
    """Return the log line that explains that --distributed is ineffective, if it is given."""
    if not args.distributed:
        return None
    if popdist_py.isPopdistEnvSet():
        does = f"the launcher distributes the training, over {popdist_py.getNumInstances()}"
        return f"--distributed has no effect of its own: {does} instances"
    return (
        "--distributed has no effect: one process trains; poprun --num-instances N python "
        "train.py ... distributes the training"
    )


# --- options of PopTorch ----------------------------------------------------------------------


def device_iterations(args: argparse.Namespace, num_samples: int, done: Progress = START) -> int:
    """Return the weight updates of one call of the device.

    The number is limited by ``--batches-per-step`` and by the updates between two log lines. It
    divides the updates of an epoch and of the training, so that no update is left out.

    Args:
        args: All options.
        num_samples: The number of images of an epoch.
        done: The updates that the training has made before.

    Raises:
        ValueError: The images are too few for one update.
    """
    wanted = updates(args, num_samples)
    most = max(1, args.batches_per_step // sizes(args).accumulation)
    most = max(1, min(most, wanted.of_epoch // args.logs_per_epoch))
    whole = math.gcd(wanted.of_epoch, done.of_epoch, max(0, wanted.total - done.total))
    return next(n for n in range(min(most, whole), 0, -1) if whole % n == 0)


def training_options(
    args: argparse.Namespace, num_samples: int | None = None, done: Progress = START
) -> poptorch.Options:
    """Return the options of the training model.

    Args:
        args: All options of the program.
        num_samples: The number of images of an epoch. If it is None, a call of the device makes one
            weight update.
        done: The updates that the training has made before.

    Raises:
        ValueError: The images are too few for one update.
    """
    options = _options(args, device=0)
    if num_samples is not None:
        options.deviceIterations(device_iterations(args, num_samples, done))
    options.outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(args.gradient_accumulation_count)
    if args.bn_span > 1 and args.norm == "batch":
        options.Training.distributedBatchNormReplicaGroupSize(args.bn_span)
    options._Popart.set("autoRecomputation", int(_recomputation(args)))
    return options


def _recomputation(args: argparse.Namespace) -> RecomputationType:
    """Return the recomputation, which is always set: PopTorch's pipelines recompute by default."""
    if not args.enable_recompute:
        return RecomputationType.NoRecompute
    return RecomputationType.Pipeline if _is_pipelined(args) else RecomputationType.Standard


def validation_options(args: argparse.Namespace) -> poptorch.Options:
    """Return the options of the validation model, which takes one micro-batch per call.

    One micro-batch does not fill a pipeline, so the IPUs of a replica work one after the other.
    """
    options = _options(args, device=1)
    options.setExecutionStrategy(poptorch.ShardedExecution())
    # With stochastic rounding, the answers would depend on the number of instances.
    options.Precision.enableStochasticRounding(False)
    return options


def _options(args: argparse.Namespace, device: int) -> poptorch.Options:
    """Return the options that training and validation share.

    Args:
        args: All options of the program.
        device: The position of the model's device in --select-ipus.
    """
    if popdist_py.isPopdistEnvSet():
        options = poptorch.DistributedOptions()
    else:
        options = poptorch.Options().replicationFactor(args.replicas)
        # Without a second id, validation uses any free device.
        if device < len(ids := _ipu_ids(args)):
            options.useIpuId(ids[device])
    if args.seed is not None:
        options.randomSeed(args.seed)
    if args.device is not None:
        options.Emulator.device(args.device)
    if args.deterministic:
        options.Emulator.deterministicReduction()
    if args.synthetic_data:
        options.enableSyntheticData(True)
    options.setExecutionStrategy(_strategy(args))
    options.autoRoundNumIPUs(True)
    _set_precision(options, args)
    if proportions := _proportions(args):
        options.setAvailableMemoryProportion(proportions)
    return options


def _strategy(args: argparse.Namespace) -> poptorch.ShardedExecution | poptorch.PipelinedExecution:
    """Return the execution strategy of the IPUs of a replica."""
    if not args.pipeline or args.pipeline_schedule == "Sequential":
        return poptorch.ShardedExecution()
    pipelined = poptorch.PipelinedExecution()
    if args.pipeline_schedule == "Interleaved":
        pipelined.setSchedule("interleaved")
    return pipelined


class _OneOperationPerIpu(nn.Module):
    """The smallest model that needs all IPUs of a replica."""

    def __init__(self, num_ipus: int) -> None:
        super().__init__()
        self.num_ipus = num_ipus

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        for ipu in range(self.num_ipus):
            with poptorch.Block(ipu_id=ipu):
                numbers = numbers + 1
        return numbers


def check_devices(args: argparse.Namespace) -> None:
    """Attach to each device of --select-ipus once, before the training, and give it back.

    Without this check, a wrong id of the validation's device would end the training after an epoch.

    Raises:
        ValueError: The id is unknown, or the device is in use or has another number of IPUs.
    """
    if popdist_py.isPopdistEnvSet():
        return
    for ipu_id in _ipu_ids(args):
        options = poptorch.Options().useIpuId(ipu_id).replicationFactor(args.replicas)
        options.setExecutionStrategy(poptorch.ShardedExecution()).autoRoundNumIPUs(True)
        options.showCompilationProgressBar(False).Emulator.replicaExecution("loop")
        model = poptorch.inferenceModel(_OneOperationPerIpu(args.shards), options)
        try:
            model.compile(torch.zeros(args.replicas))
        except poptorch.Error as error:
            raise ValueError(f"--select-ipus {ipu_id}: {error.message}") from None
        finally:
            model.destroy()


def _set_precision(options: poptorch.Options, args: argparse.Namespace) -> None:
    partials = torch.float16 if args.enable_half_partials else torch.float32
    options.Precision.setPartialsType(partials)
    options.Precision.enableStochasticRounding(
        args.stochastic_rounding and args.precision != "32.32"
    )
    options.Precision.enableFloatingPointExceptions(args.fp_exceptions)


def _proportions(args: argparse.Namespace) -> dict[str, float]:
    """Return the available memory proportion of each IPU.

    One value holds for all products. Otherwise there are two values for each stage. This function
    returns the first value, which is for convolutions. ``models.placement`` marks matrix products
    with the second value.

    Raises:
        ValueError: The number of values is wrong.
    """
    values = args.available_memory_proportion
    if not values:
        return {}
    if len(values) == 1:
        values = values * 2 * args.shards
    if len(values) != 2 * args.shards:
        raise ValueError(
            f"--available-memory-proportion has {len(values)} values: one is accepted, or two for "
            f"each of the {args.shards} stages, which are {2 * args.shards}"
        )
    return {f"IPU{ipu}": value for ipu, value in enumerate(values[::2])}


def _ipu_ids(args: argparse.Namespace) -> list[int]:
    """Return the ids of --select-ipus; AUTO gives an empty list.

    Raises:
        ValueError: A word is not an id, an id is repeated, or there are more than two.
    """
    words = args.select_ipus or []
    if words == ["AUTO"]:
        return []
    if len(words) > 2 or not all(word.isdecimal() for word in words):
        raise ValueError(
            f"--select-ipus {' '.join(words)} is given, AUTO or one or two ids (numbers from 0 on) "
            "are accepted"
        )
    ids = [int(word) for word in words]
    if len(ids) > len(set(ids)):
        raise ValueError(
            f"--select-ipus {' '.join(words)} is given: training and validation have two different "
            "ids; leave out the second one for any that is free"
        )
    return ids
