"""A DDP training that logs every finished step, for the run with repeated losses.

python losses_ddp_program.py STEPS PAUSE CHECKPOINTS

The training has dropout, batch norm, momentum and a scheduler. It draws the samples of each step
from the step's number. The arguments are those of losses_program.py.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_notes import DIGEST_EVERY, Notes, digest_of

from popdist_py.checkpoint import LoopCheckpoints

BATCH_SIZE, FEATURES, CLASSES, HIDDEN = 16, 64, 10, 256


def make_training():
    """Return the model, the optimizer and the scheduler."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.ReLU(),
        torch.nn.Dropout(0.3), torch.nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.9)


def main(num_steps, pause, folder):
    notes = Notes()
    notes.add_start()
    notes.add("imported")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    notes.add("connected")
    rank = dist.get_rank()
    model, optimizer, scheduler = make_training()
    checkpoints = LoopCheckpoints(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, disk_every=DIGEST_EVERY
    )
    torch.manual_seed(100 + rank)  # of dropout
    begin = checkpoints.resume()
    notes.add("resumed", begin)
    for step in range(begin, num_steps):
        time.sleep(pause)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(BATCH_SIZE, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        checkpoints.save(step + 1)
        notes.add("step", step + 1)
        if (step + 1) % DIGEST_EVERY == 0 and rank == 0:
            notes.add("digest", step + 1, text=digest_of(model))
    notes.add("end", num_steps, text=digest_of(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
