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

# %% tags=["script"]
"""The walk-through of pipelining as a script; walkthrough.ipynb is made of it.

python examples/pipelining/walkthrough.py --epochs 1 --training-iterations 2
python examples/pipelining/notebooks.py          # makes the notebook again
"""

# %% [markdown]
# # Parallel execution using pipelining
#
# A network that does not fit on one IPU is cut into stages, and each stage gets its own IPU. A
# single micro-batch would then use one IPU at a time. A pipeline starts the next micro-batch before
# the first one has passed all stages, so that all IPUs work.
#
# Here, a small network learns handwritten digits on four IPUs. A model of the device shows the
# action of each IPU in each step. The CPU computes the results.
#
# The notebook needs `mnist_pipeline.py` beside it and the folder `common` one folder up, as in the
# examples. The blocks of code are run from top to bottom. In a notebook, the value of a cell's last
# line is shown below it.

# %%
from itertools import islice
from pathlib import Path

import torch
import torchvision
from mnist_pipeline import prepare_mnist
from torch import nn
from tqdm import tqdm

from popdist_py import poptorch

# %% [markdown]
# ## Hyperparameters
#
# The micro-batch of training has 40 pictures. Ten of them are accumulated for an update, and ten
# updates are one call of the model: 4,000 pictures, or 15 calls for the 60,000 of MNIST.

# %% tags=["parameters"]
learning_rate = 0.001
epochs = 3
batch_size = 40
test_batch_size = 8
training_iterations = 10
gradient_accumulation = 10
inference_iterations = 100
workers = 2
steps = None  # calls of each epoch and of the test at most
data_dir = "mnist_data"

# %% tags=["script"]
if "__file__" in globals():
    import sys

    import popdist_py

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.arguments import Parser, from_zero, positive, rate

    parser = Parser(description="The walk-through: python walkthrough.py --epochs 1 --steps 2")
    for name, kind in {
        "learning-rate": rate,
        "epochs": positive,
        "batch-size": positive,
        "test-batch-size": positive,
        "training-iterations": positive,
        "gradient-accumulation": positive,
        "inference-iterations": positive,
        "workers": from_zero,
        "steps": positive,
        "data-dir": str,
    }.items():
        value = globals()[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=kind, default=value, help="as in the notebook")
    arguments = parser.parse_args()
    if popdist_py.isPopdistEnvSet():
        parser.error("this is a program of one process: mnist_pipeline.py is one for instances")
    globals().update(vars(arguments))

# %% [markdown]
# ## The data
#
# MNIST has 60,000 pictures of digits to train on and 10,000 to test with, each of 28 by 28 grey
# points. `ToTensor` makes numbers between 0 and 1 of them, `Normalize` gives them the mean 0 and
# the deviation 1 of the whole data set. If the folder does not contain MNIST,
# the program makes the same files with digits of scikit-learn.

# %%
prepare_mnist(Path(data_dir))
transform = torchvision.transforms.Compose(
    [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize((0.1307,), (0.3081,))]
)
train_dataset = torchvision.datasets.MNIST(data_dir, train=True, transform=transform)
test_dataset = torchvision.datasets.MNIST(data_dir, train=False, transform=transform)

# %% [markdown]
# A `poptorch.DataLoader` yields the samples of one call of the model: `batch_size` times gradient
# accumulation times device iterations. In the mode `Async`, a separate process prepares the next
# call while the model runs. That process is forked here, so it has the notebook's data set. A new
# process would have to import the data set. That only works for a script with
# `if __name__ == "__main__":`, such as `mnist_pipeline.py`.

# %%
train_opts = poptorch.Options()
train_opts.deviceIterations(training_iterations)
train_opts.Training.gradientAccumulation(gradient_accumulation)

loading = {
    "shuffle": True,
    "drop_last": True,
    "mode": poptorch.DataLoaderMode.Async,
    "async_options": {"sharing_strategy": poptorch.SharingStrategy.Fork},
    "num_workers": workers,
}
training_data = poptorch.DataLoader(train_opts, train_dataset, batch_size=batch_size, **loading)
test_data = poptorch.DataLoader(
    poptorch.Options().deviceIterations(inference_iterations),
    test_dataset,
    batch_size=test_batch_size,
    **loading,
)
len(training_data), len(test_data)

# %% [markdown]
# ## The network
#
# Two convolutions with max pooling, and two linear layers.


# %%
class ConvLayer(nn.Module):
    """Convolution, max pooling, ReLU."""

    def __init__(self, in_channels, num_filters, kernel_size, pool_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.pool(self.conv(x)))


# %% [markdown]
# A `poptorch.Block` names a part of the network that is computed together. Blocks mark the places
# where the network may be cut. They do not choose IPUs yet.


# %%
class Network(nn.Module):
    """Four blocks."""

    def __init__(self):
        super().__init__()
        self.layer1 = ConvLayer(1, 10, 5, 2)
        self.layer2 = ConvLayer(10, 20, 5, 2)
        self.layer3 = nn.Linear(320, 256)
        self.layer3_act = nn.ReLU()
        self.layer4 = nn.Linear(256, 10)

    def forward(self, x):
        with poptorch.Block("B1"):
            x = self.layer1(x)
        with poptorch.Block("B2"):
            x = self.layer2(x)
        with poptorch.Block("B3"):
            x = x.view(-1, 320)
            x = self.layer3_act(self.layer3(x))
        with poptorch.Block("B4"):
            return self.layer4(x)


model = Network()

# %% [markdown]
# Only training needs the loss, so it is in a module around the network, and in the block of the
# last layer.


# %%
class TrainingModelWithLoss(nn.Module):
    """The network and its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            loss = self.loss(output, labels)
        return output, loss


# %%
def get_training_model(opts, model):
    """Wrap a model with the loss and the optimiser into a training model."""
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=learning_rate)
    return poptorch.trainingModel(TrainingModelWithLoss(model), opts, optimizer=optimizer)


# %% [markdown]
# ## Pipelined: all IPUs at the same time
#
# A stage is one or more blocks on one IPU. These are four stages on four IPUs:

# %%
train_opts = poptorch.Options()
pipelined_strategy = poptorch.PipelinedExecution(
    poptorch.Stage("B1").ipu(0),
    poptorch.Stage("B2").ipu(1),
    poptorch.Stage("B3").ipu(2),
    poptorch.Stage("B4").ipu(3),
)
train_opts.setExecutionStrategy(pipelined_strategy)

# %% [markdown]
# With one block for each stage, in the order of the IPUs, the names are enough:

# %%
train_opts.setExecutionStrategy(poptorch.PipelinedExecution("B1", "B2", "B3", "B4"))

# %% [markdown]
# Two settings decide how full the pipeline is.
#
# - **Gradient accumulation** is the number of micro-batches between two updates. The weights do not
#   change between two updates, so the pipeline can hold many micro-batches at a time. It is empty
#   again at each update. Four IPUs need at least seven micro-batches.
# - **Device iterations** are the number of updates in one call of the model. They do not fill the
#   pipeline, but they save time on the host, which sends the data of all updates at once.

# %%
train_opts.deviceIterations(training_iterations)
train_opts.Training.gradientAccumulation(gradient_accumulation)

# %% [markdown]
# These are the first steps of the four IPUs. `F` is a forward and `B` a backward, with the number
# of the micro-batch. `R` is a recomputed forward, because keeping the activations of every
# micro-batch in the pipeline would need more memory. The model gets a clone of the options here,
# because a model's options cannot be changed later, and some of these options will change.

# %%
pictures = batch_size * gradient_accumulation * training_iterations
one_call = torch.zeros(pictures, 1, 28, 28), torch.zeros(pictures, dtype=torch.long)
print(get_training_model(train_opts.clone(), model).schedule(*one_call, steps=24))

# %% [markdown]
# The slowest stage limits the speed of all stages. If stages are unequal, or one does not fit, the
# blocks can be combined in another way, here on two IPUs instead of four:

# %%
on_two_ipus = poptorch.PipelinedExecution(
    poptorch.Stage("B1", "B2").ipu(0), poptorch.Stage("B3", "B4").ipu(1)
)

# %% [markdown]
# ## Sharded: one IPU at a time
#
# Sharded execution has the same stages, but computes one micro-batch after the other. It is slow,
# but simple, and suits debugging or a single sample.

# %%
sharded_strategy = poptorch.ShardedExecution(
    poptorch.Stage("B1").ipu(0),
    poptorch.Stage("B2").ipu(1),
    poptorch.Stage("B3").ipu(2),
    poptorch.Stage("B4").ipu(3),
)
sharded_opts = train_opts.clone()
sharded_opts.setExecutionStrategy(sharded_strategy)
print(get_training_model(sharded_opts, model).schedule(*one_call, steps=24))

# %% [markdown]
# ## Less memory: the optimiser's state off the chip
#
# AdamW keeps two numbers for each weight, which only the update reads. They can be stored outside
# the chip. The chip then has more free memory, but the update takes longer because of the
# transfers.

# %%
train_opts.TensorLocations.setOptimizerLocation(
    poptorch.TensorLocationSettings().useOnChipStorage(False)
)

# %% [markdown]
# ## Training
#
# By default, a call returns the results of the last micro-batch. For an accuracy over all
# micro-batches, all results have to be returned, which takes time.

# %%
train_opts.outputMode(poptorch.OutputMode.All)


# %%
def accuracy(predictions, labels):
    """Return the share of correct predictions in per cent."""
    labels = labels[-len(predictions) :]
    return (predictions.argmax(1) == labels).float().mean().item() * 100


def train(training_model, training_data):
    """Train with one progress bar for each epoch."""
    calls = min(steps or len(training_data), len(training_data))
    for epoch in range(1, epochs + 1):
        print(f"Epoch {epoch}/{epochs}")
        bar = tqdm(islice(training_data, calls), total=calls)
        for data, labels in bar:
            preds, losses = training_model(data, labels)
            bar.set_description(
                f"Loss:{losses.mean():0.4f} | Accuracy:{accuracy(preds, labels):0.2f}%"
            )


training_model = get_training_model(train_opts, model)
train(training_model, training_data)

# %% [markdown]
# ## Inference
#
# The inference model uses the trained weights automatically. Its options are those of the training
# without gradient accumulation. The device iterations fill a pipeline of forwards.


# %%
def test(inference_model, test_data):
    """Print the accuracy on the test set."""
    calls = min(steps or len(test_data), len(test_data))
    bar = tqdm(islice(test_data, calls), total=calls)
    percent = [accuracy(inference_model(data), labels) for data, labels in bar]
    print(f"Accuracy on test set: {sum(percent) / calls:0.2f}%")


inf_options = train_opts.clone()
inf_options.Training.gradientAccumulation(1)
inf_options.deviceIterations(inference_iterations)
inference_model = poptorch.inferenceModel(model, inf_options)
test(inference_model, test_data)
