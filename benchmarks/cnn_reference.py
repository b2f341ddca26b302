"""ResNets under torchrun, as one writes it by hand: the reference of benchmarks/cnns.py.

torchrun --standalone --nproc-per-node 2 benchmarks/cnn_reference.py --model resnet18

DistributedDataParallel over gloo, one process and one thread for each core, SGD with momentum, and
images that are made once and come from a DataLoader. Rank 0 prints a line for every epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import get_model

CLASSES = 1000  # those of ImageNet


def generated(images: int, side: int) -> TensorDataset:
    """Return images [N, 3, side, side] and labels [N], the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, 3, side, side, generator=generator)
    return TensorDataset(pixels, torch.randint(0, CLASSES, (images,), generator=generator))


def train_epoch(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[torch.Tensor, ...]],
    micro_batches: int,
) -> None:
    """Make one step for every batch; its gradients are the mean over its micro-batches."""
    loss_of = nn.CrossEntropyLoss()
    for images, labels in batches:
        optimizer.zero_grad()
        parts = list(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
        for index, (x, y) in enumerate(parts):
            is_last = index + 1 == micro_batches
            with nullcontext() if is_last else model.no_sync():
                (loss_of(model(x), y) / micro_batches).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--batch", type=int, default=8, help="images of a rank in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch")
    parser.add_argument("--steps", type=int, default=10, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    global_batch = args.batch * dist.get_world_size()
    # Ranks keep statistics of their own, as instances do: there is nothing to broadcast.
    model = DistributedDataParallel(
        get_model(args.model, num_classes=CLASSES),
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    dataset = generated(args.steps * global_batch, args.side)
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    batches = DataLoader(dataset, batch_size=args.batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        began = time.perf_counter()
        train_epoch(model, optimizer, batches, args.micro_batches)
        dist.barrier()
        rate = args.steps * global_batch / (time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(json.dumps({"epoch": epoch, "images_per_s": round(rate, 2)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
