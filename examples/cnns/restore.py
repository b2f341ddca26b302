"""Resume a training from its newest checkpoint, as if it had never stopped.

Weights, optimiser, learning rate, position in the data and random numbers are the same as in an
uninterrupted training. The log continues in the same folder. Only the options in CHANGEABLE may
change, because other options would make the training a different one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import batch_sizes
import configurations
import instances
import run_folder
import train
from arguments import make_parser
from common.arguments import Parser
from common.running import run

import popdist_py

__all__ = ["CHANGEABLE", "arguments_of", "main"]

_EXAMPLE = "python examples/cnns/restore.py --restore-path logs/RN20_bs32_BN_16.16_v0.2.0_x7Q"
#: The options that may change. The global batch size stays, so the gradient accumulation is
#: computed from the number of replicas.
CHANGEABLE = (
    "epochs", "iterations", "data_dir", "dataset_cache", "workers", "replicas", "select_ipus",
    "gradient_accumulation_count", "batches_per_step", "logs_per_epoch", "ckpts_per_epoch",
    "tensorboard", "wandb", "validation", "valid_batch_size", "weight_avg", "weight_avg_count",
    "weight_avg_decay", "fp_exceptions",
)  # fmt: skip


def main(argv: list[str] | None = None):
    """Resume the training in ``--restore-path``, and return its result."""
    parser = make_parser(__doc__.splitlines()[0], _EXAMPLE)
    folder, own = configurations.given_for_run(parser, argv)
    folder = folder.absolute()
    popdist_py.init()
    try:
        args = arguments_of(folder, own, option_names(parser))
    except ValueError as error:
        instances.end(error)
    return train.carry_out(args, resume=folder)


def arguments_of(
    folder: Path, own: Mapping[str, Any], names: Mapping[str, str]
) -> argparse.Namespace:
    """Return the arguments of the resumed training in ``folder``. Collective.

    Args:
        folder: The folder of the run.
        own: The options that are given now.
        names: The spelling of each option by the name of its value.

    Raises:
        ValueError: The folder does not hold a run, or ``own`` changes an option that must stay.
    """
    values = instances.on_instance_0(lambda: run_folder.read_arguments(folder))
    saved = vars(configurations.from_dict(values))
    return instances.together(lambda: _changed(folder, saved, own, names))


def _changed(
    folder: Path, saved: Mapping[str, Any], own: Mapping[str, Any], names: Mapping[str, str]
) -> argparse.Namespace:
    for name, value in own.items():
        if value != saved[name] and name not in CHANGEABLE:
            raise ValueError(
                f"{names[name]} {_said(value)} is given, and {folder} was trained "
                f"{_with(names[name], saved[name])}, which stays. These options may change: "
                f"{', '.join(names[each] for each in CHANGEABLE)}"
            )
    args = configurations.with_options(saved, own)
    args.global_batch_size = saved["global_batch_size"]
    if "gradient_accumulation_count" not in own:
        args.gradient_accumulation_count = None  # computed from the current number of replicas
        _check_replicas(folder, args)
    return configurations.complete(args)


def _check_replicas(folder: Path, args: argparse.Namespace) -> None:
    """Check that the run's global batch size is possible with the current number of replicas.

    Raises:
        ValueError: This global batch size is not possible. The message suggests other numbers of
            replicas.
    """
    micro_batches, now = args.global_batch_size // args.batch_size, batch_sizes.replicas(args)
    if micro_batches % now:
        fits = [str(n) for n in range(1, micro_batches + 1) if micro_batches % n == 0]
        option = "--num-replicas" if popdist_py.isPopdistEnvSet() else "--replicas"
        raise ValueError(
            f"{folder} was trained with a global batch of {args.global_batch_size:,} images, which "
            f"stays: {now} replicas with micro-batches of {args.batch_size} do not reach it; "
            f"take {option} {', '.join(fits)}"
        )


def option_names(parser: Parser) -> dict[str, str]:
    """Return the first option string of each option, by the name of the option's value."""
    return {name: words[0] for name, words in parser.spellings().items()}


def _with(name: str, value: Any) -> str:
    return f"without {name}" if value is None else f"with {_said(value)}"


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    run(main)
