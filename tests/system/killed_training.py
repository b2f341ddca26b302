"""A small training with dropout, batch statistics per replica and augmentation on the host.

Resumes from the folder it is given, prints the digest of its final weights.
"""

import os
import random
import signal
import sys
import time
import warnings

import torch
from training_parts import Net, digest_of

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

EPOCHS, EVERY = 3, 2


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        inputs = torch.full((6,), index / 96) + 0.1 * torch.randn(6) + 0.01 * random.random()
        return inputs, torch.tensor(index % 3)


def main(folder, pause=0.0):
    torch.set_num_threads(1)
    popdist_py.init()
    torch.manual_seed(5 + popdist_py.getInstanceIndex())
    random.seed(7)
    options = poptorch.DistributedOptions()
    options.randomSeed(11)
    options.showCompilationProgressBar(False)
    if not popdist_py.isPopdistEnvSet():
        options.replicationFactor(4)
    generator_state = torch.get_rng_state()
    torch.manual_seed(1)
    model = Net(8)
    torch.set_rng_state(generator_state)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    training = poptorch.trainingModel(model, options, optimizer=optimizer)
    loader = poptorch.DataLoader(options, Noisy(), batch_size=3, shuffle=True)
    checkpoints = TrainingCheckpoints(folder, training, loader, keep=2, disk_every=EVERY)
    step, extra = checkpoints.resume()
    if extra:
        schedule.load_state_dict(extra["schedule"])
    print("resumed at", step, flush=True)
    while checkpoints.epoch < EPOCHS:
        for inputs, labels in checkpoints.batches():
            training(inputs, labels)
            with warnings.catch_warnings(action="ignore"):  # the device made the optimiser's step
                schedule.step()
            training.setOptimizer(optimizer)
            step += 1
            stop = popdist_py.stopRequested()
            checkpoints.save(step, {"schedule": schedule.state_dict()})
            if stop:
                print("stopped at", step, flush=True)
                sys.exit(popdist_py.RESUME_EXIT_CODE)
            me = f"{popdist_py.getInstanceIndex()}:{step}"
            first_run = os.environ.get("POPDIST_RESTART_COUNT", "0") == "0"
            if first_run and os.environ.get("DIE_ONCE_AT") == me:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause)
    print("steps", step, "digest", digest_of(training), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
