"""Trains with Lightning as its users write it: ``lightning_program.py BACKEND``."""

import sys
import tempfile

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trained_digest import print_digest


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(),
                                    nn.Linear(20, 3))  # fmt: skip

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("valid", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self):
        print_digest(self, dist.get_backend())


def main():
    (backend,) = sys.argv[1:]
    pl.seed_everything(3)
    data = TensorDataset(torch.randn(48, 12), torch.randn(48, 3))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend=backend),
            max_epochs=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=16))
        dist.barrier()  # rank 0's folder holds the checkpoint of all
    dist.destroy_process_group()


main()
