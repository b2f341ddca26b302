"""Trains under torchrun; with ``fails`` a rank fails in its first start."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trained_digest import print_digest


def main():
    backend, way = sys.argv[1:]
    dist.init_process_group(backend)
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
        if (
            way == "fails"
            and dist.get_rank() == 1
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os._exit(3)
    print_digest(model)
    dist.destroy_process_group()


main()
