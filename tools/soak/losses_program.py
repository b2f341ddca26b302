"""A PopTorch training that logs every finished step, for the run with repeated losses.

python losses_program.py STEPS PAUSE CHECKPOINTS

The training has shuffling, dropout, batch norm and momentum. It resumes from its newest state and
ends after STEPS steps in all. Each step sleeps for PAUSE seconds.
"""

import sys
import time

import torch
from training_notes import DIGEST_EVERY, Notes, digest_of

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

IMAGES, FEATURES, CLASSES, HIDDEN = 256, 64, 10, 256


def make_training():
    """Return the model and the loader of its batches."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.ReLU(),
                torch.nn.Dropout(0.3), torch.nn.Linear(HIDDEN, CLASSES),
            )  # fmt: skip

        def forward(self, inputs, labels):
            scores = self.layers(inputs)
            return scores, torch.nn.functional.cross_entropy(scores, labels)

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return IMAGES

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            return torch.randn(FEATURES, generator=generator), torch.tensor(index % CLASSES)

    torch.manual_seed(1)
    options = poptorch.DistributedOptions()
    options.randomSeed(11)
    options.Emulator.deterministicReduction(True)
    options.showCompilationProgressBar(False)
    model = Net()
    training = poptorch.trainingModel(
        model, options, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    )
    loader = poptorch.DataLoader(options, Images(), batch_size=2, shuffle=True)
    return training, loader


def main(num_steps, pause, folder):
    notes = Notes()
    notes.add_start()
    notes.add("imported")
    torch.set_num_threads(1)
    popdist_py.init()
    notes.add("connected")
    training, loader = make_training()
    checkpoints = TrainingCheckpoints(folder, training, loader, disk_every=DIGEST_EVERY)
    step, _ = checkpoints.resume()
    notes.add("resumed", step)
    while step < num_steps:
        for inputs, labels in checkpoints.batches():
            time.sleep(pause)
            training(inputs, labels)
            step += 1
            checkpoints.save(step)
            notes.add("step", step)
            if step % DIGEST_EVERY == 0 and popdist_py.getInstanceIndex() == 0:
                notes.add("digest", step, text=digest_of(training))
            if step == num_steps:
                break
    notes.add("end", step, text=digest_of(training))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
