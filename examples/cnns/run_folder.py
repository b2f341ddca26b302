"""The folder of a run: its name, and the file with the arguments of the training."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import string
from pathlib import Path
from typing import Any

import batch_sizes
import configurations
import models
from arguments import make_parser
from file_writing import private, replaced_at_end

import popdist_py

__all__ = ["make_folder", "name_of", "read_arguments", "write_arguments"]

_ARGUMENTS = "arguments.json"
_ALWAYS = {"model", "model_size", "dataset", "batch_size", "global_batch_size"}
_CHARACTERS = string.ascii_letters + string.digits
_NORMS = {"batch": "BN", "group": "GN"}
_ATTEMPTS = 100


def make_folder(args: argparse.Namespace) -> Path:
    """Make a new private folder. An existing folder is never used."""
    args.log_dir.mkdir(parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        folder = args.log_dir.absolute() / name_of(args)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise ValueError(f"{args.log_dir} is full of runs: give another --log-dir")


def name_of(args: argparse.Namespace) -> str:
    """Return a name such as RN20_bs32_BN_16.16_v0.2.0_x7Q."""
    for option, value in (("--name-prefix", args.name_prefix), ("--name-suffix", args.name_suffix)):
        if "/" in value:
            raise ValueError(f"{option} {value}: a part of a folder's name is accepted, without /")
    parts = (
        args.name_prefix,
        models.label(args),
        f"bs{args.batch_size}",
        _NORMS[args.norm],
        args.precision,
        f"v{popdist_py.__version__}",
        "".join(secrets.choice(_CHARACTERS) for _ in range(3)),
        args.name_suffix,
    )
    return "_".join(part for part in parts if part)


def write_arguments(folder: Path, args: argparse.Namespace) -> None:
    """Write the arguments of a training, with the actual number of replicas."""
    values = {**configurations.to_dict(args), "replicas": batch_sizes.sizes(args).replicas}
    text = json.dumps(values, indent=2)
    with private(), replaced_at_end(folder / _ARGUMENTS) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def read_arguments(folder: Path) -> dict[str, Any]:
    """Return the saved arguments of the training in ``folder``.

    Options that did not exist when the run was saved have their defaults.
    ``configurations.from_dict`` converts the result into arguments.

    Raises:
        ValueError: The folder does not hold a run, or the file is damaged.
    """
    path = folder / _ARGUMENTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(
            f"{folder} has no {_ARGUMENTS}: give the folder that train.py made below its --log-dir"
        ) from None
    except ValueError:
        found = None
    defaults = vars(make_parser("", "").parse_args([]))
    if not isinstance(found, dict) or not defaults.keys() >= found.keys() >= _ALWAYS:
        raise ValueError(
            f"{path} is damaged or another program's: the {_ARGUMENTS} of a run with the same "
            "options can take its place"
        )
    return {**defaults, **found}
