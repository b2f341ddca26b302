"""Checks of combinations of options, before a model is built or data is read."""

from __future__ import annotations

import argparse

import batch_sizes
import ipu_options

import popdist_py

__all__ = ["check"]


def check(args: argparse.Namespace) -> None:
    """Check that the options fit together.

    Raises:
        ValueError: Two options contradict each other. The text names accepted values.
    """
    found = batch_sizes.sizes(args)
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
    if batch_sizes.is_pipelined(args) and found.accumulation < least:
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
    ipu_options.memory_proportions(args)
    ipu_options.ipu_ids(args)


def _other_global_batch(args: argparse.Namespace, found: batch_sizes.Sizes) -> str:
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
