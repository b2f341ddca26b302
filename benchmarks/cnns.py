"""Images per second of ResNets on two instances, beside a hand-written script under torchrun.

python benchmarks/cnns.py [--models resnet18 resnet50] [--settings 1x4 4x2 ...] [--rounds 2]
                          [--side 64] [--steps 10] [--epochs 3] [--json]

A setting RxB has R replicas on each of two instances and micro-batches of B images. Ours is
examples/cnns/train.py with --generated-data. The reference is benchmarks/cnn_reference.py: DDP over
gloo, one process and one thread for each of two cores, the same global batch, precision and
optimiser. It takes the R x B images of a rank in one piece; where R > 1 it runs once more as
*accumulated*, in R micro-batches of B images, which is what R replicas compute. The jobs take
turns; a figure is the median over the epochs of all rounds, without the first epochs of each job;
fastest/fastest compares the best epochs, which other work on the machine disturbs less.

Target: ours / reference >= 1.3.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from show_rows import rows_of_job, show_rows

HERE = Path(__file__).resolve().parent
APPLICATION = HERE.parent / "examples" / "cnns" / "train.py"
INSTANCES = 2
# Steps in which ours decides whether gradients are reduced early. DDP makes its buckets in one.
_WARM_UP_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one row measures.

    Attributes:
        model: name in torchvision.
        replicas: of each instance.
        micro_batch: images of each replica.
        side: of an image, in pixels.
        steps: of an epoch.
        epochs: that count.
    """

    model: str
    replicas: int
    micro_batch: int
    side: int
    steps: int
    epochs: int

    @property
    def global_batch(self) -> int:
        """Images of one step."""
        return INSTANCES * self.replicas * self.micro_batch

    @property
    def warm_up(self) -> int:
        """Epochs of ours that do not count."""
        return -(-_WARM_UP_STEPS // self.steps)


def ours(setting: Setting) -> list[float]:
    """Return the images per second of every epoch of ours: the application's."""
    replicas = ("--num-replicas", INSTANCES * setting.replicas)
    launcher = ("poprun_py", "--num-instances", INSTANCES, *replicas)
    with tempfile.TemporaryDirectory() as folder:
        for _ in rows_of_job([*launcher, APPLICATION, *_options(setting), "--log-dir", folder]):
            pass
        (log,) = Path(folder).glob("*/training.csv")
        with log.open(newline="") as lines:
            rates = [float(line["images_per_second"]) for line in csv.DictReader(lines)]
    return rates[setting.warm_up :]


def _options(setting: Setting) -> tuple[object, ...]:
    """Return what the application is told: the step of the hand-written script, and a log of it."""
    return (
        *("--model", "resnet", "--model-size", setting.model.removeprefix("resnet")),
        "--batch-norm",
        *("--dataset", "imagenet", "--generated-data", "--image-size", setting.side),
        *("--generated-samples", setting.steps * setting.global_batch, "--no-eight-bit-io"),
        *("--micro-batch-size", setting.micro_batch, "--batches-per-step", 1),
        *("--epochs", setting.warm_up + setting.epochs, "--logs-per-epoch", 1),
        *("--precision", "32.32", "--no-stochastic-rounding", "--weight-decay", 0),
        *("--no-validation", "--ckpts-per-epoch", 0.001, "--no-tensorboard"),
    )


def reference(setting: Setting, micro_batches: int) -> list[float]:
    """Return the images per second of every epoch of the hand-written script."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", INSTANCES)
    program = (
        *(HERE / "cnn_reference.py", "--model", setting.model, "--side", setting.side),
        *("--batch", setting.replicas * setting.micro_batch, "--micro-batches", micro_batches),
        *("--steps", setting.steps, "--epochs", 1 + setting.epochs),
    )
    return [row["images_per_s"] for row in rows_of_job([*launcher, *program])][1:]


def row(setting: Setting, rounds: int) -> dict[str, Any]:
    """Measure one setting, turn and turn about."""
    ways = {"ours": lambda: ours(setting), "reference": lambda: reference(setting, 1)}
    if setting.replicas > 1:
        ways["accumulated"] = lambda: reference(setting, setting.replicas)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measure in ways.items():
            rates[way] += measure()
    found = {way: statistics.median(values) for way, values in rates.items()}
    fastest = max(rates["ours"]) / max(rates["reference"])
    others = [way for way in ways if way != "ours"]
    return {
        "model": setting.model,
        "replicas": setting.replicas,
        "micro_batch": setting.micro_batch,
        "global_batch": setting.global_batch,
        "side": setting.side,
        **{f"{way}_images_per_s": round(rate, 1) for way, rate in found.items()},
        **{f"ours/{way}": round(found["ours"] / found[way], 2) for way in others},
        "fastest/fastest": round(fastest, 2),
    }


def settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    """Yield what the arguments ask for."""
    for model in arguments.models:
        for words in arguments.settings:
            replicas, micro_batch = map(int, words.split("x"))
            yield Setting(
                model=model,
                replicas=replicas,
                micro_batch=micro_batch,
                side=arguments.side,
                steps=arguments.steps,
                epochs=arguments.epochs,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["resnet18", "resnet50"], help="of torchvision"
    )
    parser.add_argument("--settings", nargs="+", default=["1x4", "4x2", "4x4"], metavar="RxB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", type=int, default=64, help="of an image, in pixels")
    parser.add_argument("--steps", type=int, default=10, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="that count, in each job")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = (row(setting, arguments.rounds) for setting in settings(arguments))
    show_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
