"""The log of a run: a private folder with arguments, log lines, tables and TensorBoard events.

Every instance makes a ``Run`` and calls the same methods with its own numbers. The log combines the
numbers of all instances, and instance 0 prints and writes it.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import configurations
import memory_use
import run_folder
from file_writing import private, replaced_at_end
from instances import on_instance_0
from tqdm import tqdm

import popdist_py
from popdist_py import poptorch

__all__ = ["Run", "validation_line"]

_LAST = ("epoch", "rate", "images_per_second")  # the same on all instances


class Run:
    """The log of one training, in a new folder or in the folder of a resumed training.

    Args:
        args: The options of the training. A new folder is made in ``log_dir``.
        folder: The folder of a resumed training; None to make a new folder.

    Raises:
        ValueError: The folder cannot be made or written; Weights & Biases cannot be used.
    """

    def __init__(self, args: argparse.Namespace, folder: Path | None = None) -> None:
        wandb = _wandb(args) if args.wandb else None
        self.folder: Path = on_instance_0(lambda: folder or run_folder.make_folder(args))
        self._args = args
        if folder is None:
            on_instance_0(lambda: run_folder.write_arguments(self.folder, args))
        shared = [wandb(self.folder)] if wandb else []
        self._memory = popdist_py.Metrics(shared[:], reductions=memory_use.REDUCTIONS)
        self._logs_memory = bool(wandb)
        self._of_ipus: dict[str, float] | None = None
        if args.tensorboard:
            shared.append(popdist_py.TensorBoardSink(self.folder / "tensorboard"))
        self._metrics = {
            part: popdist_py.Metrics(
                [_Column(popdist_py.CsvSink(self.folder / f"{part}.csv")), *shared],
                reductions={f"{part}/{name}": "last" for name in _LAST},
            )
            for part in ("training", "validation")
        }
        self._speaks = popdist_py.getInstanceIndex() == 0

    def go_on(self, step: int) -> None:
        """Remove the table rows after ``step``, because the resumed training logs them again."""
        on_instance_0(lambda: run_folder.write_arguments(self.folder, self._args))
        on_instance_0(lambda: [_cut(self.folder / f"{part}.csv", step) for part in self._metrics])
        self.line(f"resumed after step {step}: {self.folder}")

    def training(
        self,
        step: int,
        epoch: float,
        loss: float,
        accuracy: float,
        rate: float,
        images_per_second: float,
    ) -> dict[str, float]:
        """Log the training since the last call of this method, and return the means. Collective.

        The means are over all instances.

        Args:
            step: The number of weight updates.
            epoch: The progress of the training in epochs, such as 1.25.
            loss: The mean loss of this instance's images since the last call.
            accuracy: The accuracy on the same images in per cent.
            rate: The learning rate.
            images_per_second: The images per second of all instances.
        """
        values = {"epoch": epoch, "loss": loss, "accuracy": accuracy, "rate": rate,
                  "images_per_second": images_per_second}  # fmt: skip
        found = self._log("training", step, values)
        self.line(
            f"step {step} | epoch {epoch:.2f} | loss {found['loss']:.3f} | accuracy "
            f"{found['accuracy']:.1f} % | lr {rate:.4g} | {images_per_second:.0f} img/s"
        )
        return found

    def memory(self, step: int, model: poptorch.PoplarExecutor) -> None:
        """Send the memory utilisation of a compiled model to Weights & Biases. Collective."""
        if not self._logs_memory:
            return
        if self._of_ipus is None:  # The memory of a compiled model stays the same.
            self._of_ipus = memory_use.of_ipus(model) if self._speaks else {}
        self._memory.update({**self._of_ipus, **memory_use.of_host()})
        with private():
            self._memory.log(step)

    def validation(self, step: int, epoch: float, accuracy: float) -> None:
        """Log the accuracy on all validation images in per cent. Collective."""
        self._log("validation", step, {"epoch": epoch, "accuracy": accuracy})
        self.line(validation_line(step, epoch, accuracy))

    def line(self, text: str) -> None:
        """Print a line, and append it to log.txt. A progress bar stays below the line."""
        if not self._speaks:
            return
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
        with private(), (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def close(self) -> None:
        """End the run of Weights & Biases, if there is one."""
        for metrics in self._metrics.values():
            metrics.close()

    def _log(self, part: str, step: int, values: Mapping[str, float]) -> dict[str, float]:
        metrics = self._metrics[part]
        metrics.update({f"{part}/{name}": value for name, value in values.items()})
        with private():
            found = metrics.log(step)
        return {name.removeprefix(f"{part}/"): value for name, value in found.items()}


def validation_line(step: int, epoch: float, accuracy: float) -> str:
    """Return the line of a validation, which training and validation.py both print."""
    return f"step {step} | epoch {epoch:.2f} | validation accuracy {accuracy:.2f} %"


# --- sinks ------------------------------------------------------------------------------------


class _Column:
    """A sink for one table, whose column names drop the prefix "training/" or "validation/"."""

    def __init__(self, sink) -> None:
        self._sink = sink

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._sink.write(step, {name.rpartition("/")[2]: value for name, value in values.items()})

    def close(self) -> None:
        self._sink.close()


def _wandb(args: argparse.Namespace) -> Callable[[Path], Any]:
    """Check that Weights & Biases can be used, and return a function that makes a run's sink."""
    offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")

    def sink(folder: Path):
        again = {} if offline else {"id": folder.name, "resume": "allow"}
        return popdist_py.WandbSink(
            project="cnns", name=folder.name, dir=str(folder),
            config=configurations.to_dict(args), **again,
        )  # fmt: skip

    try:
        sink(Path())
    except ModuleNotFoundError:
        raise ValueError(
            "--wandb needs the package wandb, which is not installed: python -m pip install "
            "wandb, or leave it out"
        ) from None
    on_instance_0(lambda: None if offline else _check_login())
    return sink


def _check_login() -> None:
    import wandb

    if not wandb.login(prompt=False):
        raise ValueError(
            "--wandb: this user is not logged in to Weights & Biases: type wandb login, or set "
            "WANDB_MODE=offline"
        )


# --- tables -----------------------------------------------------------------------------------


def _cut(path: Path, step: int) -> None:
    """Remove the rows after ``step``. The file is replaced, so it is complete at any moment."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
    kept = rows[:1] + [row for row in rows[1:] if int(row[0]) <= step]
    if len(kept) < 2:  # The next row makes a new table, perhaps with other columns.
        path.unlink()
        return
    table = io.StringIO(newline="")
    csv.writer(table, lineterminator="\n").writerows(kept)
    with private(), replaced_at_end(path) as partial:
        partial.write_text(table.getvalue(), encoding="utf-8")
