"""Horovod's calls and DistributedDataParallel in one program, in turns."""

import popdist_py.horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trained_digest import print_digest


def main():
    hvd.init()
    dist.init_process_group("popdist")
    torch.manual_seed(3)
    model = torch.nn.Linear(12, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        loss = wrapped(torch.randn(8, 12)).square().mean()
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        reduced = loss.detach().clone()
        dist.all_reduce(reduced)
        assert torch.equal(mean, reduced / hvd.size())
    print_digest(model)
    dist.destroy_process_group()


main()
