"""Train ResNet-101 on CIFAR-10, pipelined over two IPUs, and make it fit and fast.

python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8
python main.py --model resnet18 --side 32 --batch-size 8 --steps 4 --epochs 2
poprun-py --num-instances 2 --num-replicas 2 --ipus-per-replica 2 main.py --model resnet18 --side 32

This is the training program of the IPU hands-on session, with its arguments. The second group of
arguments is an addition for small runs on two cores. The first printed line shows these arguments
only if they are given.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Collection
from pathlib import Path

# Imported before torch, so that torch's waiting threads sleep after about a millisecond.
from popdist_py import poptorch

# isort: split
import torch
import torchvision
from tqdm import tqdm

import popdist_py

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from common.arguments import HelpFormat, Parser, from_zero, positive  # noqa: E402
from common.running import run  # noqa: E402
from networks import NETWORKS, too_few_values  # noqa: E402
from utils import (  # noqa: E402
    ModelWithLoss,
    ModelWithNormalization,
    accuracy,
    get_transform,
    is_stand_in,
    training_set,
)

_STAGES = 2
_LEAST_ACCUMULATION = 2 * _STAGES - 1  # fewer micro-batches do not fill the pipeline


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments. ``args.shown`` is the line about the arguments that is printed."""
    parser = Parser(
        description=__doc__, formatter_class=HelpFormat, epilog="Page: docs/hands-on.md"
    )
    theirs = parser.add_argument_group("the session's arguments")
    theirs.add_argument("--batch-size", type=positive, default=64, help="of a micro-batch")
    theirs.add_argument(
        "--precision", choices=["32.32", "16.32", "16.16"], default="16.16",
        help="bits of data, and of the model",
    )  # fmt: skip
    theirs.add_argument(
        "--gradient-accumulation", type=positive, default=_LEAST_ACCUMULATION,
        help="micro-batches of an update",
    )  # fmt: skip
    theirs.add_argument(
        "--device-iterations", "--device-iteration", type=positive, default=1,
        help="updates of a call",
    )  # fmt: skip
    theirs.add_argument("--eight-bit-io", action="store_true", help="normalise images on the IPU")
    theirs.add_argument("--async-dataloader", action="store_true", help="load in another process")
    theirs.add_argument("--epochs", type=positive, default=5, help="passes over the images")
    theirs.add_argument("--replicas", type=positive, default=1, help="without the launcher only")
    session_names = parser.spellings().keys()
    ours = parser.add_argument_group("arguments of ours")
    ours.add_argument("--model", choices=list(NETWORKS), default="resnet101", help="the network")
    ours.add_argument("--side", type=positive, default=64, help="height and width of images")
    ours.add_argument("--steps", type=positive, help="calls of an epoch at most")
    ours.add_argument(
        "--data-dir", type=Path, default=HERE.parent / "datasets",
        help="holds cifar-10-batches-py; if it does not, a stand-in is made there",
    )  # fmt: skip
    ours.add_argument("--seed", type=from_zero, default=42, help="of weights, order and flips")
    ours.add_argument(
        "--device", choices=["mk1", "mk2", "bow"], default="mk2", help="IPUs that have to have room"
    )
    ours.add_argument(
        "--execution", choices=["loop", "fused", "auto"], default="loop",
        help="how the emulation runs replicas: loop compiles soonest",
    )  # fmt: skip
    ours.add_argument("--times", type=Path, metavar="FILE", help="write the time of each call")
    args = parser.parse_args(argv)
    if args.gradient_accumulation < _LEAST_ACCUMULATION:
        parser.error(
            f"argument --gradient-accumulation: {args.gradient_accumulation} is given, a pipeline "
            f"over {_STAGES} IPUs needs {_LEAST_ACCUMULATION} or more"
        )
    if why := too_few_values(args.batch_size, args.side):
        parser.error(why)
    if args.times and not args.times.parent.is_dir():
        parser.error(f"argument --times: {args.times.parent} is not a folder")
    parser.say_idle(
        args, (popdist_py.isPopdistEnvSet(), "the launcher gives the replicas", "replicas")
    )
    args.shown = _shown(args, session_names, parser)
    return args


def _shown(args: argparse.Namespace, names: Collection[str], parser: Parser) -> str:
    """Return the line that shows the session's arguments, and other arguments that are given.

    Args:
        args: All arguments.
        names: The names of the session's arguments. Other arguments with their default value are
            left out.
        parser: The parser, which knows the defaults.
    """
    values = vars(args).items()
    used = {name: v for name, v in values if name in names or v != parser.get_default(name)}
    told = {name: str(v) if isinstance(v, Path) else v for name, v in sorted(used.items())}
    return repr(argparse.Namespace(**told))


def training_options(args: argparse.Namespace) -> poptorch.DistributedOptions:
    """Return the options of the training model. Each instance trains its share of the replicas."""
    opts = poptorch.DistributedOptions()
    if not popdist_py.isPopdistEnvSet():
        opts.replicationFactor(args.replicas)
    opts.deviceIterations(args.device_iterations)
    opts.Training.gradientAccumulation(args.gradient_accumulation)
    opts.randomSeed(args.seed)
    opts.Emulator.replicaExecution(args.execution)
    opts.Emulator.device(args.device)  # refuses a model that does not fit on this IPU
    return opts


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the network with its loss, placed on two IPUs, in the precision of the arguments."""
    model = getattr(torchvision.models, args.model)()
    begins = NETWORKS[args.model]
    model.layer3[begins] = poptorch.BeginBlock(model.layer3[begins], ipu_id=1)

    input_dtype = torch.float16 if args.precision[:2] == "16" else torch.float32
    model_dtype = torch.float16 if args.precision[-2:] == "16" else torch.float32
    if args.eight_bit_io:
        model = ModelWithNormalization(model, dtype=input_dtype)
    return ModelWithLoss(model, torch.nn.CrossEntropyLoss()).to(model_dtype)


def build_optimizer(model: torch.nn.Module, precision: str) -> torch.optim.Optimizer:
    """Return AdamW. Only its second moments are not kept in the precision of the model."""
    if precision[-3:] != ".16":
        return poptorch.optim.AdamW(model.parameters(), lr=0.001)
    return poptorch.optim.AdamW(
        model.parameters(),
        lr=0.001,
        loss_scaling=1000,
        accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
        second_order_momentum_accum_type=torch.float32,
    )


def train_epoch(training_model, batches, bar) -> tuple[float, float, list[float]]:
    """Train on ``batches``; return the mean loss, the mean accuracy and the seconds of each call.

    The time of a call begins at the end of the previous call, so that it includes waiting for data.
    """
    losses, accuracies, seconds = [], [], []
    began = time.perf_counter()
    for images, labels in batches:
        out, loss = training_model(images, labels)
        losses.append(loss.float().mean().item())
        accuracies.append(accuracy(out, labels))
        bar.set_postfix_str(f"loss={losses[-1]:.3g}, acc={accuracies[-1]:.3g}", refresh=False)
        bar.update()
        ended = time.perf_counter()
        seconds.append(ended - began)
        began = ended
        if len(seconds) == bar.total:
            break
    return sum(losses) / len(losses), sum(accuracies) / len(accuracies), seconds


def train(training_model, loader, args: argparse.Namespace) -> tuple[list, list]:
    """Train, and return the loss and accuracy of each epoch, and the times of the calls.

    The loss and the accuracy are means over all instances.
    """
    speaks = popdist_py.getInstanceIndex() == 0
    results, times = [], []
    steps = min(len(loader), args.steps or len(loader))
    for epoch in range(1, args.epochs + 1):
        name = f"[Epoch {epoch:02d}]"
        with tqdm(total=steps, desc=name, disable=not speaks) as bar:
            *means, seconds = train_epoch(training_model, loader, bar)
        loss, acc = (popdist_py.all_reduce(m) / popdist_py.getNumInstances() for m in means)
        results.append((loss, acc))
        times.append(seconds)
        if speaks:
            print(f"{name} loss: {loss:.3f}, acc: {acc:.1f}", flush=True)
    if speaks and not math.isfinite(results[-1][0]):
        print(_NOT_FINITE, file=sys.stderr)
    return results, times


_NOT_FINITE = (
    "The loss is not finite: gradients, 1000 times as large, may leave the range of float16 where "
    "a batch normalisation sees few values. Raise --batch-size or --side, or take --precision 32.32"
)


def main(argv: list[str] | None = None) -> list[tuple[float, float]]:
    """Train, and return the loss and the accuracy of every epoch."""
    args = parse_arguments(argv)
    popdist_py.init()
    torch.manual_seed(args.seed)
    speaks = popdist_py.getInstanceIndex() == 0
    if speaks:
        print(args.shown, flush=True)
    dataset = training_set(
        args.data_dir, get_transform(args.precision, args.eight_bit_io, args.side)
    )
    if speaks and is_stand_in(dataset):
        print(f"not CIFAR-10, digits in its format: {args.data_dir}", file=sys.stderr)
    opts = training_options(args)
    mode = poptorch.DataLoaderMode.Async if args.async_dataloader else poptorch.DataLoaderMode.Sync
    loader = poptorch.DataLoader(opts, dataset, batch_size=args.batch_size, shuffle=True, mode=mode)
    if not len(loader):
        sys.exit(f"{len(dataset)} images are fewer than one call needs: lower --batch-size")
    model = build_model(args)
    optimizer = build_optimizer(model, args.precision)
    training_model = poptorch.trainingModel(model, opts, optimizer=optimizer)
    try:
        results, times = train(training_model, loader, args)
    except poptorch.Error as error:
        # Of memory, or of how the instances were started; both say what to do.
        sys.exit(error.message if speaks else 1)
    finally:
        loader.terminate()
        training_model.destroy()
    if args.times and speaks:
        samples = loader.combinedBatchSize * popdist_py.getNumInstances()
        args.times.write_text(json.dumps({"samples": samples, "seconds": times}))
    return results


if __name__ == "__main__":
    run(main)
