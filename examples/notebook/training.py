# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A distributed training, from a notebook
#
# Two instances with four replicas each learn handwritten digits. We plan the job, launch it, watch
# it, see it fail on one instance, fix the error, and compare two runs. At the end, several jobs run
# side by side.
#
# Everything happens in this notebook: the function that the instances run is defined in a cell. It
# needs `poprun_py` and scikit-learn, whose digits it reads. The IPUs are emulated.

# %%
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import poprun_py

# %% [markdown]
# ## Plan
#
# All jobs use these options. With `wait_for_resources`, a job waits until the cores of this machine
# are free. With `output_dir`, each run has its own folder. The comparison below reads these
# folders.

# %% tags=["parameters"]
runs = Path("runs")
epochs = 4

# %%
options = {
    "num_instances": 2,
    "num_replicas": 8,
    "wait_for_resources": 600,
    "output_dir": runs,
}

# %% [markdown]
# A plan shows the host and the cores of each instance, without starting the job. A notebook draws
# it:

# %%
poprun_py.plan(poprun_py.LaunchConfig(program=("python",), **options))

# %% [markdown]
# ## Launch
#
# There are 1,797 pictures of 8 by 8 points. 1,440 are for training, and the others are for tests.

# %%
pictures, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
labels = labels[order]
training_set = pictures[:1440], labels[:1440]
test_set = pictures[1440:], labels[1440:]

# %% [markdown]
# Every instance calls this function. Its loader reads the instance's own shard of the training set,
# the model runs on its four replicas, and the gradients are reduced over all eight.


# %%
def train(training_set, test_set, learning_rate=0.008, epochs=4):
    """Train a small network, and return its accuracy on the test set in per cent."""
    import torch
    from torch import nn

    import popdist_py
    from popdist_py import poptorch

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(256, 10),
            )

        def forward(self, pictures, labels):
            scores = self.layers(pictures)
            return scores, nn.functional.cross_entropy(scores, labels)

    popdist_py.init()
    torch.manual_seed(1)
    model = Network()
    options = poptorch.DistributedOptions()
    options.randomSeed(1)
    options.showCompilationProgressBar(False)
    data = torch.utils.data.TensorDataset(*map(torch.as_tensor, training_set))
    loader = poptorch.DataLoader(options, data, batch_size=4, shuffle=True)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=learning_rate)
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(1, epochs + 1):
        for some_pictures, some_labels in loader:
            _, loss = training_model(some_pictures, some_labels)
        print(f"epoch {epoch}: loss {loss.mean():.3f}", flush=True)

    test_pictures, test_labels = map(torch.as_tensor, test_set)
    with torch.no_grad():
        found = model.layers(test_pictures).argmax(1)
    return 100 * (found == test_labels).float().mean().item()


# %% [markdown]
# `launch` runs the job to its end. It shows the output of the instances with their tags, and
# returns the list of their results. Both instances have the same weights, so both report the same
# accuracy.

# %%
accuracies = poprun_py.launch(train, args=(training_set, test_set), **options)
print("accuracies in per cent:", [round(accuracy, 1) for accuracy in accuracies])

# %% [markdown]
# ## Watch
#
# `start` returns a handle at once. If the handle is the last value of a cell, the cell shows the
# progress of the job until its end.

# %%
arguments = {"learning_rate": 0.008, "epochs": epochs}
job = poprun_py.start(train, args=(training_set, test_set), kwargs=arguments, **options)
job

# %% [markdown]
# Other cells can run at the same time. This cell waits for the first epoch, and prints the status
# of the job and the output of instance 1:

# %%
while "epoch 1" not in job.output(instance=1) and not job.done():
    time.sleep(0.1)
print(job.status())
print(job.output(instance=1), end="")

# %% [markdown]
# `job.stop()` would end the job. We want its result, and note the name of the run:

# %%
steady_accuracy = job.result()[0]
steady = job.status().run_id
print(f"test accuracy {steady_accuracy:.1f} %, run {steady}")

# %% [markdown]
# ## It fails
#
# New pictures come in, with labels that were typed by hand. One zero was typed as a ten. We make
# these data from the last hundred pictures of the test set, and train on all pictures.

# %%
new_pictures, new_labels = test_set[0][-100:], test_set[1][-100:].copy()
new_labels[np.flatnonzero(new_labels == 0)[4]] = 10
more_pictures = np.concatenate([training_set[0], new_pictures])
more_labels = np.concatenate([training_set[1], new_labels])
fewer_tests = test_set[0][:-100], test_set[1][:-100]

# %% [markdown]
# One instance gets this picture in its shard, and fails. The other instance is ended at once. The
# notebook gets the same exception as the instance. The cause of the exception is the traceback of
# the instance, and its last line names the instance.

# %% tags=["raises-exception"]
poprun_py.launch(train, args=((more_pictures, more_labels), fewer_tests), **options)

# %% [markdown]
# ## Fix it, and run again
#
# The error names target 10. Which pictures have this label?

# %%
(wrong,) = np.flatnonzero(more_labels > 9)
print(f"picture {wrong} is labelled {more_labels[wrong]}")
for row in more_pictures[wrong, 0]:
    print("".join(" .:*#"[round(4 * float(value))] for value in row))

# %% [markdown]
# It looks like a zero.

# %%
more_labels[wrong] = 0
arguments = {"learning_rate": 0.02, "epochs": epochs}
with poprun_py.start(
    train, args=((more_pictures, more_labels), fewer_tests), kwargs=arguments, **options
) as job:
    print(f"test accuracy {job.result()[0]:.1f} %")
    faster = job.status().run_id

# %% [markdown]
# ## Compare
#
# That job had a higher learning rate and more pictures. `poprun-py compare` reads the folders of
# both runs, and compares their speed, their loss and their settings.

# %%
# !{sys.executable} -m poprun_py compare --output-dir {runs} --target "loss<=0.3" {steady} {faster}

# %% [markdown]
# ## Several jobs at once
#
# Each job has a launcher in its own process, so we can start any number of jobs. Each of these jobs
# takes one core. The jobs run side by side while there are free cores, and the others wait.

# %%
small = {**options, "num_instances": 1, "num_replicas": 4, "cores_per_instance": 1}
rates = [0.002, 0.008, 0.02]
jobs = [
    poprun_py.start(
        train,
        args=((more_pictures, more_labels), fewer_tests),
        kwargs={"learning_rate": rate, "epochs": 2},
        **small,
    )
    for rate in rates
]
results = [job.result()[0] for job in jobs]
for rate, accuracy in zip(rates, results, strict=True):
    print(f"learning rate {rate:<6} test accuracy {accuracy:.1f} %")
print("best learning rate:", rates[int(np.argmax(results))])

# %% [markdown]
# A search can also choose each value by the results so far: `examples/sweeps` has a program with
# Optuna, and a program whose jobs Slurm starts.
