"""Trains with DistributedDataParallel, saves each step, and prints the digest of its weights."""

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from popdist_py.checkpoint import LoopCheckpoints
from popdist_py.torch_states.memory_copies import wait_for_copies

STEPS = 12


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    width = int(os.environ.get("WIDTH", "8"))
    layers = torch.nn.Sequential(
        torch.nn.Linear(6, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 3),
    )
    model = DistributedDataParallel(layers, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    torch.manual_seed(20 + rank)
    checkpoints = LoopCheckpoints(
        folder, model=model, optimizer=optimizer, schedule=schedule, disk_every=4
    )
    step = checkpoints.resume()
    print("resumed at", step, flush=True)
    while step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
        step += 1
        checkpoints.save(step)
        first_run = os.environ.get("POPDIST_RESTART_COUNT", "0") == "0"
        if first_run and os.environ.get("DIE_ONCE_AT") == f"{rank}:{step}":
            wait_for_copies()
            time.sleep(0.2)  # until the copies of the other instances are complete
            os.kill(os.getpid(), signal.SIGKILL)
    values = [*model.state_dict().values()]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
    print("digest", digest, flush=True)
    dist.destroy_process_group()


main(sys.argv[1])
