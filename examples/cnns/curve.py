"""Draw the learning curve of a training: loss, accuracy and learning rate over the epochs.

python examples/cnns/curve.py logs/RN8_bs8_BN_32.32_v0.2.0_x7Q --figure curve.svg
poprun-py --num-instances 2 --num-replicas 8 examples/cnns/curve.py --figure curve.svg

Without the folder of a run, the program first trains ResNet-8 on handwritten digits. That takes
about a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.arguments import HelpFormat, Parser, figure_file, positive
from common.running import run as run_program

import popdist_py

__all__ = ["Table", "draw", "main", "read"]

TRAINING, TEST = 4320, 357  # three shifted copies of 1,440 digits; the others once
_CONFIGURATION = "digits_resnet8"


@dataclass(frozen=True)
class Table:
    """A table of a run. Each column has a name, and values in the order of the steps."""

    columns: dict[str, list[float]]

    def __getitem__(self, name: str) -> list[float]:
        return self.columns[name]


def read(folder: Path, part: str) -> Table:
    """Return the table "training" or "validation" of a run.

    Raises:
        ValueError: The table is missing or empty.
    """
    path = folder / f"{part}.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [float(row[name]) for row in rows] for name in rows[0]}
    except OSError:
        raise ValueError(
            f"{folder} has no {path.name}: give the folder that train.py made below its --log-dir, "
            "of a training that was validated"
        ) from None
    except (IndexError, TypeError, ValueError):
        raise ValueError(
            f"{path} is empty or damaged: a table that train.py wrote is accepted"
        ) from None
    return Table(columns)


def draw(training: Table, validation: Table, title: str, path: Path) -> None:
    """Draw the tables of a run as an .svg, .png or .pdf file."""
    from common.drawing import COLOURS, GRID, NEUTRAL, mark, new_figure, save  # matplotlib

    figure = new_figure(11, 3.6)
    losses, accuracies, rates = figure.subplots(1, 3)
    for panel in (losses, accuracies, rates):
        panel.grid(axis="y", color=GRID)
        panel.set_xlabel("epoch")
        panel.set_xlim(0, training["epoch"][-1])
    (line,) = losses.plot(training["epoch"], training["loss"], color=COLOURS[0])
    mark(line, "training-loss")
    losses.set_title("loss of training images")
    losses.set_ylim(bottom=0)

    shown = (("training", training, COLOURS[0], ""), ("validation", validation, COLOURS[1], "o"))
    for name, table, colour, marker in shown:
        (line,) = accuracies.plot(
            table["epoch"], table["accuracy"], color=colour, marker=marker, markersize=4, label=name
        )
        mark(line, f"{name}-accuracy")
    last = validation["accuracy"][-1]
    mark(accuracies.axhline(last, color=NEUTRAL, linestyle=":", linewidth=1), "last-accuracy")
    accuracies.set_title(f"accuracy, last {last:.2f} %")
    accuracies.set_ylim(0, 102)
    accuracies.legend(loc="lower right", frameon=False)

    (line,) = rates.plot(training["epoch"], training["rate"], color=COLOURS[2])
    mark(line, "learning-rate")
    rates.set_title("learning rate")
    rates.set_ylim(bottom=0)
    figure.suptitle(title)
    save(figure, path)


def title_of(folder: Path) -> str:
    """Return a title with the model, data set, replicas and instances of the training."""
    import configurations
    import models
    import run_folder

    args = configurations.from_dict(run_folder.read_arguments(folder))
    micro_batch, accumulation = args.batch_size, args.gradient_accumulation_count
    replicas = args.global_batch_size // (micro_batch * accumulation)
    return (
        f"{models.label(args)}, {replicas} replicas, {args.global_batch_size} images a step, "
        f"precision {args.precision}"
    )


def train_on_digits(folder: Path, epochs: int | None) -> Path:
    """Make a data set of digits in ``folder``, train on it, and return the run's folder.

    Raises:
        SystemExit: The training failed; the error is printed in one line.
    """
    import instances
    import train
    from datasets.sample import make_cifar10

    instances.on_instance_0(lambda: make_cifar10(folder, TRAINING, TEST))
    words = ["--config", _CONFIGURATION, "--data-dir", str(folder), "--log-dir", str(folder)]
    if not popdist_py.isPopdistEnvSet():
        words += ["--replicas", "8"]
    if epochs is not None:
        words += ["--epochs", str(epochs)]
    return train.main([*words, "--seed", "0"]).folder


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the curve of the given run, or train first and draw the curve of that training."""
    parser = Parser(
        description=__doc__,
        epilog="Example: poprun-py --num-instances 2 --num-replicas 8 examples/cnns/curve.py",
        formatter_class=HelpFormat,
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run; else one is trained")
    parser.add_argument("--figure", type=figure_file, default="learning-curve.svg", help="file")
    parser.add_argument("--epochs", type=positive, help="of the training, without the folder")
    args = parser.parse_args(argv)
    parser.say_idle(args, (args.run is not None, "the run is trained", "epochs"))
    popdist_py.init()
    try:
        _draw(args)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{args.figure}: {error.strerror}; give a file that can be written")


def _draw(args: argparse.Namespace) -> None:
    speaks = popdist_py.getInstanceIndex() == 0
    with contextlib.ExitStack() as afterwards:
        folder = args.run
        if folder is None:
            own = tempfile.TemporaryDirectory(prefix="cnns-") if speaks else None
            if own:
                afterwards.enter_context(own)
            place = popdist_py.broadcast_object(own.name if own else None)
            folder = train_on_digits(Path(place), args.epochs)
        if speaks:
            training, validation = (read(folder, part) for part in ("training", "validation"))
            draw(training, validation, title_of(folder), args.figure)
            print(f"the learning curve is in {args.figure}")


if __name__ == "__main__":
    run_program(main)
