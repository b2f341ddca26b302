"""The options of the CNN programs that do nothing beside the others, for one line of the log.

Only options that differ from their defaults are named. What cannot go together is an error, in
``ipu_utils.py``; options that the launcher decides on are there too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from arguments import make_parser

import popdist_py

__all__ = ["line", "line_of_validation"]

Test = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class _Rule:
    """Options that do nothing, and when.

    Attributes:
        names: of the options.
        applies: tells whether they do nothing.
        reason: why, for a reader.
    """

    names: tuple[str, ...]
    applies: Test
    reason: str


def _unless(name: str, *values: str) -> Test:
    """Return a test whether an option has none of these values."""
    return lambda args: getattr(args, name) not in values


def _reads_no_photographs(args: argparse.Namespace) -> bool:
    return args.dataset != "imagenet" or args.generated_data or args.synthetic_data


_RULES = (
    _Rule(("groups",), _unless("norm", "group"), "there are no group norms"),
    _Rule(("bn_span", "bn_momentum"), _unless("norm", "batch"), "there are no batch norms"),
    _Rule(("generated_data",), lambda args: args.synthetic_data, "--synthetic-data counts"),
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
        "--deterministic has that order too",
    ),
    _Rule(
        ("standard_imagenet",),
        lambda _: popdist_py.getNumInstances() == 1,
        "one instance reads all images in that order",
    ),
    _Rule(("dataset_cache",), _reads_no_photographs, "only photographs are cached"),
    _Rule(("valid_batch_size",), lambda args: not args.validation, "nothing is validated"),
    _Rule(("loss_scaling",), lambda args: args.precision == "32.32", "nothing is half precision"),
    _Rule(
        ("stochastic_rounding",),
        lambda args: args.precision == "32.32",
        "nothing is half precision",
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
        "the program chooses no place to cut",
    ),
    _Rule(("config_path",), lambda args: args.config is None, "no --config"),
)

# What a validation does not depend on.
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


def line(args: argparse.Namespace) -> str | None:
    """Return the line about options of a training that do nothing; None if there are none."""
    defaults = vars(make_parser("", "").parse_args([]))
    reasons: dict[str, str] = {}
    for rule in _RULES:
        for name in rule.names:
            if name not in reasons and _is_given(args, name, defaults) and rule.applies(args):
                reasons[name] = rule.reason
    return _said([f"{_spelled(name, args)} ({reason})" for name, reason in reasons.items()])


def line_of_validation(own: Mapping[str, object], *, besides: Collection[str] = ()) -> str | None:
    """Return the line about options that only a training has; None if none is given.

    Args:
        own: the options that are given, by name.
        besides: options of trainings that the program has too.
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
    """Return an option as a command line has it."""
    words = {action.dest: action.option_strings for action in make_parser("", "")._actions}
    value = getattr(args, name)
    return words[name][-1 if value is False else 0]
