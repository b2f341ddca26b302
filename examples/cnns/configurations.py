"""Configurations, which are named sets of options in a YAML file, and defaults of options.

The value of an option comes from the first of these sources that has the option: the command line,
the configuration (``--config NAME``), the base configurations of this configuration, and the
defaults for the model and the data set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1]))
import batch_sizes
import option_checks
from arguments import DATASETS, make_parser
from common.arguments import Parser, nearest

# This import stands after ``common``, which reports a missing package in one line.
# isort: split
import yaml

__all__ = [
    "complete",
    "from_dict",
    "given",
    "given_for_run",
    "names",
    "override",
    "parse",
    "settings",
    "to_dict",
    "with_options",
]

# For each option, the options of a configuration that would contradict it. If the option is given,
# it also overrides these options.
_INSTEAD_OF = {
    "epochs": ("iterations",),
    "iterations": ("epochs",),
    "batch_size": ("gradient_accumulation_count",),
    "global_batch_size": ("gradient_accumulation_count",),
    "gradient_accumulation_count": ("global_batch_size",),
    "model": ("model_size",),
    "data_dir": ("generated_data", "synthetic_data"),
}
_ABSENT = object()


def parse(argv: Sequence[str] | None, description: str, example: str) -> argparse.Namespace:
    """Return all options of a program, from command line, configuration and defaults.

    Args:
        argv: The arguments on the command line; None for the arguments of this process.
        description: The description of the program for ``--help``.
        example: A command that runs the program.

    Raises:
        SystemExit: An option is wrong. The exit code is 2, and one line names the error.
    """
    parser = make_parser(description, example)
    try:
        return combine(given(parser, argv))
    except ValueError as error:
        parser.error(str(error))


def combine(own: Mapping[str, Any]) -> argparse.Namespace:
    """Return the given options, completed by the configuration and the defaults.

    Raises:
        ValueError: The options do not fit together, or the configuration is wrong.
    """
    name, path = own.get("config"), own.get("config_path", _defaults()["config_path"])
    chosen = settings(name, path) if name is not None else {}
    return complete(argparse.Namespace(**override(chosen, own)))


@cache
def _defaults() -> Mapping[str, Any]:
    return vars(make_parser("", "").parse_args([]))


def given(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the options that the command line gives, without any defaults."""
    absent = dict.fromkeys(_defaults(), _ABSENT)
    found = vars(parser.parse_args(argv, argparse.Namespace(**absent)))
    return {name: value for name, value in found.items() if value is not _ABSENT}


def given_for_run(parser: Parser, argv: Sequence[str] | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder of --restore-path, and the other options that the command line gives."""
    parser.add_argument("--restore-path", type=Path, required=True, help="folder of a run")
    own = given(parser, argv)
    return own.pop("restore_path"), own


def override(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of options; the options in ``above`` override the options in ``below``.

    Options of ``below`` that would contradict ``above`` are left out. For example, --iterations
    overrides epochs. A batch size overrides the gradient accumulation, which is then computed from
    the global batch size.
    """
    gone = {other for name in above for other in _INSTEAD_OF.get(name, ())}
    return {name: value for name, value in below.items() if name not in gone} | dict(above)


def with_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> argparse.Namespace:
    """Return the saved options of a run, overridden by ``own``, without defaults."""
    return argparse.Namespace(**{**dict.fromkeys(saved), **override(saved, own)})


# --- the file ---------------------------------------------------------------------------------


def names(path: Path) -> list[str]:
    """Return the names of a file's configurations, without base configurations (``_NAME``).

    Raises:
        ValueError: The file cannot be read as a file of configurations.
    """
    return [name for name in _read(path) if not name.startswith("_")]


def settings(name: str, path: Path) -> dict[str, Any]:
    """Return the options of a configuration and of its base configurations.

    Raises:
        ValueError: The configuration is missing or based on itself, or an option is wrong.
    """
    return _settings(name, path, _read(path), ())


def _settings(name: str, path: Path, file: Mapping[str, dict], above: tuple[str, ...]) -> dict:
    if name in above:
        raise ValueError(f"{path}: {' -> '.join((*above, name))} are based on each other")
    if name not in file:
        wanted = f"base {name!r} of {above[-1]!r}" if above else f"configuration {name!r}"
        shown = [known for known in file if not known.startswith("_")]
        raise ValueError(
            f"{path} has no {wanted}{nearest(name, file)}; it has {', '.join(shown) or 'none'}"
        )
    own = dict(file[name])
    bases = own.pop("base", [])
    found: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases or []:
        found = override(found, _settings(str(base), path, file, (*above, name)))
    return override(found, _checked(own, f"{path}, configuration {name!r}"))


def _read(path: Path) -> dict[str, dict]:
    try:
        file = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; --config-path names a file of configurations"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or "no text"
        raise ValueError(f"{path}{where}: {why}; a YAML file is accepted") from None
    if not isinstance(file, dict) or not all(isinstance(own, dict) for own in file.values()):
        raise ValueError(f"{path}: NAME: and below it lines of OPTION: VALUE are accepted")
    return {str(name): own for name, own in file.items()}


class _Loader(yaml.SafeLoader):
    """A variant of YAML's safe loader that refuses repeated options."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(
                problem=f"{twice!r} stands there twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Checker(Parser):
    """A parser of all options that raises ValueError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def option_names(self) -> set[str]:
        return {word.removeprefix("--") for words in self.spellings().values() for word in words}


def _checked(own: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return the options of one configuration, parsed like options of the command line."""
    parser = make_parser("", "", _Checker)
    found: dict[str, Any] = {}
    for name, value in own.items():
        try:
            found |= given(parser, _words(parser, str(name), value))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    for name in found:
        if both := [other for other in _ONE_OF.get(name, ()) if other in found]:
            raise ValueError(f"{where}: {name} and {both[0]} are given, one of them is accepted")
    return found


_ONE_OF = {"epochs": ("iterations",)}
_NOT_IN_A_FILE = ("config", "config-path", "help")


def _words(parser: _Checker, name: str, value: Any) -> list[str]:
    """Return an option from a file in the form of command-line arguments."""
    known = parser.option_names()
    if name not in known or name in _NOT_IN_A_FILE:
        raise ValueError(f"there is no option {name!r}{nearest(name, known)}")
    if value is True:
        return [f"--{name}"]
    if value is False:
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        if opposite not in known:
            raise ValueError(f"{name}: false is given, what is meant instead is accepted")
        return [f"--{opposite}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={'' if value is None else value}"]


# --- defaults of model and data set -----------------------------------------------------------

# The default exponent N of the base learning rate 2^N by optimiser, for CIFAR and for ImageNet.
_EXPONENTS = {"SGD": (-7.0, -8.0), "momentum": (-10.0, -11.0), "RMSProp": (-14.0, -14.0),
              "LARS": (-8.0, -8.0)}  # fmt: skip
_SIZES = {"resnet": ("20", "50"), "resnext": ("29", "50"), "efficientnet": ("B0", "B0")}


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Return all options; a missing option gets its default, as in this table.

    | | CIFAR | ImageNet |
    |---|---|---|
    | model size of ResNet, ResNeXt, EfficientNet | 20, 29, B0 | 50, 50, B0 |
    | norm | batch | group |
    | side of an image | 32 | 224 |
    | micro-batch | 32 | 4 |
    | epochs | 160 | 100 |
    | base learning rate of SGD, momentum, RMSProp, LARS | 2^-7, 2^-10, 2^-14, 2^-8 | \
2^-8, 2^-11, 2^-14, 2^-8 |

    Without data, the images are random and have the shape of CIFAR-10's images. A pipeline
    accumulates twice as many micro-batches as it has stages; every other training accumulates one.
    The validation has the batch size of the training.

    Raises:
        ValueError: The data is missing, or the options do not fit together.
    """
    args = argparse.Namespace(**{**_defaults(), **vars(args)})
    _set(args, data_dir=_folder_of_data())
    _set(args, dataset=_dataset(args))
    large = args.dataset == "imagenet"
    _set(
        args,
        model_size=_SIZES[args.model][large],
        norm="group" if large else "batch",
        image_size=224 if large else 32,
        batch_size=4 if large else 32,
        base_learning_rate_exponent=_EXPONENTS[args.optimiser][large],
    )
    if args.iterations is None:
        _set(args, epochs=100 if large else 160)
    _set(args, valid_batch_size=args.batch_size)
    _set(args, gradient_accumulation_count=batch_sizes.accumulation(args))
    option_checks.check(args)
    _set(args, global_batch_size=batch_sizes.sizes(args).global_batch)
    return args


def _set(args: argparse.Namespace, **values: Any) -> None:
    """Set the given options, if their value is None."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _folder_of_data() -> Path | None:
    folder = os.environ.get("DATA_DIR")
    return Path(folder) if folder else None


def _dataset(args: argparse.Namespace) -> str:
    asks_for_splits = args.pipeline and not args.pipeline_splits
    needs_none = args.generated_data or args.synthetic_data or asks_for_splits
    if args.data_dir is None and not needs_none:
        raise ValueError(_NO_DATA)
    if args.dataset is not None:
        return args.dataset
    if needs_none:
        return DATASETS[0]
    import datasets  # imported here because a program with --dataset starts faster without it

    return datasets.infer(datasets.folder_of(args))


_NO_DATA = (
    "no data: give --data-dir or set DATA_DIR, or take --generated-data; "
    "python examples/cnns/datasets/sample.py cifar-10 DIR makes a small set of digits"
)


# --- kept beside a run ------------------------------------------------------------------------

_PATHS = ("data_dir", "log_dir", "config_path")


def to_dict(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as values that JSON can store."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}


def from_dict(values: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options from the result of :func:`to_dict`."""
    paths = {name: Path(values[name]) for name in _PATHS if values.get(name) is not None}
    return argparse.Namespace(**{**values, **paths})
