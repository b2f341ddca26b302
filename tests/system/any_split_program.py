"""A small training whose bits must not depend on the number of instances.

It resumes from the folder that it is given, trains up to a step, saves, and writes the losses of
all its replicas and the digest of its weights.
"""

import json
import sys
from pathlib import Path

import torch
from training_parts import Net, digest_of

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

REPLICAS, ELEMENTS, MICRO_BATCH, ITERATIONS, ACCUMULATION = 8, 210, 2, 2, 2
STEPS_IN_EPOCH = 3  # 64 samples in a step: 18 of the 210 are left over


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return ELEMENTS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.tensor(index % 3)


def options_of_job():
    options = poptorch.DistributedOptions()
    if not popdist_py.isPopdistEnvSet():
        options.replicationFactor(REPLICAS)
    options.randomSeed(11).deviceIterations(ITERATIONS).outputMode(poptorch.OutputMode.All)
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Training.setAutomaticLossScaling(True)
    options.Emulator.deterministicReduction()
    return options


def main(folder, last_step, workers):
    popdist_py.init()
    options = options_of_job()
    torch.manual_seed(1)
    model = Net(16)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02, loss_scaling=64.0)
    training = poptorch.trainingModel(model, options, optimizer=optimizer)
    loader = poptorch.DataLoader(options, Points(), MICRO_BATCH, shuffle=True, num_workers=workers)
    assert len(loader) == STEPS_IN_EPOCH
    checkpoints = TrainingCheckpoints(folder / "checkpoints", training, loader)
    index = popdist_py.getInstanceIndex()
    step, _ = checkpoints.resume()
    while step < last_step:
        for inputs, labels in checkpoints.batches():
            _, losses = training(inputs, labels)
            step += 1
            rows = losses.reshape(ITERATIONS * ACCUMULATION, -1).tolist()
            path = folder / f"losses-{step}-{index}-of-{popdist_py.getNumInstances()}.json"
            path.write_text(json.dumps(rows))
            if step == last_step:
                break
    checkpoints.save(step)
    digest = digest_of(training)
    if index == 0:
        (folder / "digest").write_text(digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
