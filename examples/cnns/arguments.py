"""All options of the CNN programs: their names, accepted values and defaults.

An option with the default None has a default that depends on the model and the data set.
``configurations.py`` sets this default.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, from_zero, positive, rate, worker_count

__all__ = ["DATASETS", "DEVICES", "MODELS", "OPTIMISERS", "PRECISIONS", "SCHEDULES", "make_parser"]

MODELS = ("resnet", "resnext", "efficientnet")
DATASETS = ("cifar-10", "cifar-100", "imagenet")
SCHEDULES = ("stepped", "cosine", "exponential", "polynomial_decay_lr")
OPTIMISERS = ("SGD", "momentum", "RMSProp", "LARS")
DEVICES = ("mk1", "mk2", "bow")
PRECISIONS = ("16.16", "16.32", "32.32")


#: The defaults that depend on other options or on the data, as --help shows them.
#: ``configurations.py`` sets these defaults.
FOLLOWS = {
    "model_size": "20, 29, B0 for CIFAR; 50, 50, B0 for ImageNet",
    "data_dir": "$DATA_DIR",
    "dataset": "inferred from the files of --data-dir",
    "generated_samples": "as many as the data set has",
    "image_size": "32 for CIFAR, 224 for ImageNet",
    "seed": "another each time",
    "epochs": "160 for CIFAR, 100 for ImageNet",
    "iterations": "those of the epochs",
    "batch_size": "32 for CIFAR, 4 for ImageNet",
    "global_batch_size": "micro-batch x gradient accumulation x replicas",
    "gradient_accumulation_count": "1; of a pipeline twice its stages",
    "base_learning_rate_exponent": "for CIFAR -7 with SGD, -10 with momentum, -14 with RMSProp, -8 "
    "with LARS; for ImageNet -8, -11, -14, -8",
    "available_memory_proportion": "the device's own",
    "select_ipus": "AUTO",
    "valid_batch_size": "that of the training",
}


class _Help(HelpFormat):
    """A help text that shows all defaults, including defaults that depend on other options."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.dest in FOLLOWS:
            return f"{action.help} (default: {FOLLOWS[action.dest]})"
        if action.default is None or action.default in ("", []):
            return action.help
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{action.help} (default: {'yes' if action.default else 'no'})"
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def make_parser(description: str, example: str, kind: type[Parser] = Parser) -> Parser:
    """Return a parser of all options.

    A switch has two options, ``--NAME`` and ``--no-NAME``. With ``--no-NAME``, the command line can
    turn off a switch that a configuration turns on.

    Args:
        description: The description of the program for ``--help``.
        example: A command that runs the program.
        kind: The class of the parser.
    """
    parser = kind(description=description, epilog=f"Example: {example}", formatter_class=_Help)
    for add in (_model, _data, _training, _rates, _optimiser, _ipu, _validation, _logging, _config):
        add(parser)
    return parser


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=MODELS, default="resnet", help="the network")
    group.add_argument("--model-size",
                       help="layers: for CIFAR 8, 14, 20, 32, 44, 56 of resnet, 11, 29 of resnext; "
                       "for ImageNet 18, 34, 50, and 50; B0 of efficientnet")  # fmt: skip
    norms = group.add_mutually_exclusive_group()
    norms.add_argument("--batch-norm", dest="norm", action="store_const", const="batch",
                       help="batch normalisation (the default for CIFAR)")  # fmt: skip
    norms.add_argument("--group-norm", dest="norm", action="store_const", const="group",
                       help="group normalisation (the default for ImageNet)")  # fmt: skip
    group.add_argument("--groups", type=positive, default=32, help="of the group normalisation")
    group.add_argument("--BN-span", dest="bn_span", type=positive, default=1,
                       help="replicas that share the statistics of a batch norm")  # fmt: skip
    group.add_argument("--BN-momentum", dest="bn_momentum", type=rate, default=0.97,
                       help="share of the running statistics that a step keeps")  # fmt: skip


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", choices=DATASETS, help="what the images are")
    group.add_argument("--data-dir", type=Path, help="folder of the data")
    _flag(group, "--generated-data", "random images made on the host, instead of a data set")
    _flag(
        group,
        "--synthetic-data",
        "random images made on the device: nothing is transferred, "
        "and losses and accuracies mean nothing",
    )
    group.add_argument("--generated-samples", type=positive, help="random images of an epoch")
    group.add_argument("--image-size", type=positive, help="side of an image that the model sees")
    _flag(group, "--eight-bit-io", "transfer images as 8 bits")
    _flag(group, "--hostside-norm", "normalise images on the host, not on the IPU", default=True)
    _flag(
        group,
        "--standard-imagenet",
        "all instances share the images of all files, in one order; without it, each instance "
        "reads files of its own",
    )
    _flag(group, "--dataset-cache", "keep ImageNet's images in memory", default=True)
    group.add_argument("--workers", type=worker_count, default=0,
                       help="processes of each instance that load images")  # fmt: skip
    group.add_argument("--seed", type=from_zero, help="makes runs reproducible")


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, help="passes over the training data")
    length.add_argument("--iterations", type=positive, help="weight updates")
    group.add_argument("--batch-size", "--micro-batch-size", type=positive,
                       help="images of one forward and backward pass of a replica")  # fmt: skip
    group.add_argument("--global-batch-size", type=positive,
                       help="images of one weight update of all replicas: sets the gradient "
                       "accumulation")  # fmt: skip
    group.add_argument("--gradient-accumulation-count", type=positive,
                       help="passes before a weight update")  # fmt: skip
    group.add_argument("--label-smoothing", type=share, default=0.0, help="0 is none")
    group.add_argument("--weight-decay", type=share, default=1e-4,
                       help="of all weights but those of norms and biases")  # fmt: skip
    group.add_argument("--loss-scaling", type=rate, default=128.0, help="with half precision")
    group.add_argument("--weight-avg", choices=("mean", "exponential"),
                       help="average the last weights after training")  # fmt: skip
    group.add_argument("--weight-avg-count", type=positive, default=5, help="checkpoints averaged")
    group.add_argument("--weight-avg-decay", type=share, default=0.9,
                       help="exponential average: factor for each older checkpoint")  # fmt: skip


def _rates(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning rate")
    group.add_argument("--base-learning-rate-exponent", type=exponent,
                       help="N: the learning rate is 2^N x global batch size")  # fmt: skip
    group.add_argument("--lr-schedule", choices=SCHEDULES, default="stepped", help="its course")
    group.add_argument("--warmup-epochs", type=non_negative, default=5.0,
                       help="epochs in which the rate rises from 0")  # fmt: skip
    group.add_argument("--learning-rate-decay", type=rate, nargs="+", default=[0.1],
                       help="stepped: factors, one for all steps or one for each")  # fmt: skip
    group.add_argument("--learning-rate-schedule", type=share, nargs="+", default=[0.5, 0.75],
                       help="stepped: where, in parts of the training")  # fmt: skip
    group.add_argument("--lr-decay-rate", type=rate, default=0.94,
                       help="exponential: factor of --lr-decay-epochs")  # fmt: skip
    group.add_argument("--lr-decay-epochs", type=rate, default=1.0, help="exponential: epochs")
    group.add_argument("--poly-power", type=rate, default=2.0, help="polynomial: its power")
    group.add_argument("--poly-end-ratio", type=share, default=0.0,
                       help="polynomial: last rate, in parts of the first")  # fmt: skip


def _optimiser(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimiser")
    group.add_argument("--optimiser", choices=OPTIMISERS, default="SGD", help="the update")
    group.add_argument("--momentum", type=share, default=0.9, help="of momentum, RMSProp, LARS")
    group.add_argument("--rmsprop-decay", type=share, default=0.9, help="of the mean square")
    group.add_argument("--rmsprop-epsilon", type=rate, default=1e-3, help="inside the root")
    group.add_argument("--lars-eeta", type=rate, default=1e-3, help="trust coefficient")
    group.add_argument("--lars-epsilon", type=non_negative, default=0.0, help="of the trust ratio")


def _ipu(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("IPUs")
    group.add_argument("--precision", choices=PRECISIONS, default="16.16",
                       help="bits of activations . of weights")  # fmt: skip
    _flag(group, "--stochastic-rounding", "round halves up or down at random", default=True)
    _flag(group, "--enable-half-partials", "sum up products in half precision")
    group.add_argument("--batches-per-step", type=positive, default=1000,
                       help="most batches on the device until it returns to the host")  # fmt: skip
    _flag(group, "--distributed", "an option of the TensorFlow application, accepted with "
          "--batches-per-step 1; the launcher distributes with and without it")  # fmt: skip
    group.add_argument("--replicas", type=positive, default=1, help="without the launcher only")
    group.add_argument("--shards", type=positive, default=1, help="IPUs of one replica")
    group.add_argument("--sharding-exclude-filter", nargs="+", default=[], metavar="NAME",
                       help="parts of names where the model is not cut")  # fmt: skip
    group.add_argument("--sharding-include-filter", nargs="+", default=[], metavar="NAME",
                       help="parts of names where alone the model may be cut")  # fmt: skip
    _flag(group, "--pipeline", "pipeline the shards")
    group.add_argument("--pipeline-splits", nargs="+", metavar="NAME",
                       help="first layer of each later stage; left out: lists them")  # fmt: skip
    group.add_argument("--pipeline-schedule", default="Grouped", type=str.capitalize,
                       choices=("Grouped", "Interleaved", "Sequential"),
                       help="order of forwards and backwards: in each cycle, every IPU does both; "
                       "forwards and backwards alternate, so that fewer activations are kept; or "
                       "one micro-batch after the other")  # fmt: skip
    _flag(
        group,
        "--enable-recompute",
        "compute activations again in the backward pass; a pipeline keeps the inputs of its stages",
    )
    group.add_argument("--available-memory-proportion", type=share, nargs="+",
                       help="share of the memory that a convolution or matrix product may use; or "
                       "two shares for each stage: of convolutions and of matrix "
                       "products")  # fmt: skip
    group.add_argument("--select-ipus", nargs="+", metavar="ID",
                       help="id of the device for training, and another one for validation, "
                       "without which any free one validates; AUTO chooses both")  # fmt: skip
    _flag(group, "--fp-exceptions", "stop at NaN and overflow, also of weights and statistics")
    _flag(group, "--deterministic", "the same bits for any number of instances and threads")
    group.add_argument("--device", choices=DEVICES,
                       help="the IPU that has to have room for the model")  # fmt: skip


def _validation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("validation")
    _flag(group, "--validation", "validate at each checkpoint", default=True)
    group.add_argument("--valid-batch-size", type=positive, help="micro-batch of the validation")


def _logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging and checkpoints")
    group.add_argument("--log-dir", type=Path, default=Path("logs"), help="a folder for each run")
    group.add_argument("--name-prefix", default="", help="of the run's folder")
    group.add_argument("--name-suffix", default="", help="of the run's folder")
    group.add_argument("--logs-per-epoch", type=positive, default=16, help="lines of an epoch")
    group.add_argument("--ckpts-per-epoch", type=rate, default=1.0, help="0.5: every other epoch")
    _flag(group, "--tensorboard", "write event files", default=True)
    _flag(group, "--wandb", "send metrics to Weights & Biases")


def _config(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configurations")
    group.add_argument("--config", metavar="NAME", help="options of this name in --config-path")
    group.add_argument("--config-path", type=Path, default=Path(__file__).with_name("configs.yml"),
                       help="file of configurations")  # fmt: skip


def _flag(group, name: str, meaning: str, *, default: bool = False) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=meaning)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    return _within(text, 0.0, 1.0, "a number from 0 to 1")


def non_negative(text: str) -> float:
    """Parse a number of 0 or more."""
    return _within(text, 0.0, sys.float_info.max, "a number from 0 on")


def exponent(text: str) -> float:
    """Parse the exponent of a power of two."""
    return _within(text, -64.0, 64.0, "a number from -64 to 64")


def _within(text: str, lowest: float, highest: float, accepted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value <= highest:
        raise argparse.ArgumentTypeError(f"{text!r} is given, {accepted} is accepted")
    return value
