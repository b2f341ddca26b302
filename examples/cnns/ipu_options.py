"""PopTorch's options from the options of a program: replicas, precision, placement, devices."""

from __future__ import annotations

import argparse

import batch_sizes
import torch
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.popart import RecomputationType

__all__ = [
    "check_devices",
    "ipu_ids",
    "memory_proportions",
    "training_options",
    "validation_options",
]


def training_options(
    args: argparse.Namespace,
    num_samples: int | None = None,
    done: batch_sizes.Progress = batch_sizes.START,
) -> poptorch.Options:
    """Return the options of the training model.

    Args:
        args: All options of the program.
        num_samples: The number of images of an epoch. If it is None, a call of the device makes one
            weight update.
        done: The updates that the training has already made.

    Raises:
        ValueError: The images are too few for one update.
    """
    options = _options(args, device=0)
    if num_samples is not None:
        options.deviceIterations(batch_sizes.device_iterations(args, num_samples, done))
    options.outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(args.gradient_accumulation_count)
    if args.bn_span > 1 and args.norm == "batch":
        options.Training.distributedBatchNormReplicaGroupSize(args.bn_span)
    options._Popart.set("autoRecomputation", int(_recomputation(args)))
    return options


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
        if device < len(ids := ipu_ids(args)):
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
    if proportions := memory_proportions(args):
        options.setAvailableMemoryProportion(proportions)
    return options


def _recomputation(args: argparse.Namespace) -> RecomputationType:
    """Return the type of recomputation.

    It is always set explicitly, because PopTorch's pipelines recompute by default.
    """
    if not args.enable_recompute:
        return RecomputationType.NoRecompute
    return (
        RecomputationType.Pipeline if batch_sizes.is_pipelined(args) else RecomputationType.Standard
    )


def _strategy(args: argparse.Namespace) -> poptorch.ShardedExecution | poptorch.PipelinedExecution:
    """Return the execution strategy of the IPUs of a replica."""
    if not args.pipeline or args.pipeline_schedule == "Sequential":
        return poptorch.ShardedExecution()
    pipelined = poptorch.PipelinedExecution()
    if args.pipeline_schedule == "Interleaved":
        pipelined.setSchedule("interleaved")
    return pipelined


def _set_precision(options: poptorch.Options, args: argparse.Namespace) -> None:
    partials = torch.float16 if args.enable_half_partials else torch.float32
    options.Precision.setPartialsType(partials)
    options.Precision.enableStochasticRounding(
        args.stochastic_rounding and args.precision != "32.32"
    )
    options.Precision.enableFloatingPointExceptions(args.fp_exceptions)


def memory_proportions(args: argparse.Namespace) -> dict[str, float]:
    """Return the available memory proportion of each IPU.

    If the option has one value, this value is for all IPUs and operations. Otherwise the option has
    two values for each stage. This function returns the first of them, which is for convolutions.
    ``models.placement`` marks matrix products with the second value.

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


def ipu_ids(args: argparse.Namespace) -> list[int]:
    """Return the ids of --select-ipus; AUTO gives an empty list.

    Raises:
        ValueError: A value is not an id, an id is repeated, or there are more than two ids.
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


def check_devices(args: argparse.Namespace) -> None:
    """Attach to each device of --select-ipus once, before the training, and release it.

    Without this check, a wrong id of the validation's device would end the training only after an
    epoch.

    Raises:
        ValueError: The id is unknown, or the device is in use or has another number of IPUs.
    """
    if popdist_py.isPopdistEnvSet():
        return
    for ipu_id in ipu_ids(args):
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
