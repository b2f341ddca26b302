"""PopTorch tutorial "Parallel execution using pipelining": mnist_pipeline.py, whose options the text lists.
"""

# %% from the text
import os
import json
import argparse
from pkgutil import get_data
import sys
from tqdm import tqdm
import torch
import torch.nn as nn
import torchvision
import poptorch

# %% from the text
class ConvLayer(nn.Module):
    def __init__(self, in_channels, num_filters, kernel_size, pool_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.conv(x)
        x = self.pool(x)
        x = self.relu(x)
        return x

# %% from the text, without its last line, which the function main calls
class Network(nn.Module):
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
            x = self.layer4(x)
        return x

# %% from the text
class TrainingModelWithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            loss = self.loss(output, labels)
        return output, loss

# %% typed by the reader: the learning rate is an argument
def get_training_model(opts, model, learning_rate):
    return poptorch.trainingModel(
        TrainingModelWithLoss(model),
        opts,
        optimizer=poptorch.optim.AdamW(model.parameters(), lr=learning_rate),
    )

# %% from the text
def accuracy(predictions, labels):
    _, ind = torch.max(predictions, 1)
    labels = labels[-predictions.size()[0] :]
    accuracy = torch.sum(torch.eq(ind, labels)).item() / labels.size()[0] * 100.0
    return accuracy

# %% typed by the reader: the number of epochs is an argument
def train(training_model, training_data, args):
    nr_steps = len(training_data)
    for epoch in range(1, args.epochs + 1):
        print(f"Epoch {epoch}/{args.epochs}")
        bar = tqdm(training_data, total=nr_steps)
        for data, labels in bar:
            preds, losses = training_model(data, labels)
            mean_loss = torch.mean(losses).item()
            acc = accuracy(preds, labels)
            bar.set_description(f"Loss:{mean_loss:0.4f} | Accuracy:{acc:0.2f}%")

# %% from the text
def test(inference_model, test_data):
    nr_steps = len(test_data)
    sum_acc = 0.0
    for data, labels in tqdm(test_data, total=nr_steps):
        output = inference_model(data)
        sum_acc += accuracy(output, labels)
    print(f"Accuracy on test set: {sum_acc / len(test_data):0.2f}%")

# %% typed by the reader: the options that the text lists, and what they do
def parse_args():
    parser = argparse.ArgumentParser(description="MNIST training in PopTorch with pipelining")
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--device-iterations", type=int, default=10)
    parser.add_argument("--test-batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-dir", type=str, default="./profile")
    parser.add_argument("--strategy", choices=["pipelined", "sharded"], default="pipelined")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--offload-optimiser", action="store_true")
    return parser.parse_args()


def dataset(train):
    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.1307,), (0.3081,)),
        ]
    )
    return torchvision.datasets.MNIST("mnist_data/", train=train, download=True, transform=transform)


def main():
    args = parse_args()
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    if args.profile:
        os.environ["POPLAR_ENGINE_OPTIONS"] = json.dumps(
            {"autoReport.all": "true", "autoReport.directory": args.profile_dir}
        )
    stages = [poptorch.Stage(f"B{i + 1}").ipu(i) for i in range(4)]
    if args.strategy == "pipelined":
        strategy = poptorch.PipelinedExecution(*stages)
    else:
        strategy = poptorch.ShardedExecution(*stages)
    train_opts = poptorch.Options()
    train_opts.setExecutionStrategy(strategy)
    train_opts.deviceIterations(args.device_iterations)
    train_opts.Training.gradientAccumulation(10 if args.strategy == "pipelined" else 1)
    train_opts.outputMode(poptorch.OutputMode.All)
    if args.offload_optimiser:
        train_opts.TensorLocations.setOptimizerLocation(
            poptorch.TensorLocationSettings().useOnChipStorage(False)
        )
    training_data = poptorch.DataLoader(
        train_opts,
        dataset(train=True),
        batch_size=args.batch_size,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
        num_workers=16,
    )
    model = Network()
    train(get_training_model(train_opts, model, args.learning_rate), training_data, args)
    inf_options = train_opts.clone()
    inf_options.Training.gradientAccumulation(1)
    inf_options.deviceIterations(100)
    test_data = poptorch.DataLoader(
        inf_options,
        dataset(train=False),
        batch_size=args.test_batch_size,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
        num_workers=16,
    )
    test(poptorch.inferenceModel(model, inf_options), test_data)


if __name__ == "__main__":
    main()
