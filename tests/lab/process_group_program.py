"""Trains with DDP over the back end popdist, and prints what every rank has.

The first argument is a size: of an all-reduce and an all-gather whose results are checked. The
second is optional and replaces the training. ``endless`` makes calls until one fails. ``late-2``
makes a call for which rank 2 is late by minutes. ``messages`` lets ranks 0 and 1 wait for messages
of rank 2, which never come, with a time-out of minutes; each prints how long its wait took.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import popdist_py.torch_backend  # noqa: F401

size, (how,) = int(sys.argv[1]), sys.argv[2:] or [""]
torch.set_num_threads(1)
dist.init_process_group("popdist", timeout=timedelta(seconds=6))
rank, count = dist.get_rank(), dist.get_world_size()

everything = torch.full((size,), float(rank))
dist.all_reduce(everything)
assert (everything == count * (count - 1) / 2).all()
gathered = torch.empty(count * size)
dist.all_gather_into_tensor(gathered, torch.full((size,), float(rank)))
assert torch.equal(gathered, torch.arange(float(count)).repeat_interleave(size))

if how == "late-2":
    print("waits", flush=True)
    if rank == 2:
        time.sleep(300)
    dist.all_reduce(everything)
if how == "endless":
    print("goes on", flush=True)
while how == "endless":
    dist.all_reduce(everything)

if how == "messages":
    dist.group.WORLD.set_timeout(timedelta(minutes=4))
    # Each rank exchanges a message with each other one, so that all connections are open.
    batch = []
    for other in {*range(count)} - {rank}:
        batch.append(dist.P2POp(dist.isend, torch.ones(1), other))
        batch.append(dist.P2POp(dist.irecv, torch.zeros(1), other))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    print("exchanged", flush=True)
    if rank == 2:
        time.sleep(300)
    began = time.monotonic()
    try:
        if rank == 0:
            dist.recv(torch.zeros(1), 2)
        else:
            (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 2)])
            work.wait()
    finally:
        print("waited", time.monotonic() - began, flush=True)

torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.ReLU()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
total = sum(parameter.double().sum() for parameter in model.parameters()).item()
group = dist.group.WORLD
print("rank", rank, group._membership._communicator.hosts, "mpi4py" in sys.modules, total.hex())
dist.destroy_process_group()
