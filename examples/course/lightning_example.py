"""Train FashionCNN with Lightning, which replaces most of the code of distributed_example.py.

poprun-py -n 2 examples/course/lightning_example.py
python examples/course/lightning_example.py --devices 2

The course names the flags `accelerator` and `gpus`; Lightning 2 has `accelerator` and `devices`.
A device of accelerator="cpu" is a process. poprun-py and torchrun start the processes, so --devices
is not needed with them. Without a launcher, Lightning starts the processes.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from fashion_mnist import FashionCNN, first, load, training_arguments
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import positive
from common.running import run


def processes(devices: int) -> tuple[int, int]:
    """Return the number of processes per host and of hosts; by default ``devices`` on one host."""
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    return of_host, int(os.environ.get("WORLD_SIZE", of_host)) // of_host


def lightning():
    """Return the package Lightning, or end the program with the command that installs it."""
    try:
        import pytorch_lightning
    except ModuleNotFoundError:
        sys.exit("lightning_example.py needs Lightning: python -m pip install pytorch-lightning")
    # Lightning's advice about loaders, loggers and other products would distract.
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
    return pytorch_lightning


def module(pl, learning_rate: float):
    """Return FashionCNN as a Lightning module, whose steps do not mention ranks."""

    class FashionModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = FashionCNN()

        def training_step(self, batch):
            images, labels = batch
            return nn.functional.cross_entropy(self.model(images), labels)

        def test_step(self, batch):
            images, labels = batch
            right = (self.model(images).argmax(1) == labels).float().mean()
            self.log("accuracy", 100 * right, sync_dist=True)  # the mean of all ranks

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=learning_rate)

    return FashionModule()


def main(argv: list[str] | None = None) -> float:
    """Train, test and return the accuracy in per cent."""
    parser = training_arguments(__doc__, epochs=2, batch_size=32)
    parser.add_argument("--devices", type=positive, default=1, help="processes, without a launcher")
    args = parser.parse_args(argv)
    pl = lightning()
    pl.seed_everything(0, verbose=False)
    training_set, test_set = load(args.data_dir)
    devices, num_nodes = processes(args.devices)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            num_nodes=num_nodes,
            strategy="ddp" if devices * num_nodes > 1 else "auto",
            max_epochs=args.epochs,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
        )
        learned = module(pl, args.learning_rate)
        began = time.perf_counter()
        # Lightning puts a DistributedSampler into the loader, so each rank gets its share.
        trainer.fit(learned, DataLoader(first(training_set, args.items), args.batch_size, True))
        seconds = time.perf_counter() - began
        (found,) = trainer.test(learned, DataLoader(test_set, 200), verbose=False)
    if trainer.is_global_zero:
        print(f"{args.epochs} epoch(s) in {seconds:.1f} s, test accuracy {found['accuracy']:.1f} % "
              f"on {trainer.world_size} rank(s)", flush=True)  # fmt: skip
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return found["accuracy"]


if __name__ == "__main__":
    run(main)
