"""A training of a PopTorch model with dropout, told phase by phase as program.py does.

python model_program.py CHECKPOINTS
"""

import hashlib
import os
import sys
from pathlib import Path

import torch

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

EPOCHS, SAVE_EVERY = 2, 4


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3),
            torch.nn.ReLU(), torch.nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, inputs, labels):
        scores = self.layers(inputs)
        return scores, torch.nn.functional.cross_entropy(scores, labels)


class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((6,), index / 96), torch.tensor(index % 3)


def note(phase, step=0):
    path = Path(os.environ["SOAK_NOTES"], f"instance-{os.environ['RANK']}")
    with path.open("a") as file:
        file.write(f"{phase} {step}\n")


def main(folder):
    note("start")
    torch.set_num_threads(1)
    popdist_py.init()
    torch.manual_seed(1)
    options = poptorch.DistributedOptions()
    options.randomSeed(11)
    options.showCompilationProgressBar(False)
    model = Net()
    training = poptorch.trainingModel(
        model, options, optimizer=poptorch.optim.AdamW(model.parameters(), lr=0.02)
    )
    loader = poptorch.DataLoader(
        options, Digits(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=False
    )
    keep = int(os.environ.get("SOAK_KEEP", "3"))
    checkpoints = TrainingCheckpoints(folder, training, loader, keep=keep)
    note("compile")
    step, _ = checkpoints.resume()
    while checkpoints.epoch < EPOCHS:
        for inputs, labels in checkpoints.batches():
            training(inputs, labels)
            note("training", step)
            step += 1
            if step % SAVE_EVERY == 0:
                note("checkpoint", step)
                checkpoints.save(step)
    note("end")
    weights = training.state_dict()
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in weights.values())).hexdigest()
    print("digest", digest, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
