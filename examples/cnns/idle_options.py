"""Log lines that name options without effect.

The lines name only options that differ from their defaults. ``option_checks.py`` refuses
combinations that contradict each other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import batch_sizes
from arguments import make_parser

import popdist_py

__all__ = ["distribution", "ignored", "line", "line_of_validation", "lines_of_training"]

Test = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class _Rule:
    """A condition that makes options ineffective.

    Attributes:
        names: The names of the options.
        applies: A function that takes all arguments and returns True if the options are
            ineffective.
        reason: The reason that the log gives.
    """

    names: tuple[str, ...]
    applies: Test
    reason: str


def _unless(name: str, *values: str) -> Test:
    """Return a function that tells whether an option's value is not one of ``values``."""
    return lambda args: getattr(args, name) not in values


def _reads_no_photographs(args: argparse.Namespace) -> bool:
    return args.dataset != "imagenet" or args.generated_data or args.synthetic_data


_RULES = (
    _Rule(("groups",), _unless("norm", "group"), "there are no group norms"),
    _Rule(("bn_span", "bn_momentum"), _unless("norm", "batch"), "there are no batch norms"),
    _Rule(("generated_data",), lambda args: args.synthetic_data, "--synthetic-data replaces it"),
    _Rule(
        ("generated_samples",),
        lambda args: not (args.generated_data or args.synthetic_data),
        "the images are not random",
    ),
    _Rule(
        ("data_dir",),
        lambda args: args.generated_data or args.synthetic_data,
        "random images are not read",
    ),
    _Rule(
        ("hostside_norm",), lambda args: args.eight_bit_io, "with --eight-bit-io the IPU normalises"
    ),
    _Rule(("standard_imagenet",), _reads_no_photographs, "other images have one order only"),
    _Rule(
        ("standard_imagenet",),
        lambda args: args.deterministic,
        "--deterministic has one order for all instances",
    ),
    _Rule(
        ("standard_imagenet",),
        lambda _: popdist_py.getNumInstances() == 1,
        "a single instance has one order of all images",
    ),
    _Rule(("dataset_cache",), _reads_no_photographs, "only photographs are cached"),
    _Rule(("valid_batch_size",), lambda args: not args.validation, "nothing is validated"),
    _Rule(
        ("loss_scaling",), lambda args: args.precision == "32.32", "no number is in half precision"
    ),
    _Rule(
        ("stochastic_rounding",),
        lambda args: args.precision == "32.32",
        "no number is in half precision",
    ),
    _Rule(("weight_avg_count",), _unless("weight_avg", "mean", "exponential"), "no --weight-avg"),
    _Rule(
        ("weight_avg_decay",), _unless("weight_avg", "exponential"), "no --weight-avg exponential"
    ),
    _Rule(
        ("learning_rate_decay", "learning_rate_schedule"),
        _unless("lr_schedule", "stepped"),
        "no --lr-schedule stepped",
    ),
    _Rule(
        ("lr_decay_rate", "lr_decay_epochs"),
        _unless("lr_schedule", "exponential"),
        "no --lr-schedule exponential",
    ),
    _Rule(
        ("poly_power", "poly_end_ratio"),
        _unless("lr_schedule", "polynomial_decay_lr"),
        "no --lr-schedule polynomial_decay_lr",
    ),
    _Rule(("momentum",), _unless("optimiser", "momentum", "RMSProp", "LARS"), "SGD has none"),
    _Rule(
        ("rmsprop_decay", "rmsprop_epsilon"),
        _unless("optimiser", "RMSProp"),
        "no --optimiser RMSProp",
    ),
    _Rule(("lars_eeta", "lars_epsilon"), _unless("optimiser", "LARS"), "no --optimiser LARS"),
    _Rule(
        ("sharding_include_filter", "sharding_exclude_filter"),
        lambda args: args.pipeline or args.shards == 1,
        "the program does not choose where to cut",
    ),
    _Rule(("config_path",), lambda args: args.config is None, "no --config"),
)

# Options that do not change a validation.
_ONLY_OF_TRAINING = frozenset(
    {
        *("bn_span", "bn_momentum", "standard_imagenet", "epochs", "iterations", "batch_size"),
        *("global_batch_size", "gradient_accumulation_count", "label_smoothing", "weight_decay"),
        *("loss_scaling", "weight_avg", "weight_avg_count", "weight_avg_decay"),
        *("base_learning_rate_exponent", "lr_schedule", "warmup_epochs", "learning_rate_decay"),
        *("learning_rate_schedule", "lr_decay_rate", "lr_decay_epochs", "poly_power"),
        *("poly_end_ratio", "optimiser", "momentum", "rmsprop_decay", "rmsprop_epsilon"),
        *("lars_eeta", "lars_epsilon", "stochastic_rounding", "batches_per_step"),
        *("enable_recompute", "validation", "log_dir", "name_prefix", "name_suffix"),
        *("logs_per_epoch", "ckpts_per_epoch", "tensorboard", "wandb"),
    }
)


def lines_of_training(args: argparse.Namespace) -> list[str]:
    """Return the log lines about options of a training that are ineffective or overridden."""
    return [text for text in (ignored(args), distribution(args), line(args)) if text]


def line(args: argparse.Namespace) -> str | None:
    """Return the log line that names ineffective options of a training, if there are any."""
    defaults = vars(make_parser("", "").parse_args([]))
    reasons: dict[str, str] = {}
    for rule in _RULES:
        for name in rule.names:
            if name not in reasons and _is_given(args, name, defaults) and rule.applies(args):
                reasons[name] = rule.reason
    return _said([f"{_spelled(name, args)} ({reason})" for name, reason in reasons.items()])


def ignored(args: argparse.Namespace) -> str | None:
    """Return the log line that names options that the launcher overrides, if there are any."""
    if not popdist_py.isPopdistEnvSet():
        return None
    found, replicas = [], batch_sizes.replicas(args)
    if args.replicas not in (1, replicas):
        found.append(f"--replicas {args.replicas}")
    if args.select_ipus:
        found.append(f"--select-ipus {' '.join(args.select_ipus)}")
    if not found:
        return None
    return f"{' and '.join(found)}: ignored, the launcher gives {replicas} replicas"


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


def line_of_validation(own: Mapping[str, object], *, besides: Collection[str] = ()) -> str | None:
    """Return the log line that names given options that only a training uses, if there are any.

    Args:
        own: The given options by name.
        besides: Options that this program uses although others use them only in trainings.
    """
    args = argparse.Namespace(**own)
    names = [name for name in own if name in _ONLY_OF_TRAINING and name not in besides]
    return _said([f"{_spelled(name, args)} (only a training has it)" for name in names])


def _is_given(args: argparse.Namespace, name: str, defaults: Mapping[str, object]) -> bool:
    value = getattr(args, name)
    if name == "valid_batch_size":
        return value != args.batch_size
    if name == "data_dir":
        return value is not None and str(value) != os.environ.get("DATA_DIR")
    return value != defaults[name]


def _said(words: list[str]) -> str | None:
    return f"without effect here: {', '.join(words)}" if words else None


def _spelled(name: str, args: argparse.Namespace) -> str:
    """Return the spelling of an option on a command line."""
    words = make_parser("", "").spellings()[name]
    return words[-1 if getattr(args, name) is False else 0]
