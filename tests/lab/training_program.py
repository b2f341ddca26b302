"""A training with random numbers and shuffled data, which prints a digest of its weights.

It waits at some steps until a file asks it to go on, so that the hosts can change before its end.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

folder, last, *waits = Path(sys.argv[1]), *map(int, sys.argv[2:])
torch.set_num_threads(1)
popdist_py.init()
torch.manual_seed(5)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 3),
        )

    def forward(self, inputs, labels):
        scores = self.layers(inputs)
        return scores, torch.nn.functional.cross_entropy(scores, labels)


options = poptorch.DistributedOptions()
options.randomSeed(11)
options.Emulator.deterministicReduction()
options.showCompilationProgressBar(False)
data = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.arange(96) % 3)
model = Net()
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
training = poptorch.trainingModel(model, options, optimizer=optimizer)
loader = poptorch.DataLoader(options, data, batch_size=3, shuffle=True)
checkpoints = TrainingCheckpoints(folder / "states", training, loader, disk_every=1_000_000)
step, _ = checkpoints.resume()
is_first = popdist_py.getInstanceIndex() == 0
while step < last:
    for inputs, labels in checkpoints.batches():
        training(inputs, labels)
        step += 1
        checkpoints.save(step)
        if is_first:
            with (folder / "log").open("a") as file:
                instances = popdist_py.getNumInstances()
                print(step, popdist_py.getNumTotalReplicas(), instances, time.time(), file=file)
        while step in waits and not (folder / f"go-on-{step}").exists():
            time.sleep(0.05)
        if step >= last:
            break
weights = b"".join(value.numpy().tobytes() for value in training.state_dict().values())
if is_first:
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
