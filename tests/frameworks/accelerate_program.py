"""Trains with Accelerate as its users write it: ``accelerate_program.py BACKEND``.

Accelerate takes no other name than gloo for the CPU, but uses a group that is there.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trained_digest import print_digest


def main():
    (backend,) = sys.argv[1:]
    if backend != "auto":
        dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    data = TensorDataset(torch.randn(48, 12), torch.randn(48, 3))
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(data, batch_size=6, shuffle=True)
    )
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                output = model(x)
                accelerator.backward(nn.functional.mse_loss(output, y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    gathered = accelerator.gather_for_metrics(output)
    assert gathered.shape == (2 * len(output), 3)
    accelerator.wait_for_everyone()
    print_digest(accelerator.unwrap_model(model))
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


main()
