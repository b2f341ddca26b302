"""Plain PyTorch DDP on handwritten digits, with the same script for torchrun and poprun-py.

poprun-py -n 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py

Both launchers set environment variables with rank, size and address, which torch.distributed reads.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from common.arguments import Parser, positive, rate
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set.

    A set has images [N, 64] with values from 0 to 1, and labels [N].
    """
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(model: nn.Module, dataset: TensorDataset, args: argparse.Namespace) -> None:
    """Train ``model`` in place; DDP averages the gradients of all ranks in every step."""
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total / dist.get_world_size():.3f}", flush=True)


@torch.no_grad()
def test(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the accuracy on ``dataset`` in per cent. Each rank tests its share."""
    images, labels = dataset[dist.get_rank() :: dist.get_world_size()]
    correct = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return 100 * int(correct) / len(dataset)


def main(argv: list[str] | None = None) -> None:
    """Join the group of all ranks, train, test and leave the group."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: poprun-py -n 2 examples/ddp.py",
    )
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--batch-size", type=positive, default=16, help="samples of one rank")
    parser.add_argument("--learning-rate", type=rate, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    training_set, test_set = load()
    train(model, training_set, args)
    accuracy = test(model, test_set)
    if dist.get_rank() == 0:
        print(f"test accuracy {accuracy:.1f} % on {dist.get_world_size()} ranks", flush=True)
    # The model is freed before the process group. Otherwise, freeing the group can deadlock: the
    # main thread waits for gloo's thread and holds the GIL, which gloo's thread may need.
    del model
    # The barrier releases the GIL while it waits. gloo's thread needs the GIL to free the last
    # tensor. If the script ended earlier, torch would abort with the message "terminate called
    # without an active exception".
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
