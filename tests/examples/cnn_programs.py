"""The programs of examples/cnns in the process of a test, and what their runs leave."""

from __future__ import annotations

import csv
import importlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from popdist_py.checkpoint import Checkpoints

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cnns"
# A training of a fraction of a second: 6 steps of 4 images of 8 by 8 in an epoch.
TINY = ("--generated-data", "--generated-samples", "24", "--image-size", "8", "--model-size", "8",
        "--batch-size", "4", "--precision", "32.32", "--seed", "3", "--no-tensorboard")  # fmt: skip


@contextmanager
def imported() -> Iterator[None]:
    """Let modules of the folder be imported by name; afterwards they are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER.parent))
        patch.syspath_prepend(str(FOLDER))
        names = {path.stem for path in FOLDER.iterdir()}

        def own():
            return [name for name in sys.modules if name.partition(".")[0] in names]

        for name in own():
            patch.delitem(sys.modules, name)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
        for name in own():
            del sys.modules[name]


def module(name: str):
    """Import a module of the folder, inside of ``imported``."""
    return importlib.import_module(name)


def table(path: Path) -> list[dict[str, str]]:
    """Return a table of a run, without the column that depends on the time."""
    with path.open(newline="") as file:
        return [
            {name: value for name, value in row.items() if name != "images_per_second"}
            for row in csv.DictReader(file)
        ]


def training_in(folder: Path) -> dict:
    """Return what the newest checkpoint of a run holds, without random numbers that none draws."""
    found = _loaded(Checkpoints(folder / "ckpt").latest().data)
    found["instances"] = [_loaded(part) for part in found["instances"]]
    for part in found["instances"]:
        part["random"] = part["random"]["torch"]  # Python's and NumPy's have no seed
    return found


def memory_report(args):
    """Return the modelled memory of a training, without training."""
    training = module("training").Training(args, module("datasets").seed_of_order(args))
    image, _ = training.images.data[0]
    count = training.loader.combinedBatchSize
    shapes = torch.empty(count, *image.shape, dtype=image.dtype, device="meta")
    return training.model.memoryReport(shapes, torch.empty(count, dtype=torch.int64, device="meta"))


def _loaded(data: bytes) -> dict:
    return torch.load(io.BytesIO(data), weights_only=True)


def same(one, other) -> bool:
    """Tell whether nested tensors and values are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
