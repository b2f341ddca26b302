"""Re-creates, from memory, Graphcore's simple application ``mnist_poptorch.py``."""

import argparse

import torch
import torch.nn as nn
import torchvision
from tqdm import tqdm

import poptorch


class Block(nn.Module):
    def __init__(self, in_channels, num_filters, kernel_size, pool_size):
        super(Block, self).__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.conv(x)
        x = self.pool(x)
        x = self.relu(x)
        return x


class Network(nn.Module):
    def __init__(self):
        super(Network, self).__init__()
        self.layer1 = Block(1, 32, 3, 2)
        self.layer2 = Block(32, 64, 3, 2)
        self.layer3 = nn.Linear(1600, 128)
        self.layer3_act = nn.ReLU()
        self.layer3_dropout = torch.nn.Dropout(0.5)
        self.layer4 = nn.Linear(128, 10)
        self.softmax = nn.Softmax(1)

    def forward(self, x):
        x = self.layer1(x)
        x = self.layer2(x)
        # Flatten layer
        x = x.view(-1, 1600)
        x = self.layer3_act(self.layer3(x))
        x = self.layer4(self.layer3_dropout(x))
        x = self.softmax(x)
        return x


class TrainingModelWithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, args, loss_inputs=None):
        output = self.model(args)
        if loss_inputs is None:
            return output
        loss = self.loss(output, loss_inputs)
        return output, loss


def accuracy(predictions, labels):
    _, ind = torch.max(predictions, 1)
    # provide labels only for samples, where prediction is available (during the training, not every
    # samples prediction is returned for efficiency reasons)
    labels = labels[-predictions.size()[0] :]
    accuracy = torch.sum(torch.eq(ind, labels)).item() / labels.size()[0] * 100.0
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MNIST training in PopTorch")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device-iterations", type=int, default=50)
    parser.add_argument("--test-batch-size", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--profile-dir", type=str)
    opts = parser.parse_args()

    training_opts = poptorch.Options()
    training_opts = training_opts.deviceIterations(opts.device_iterations)
    training_opts = training_opts.outputMode(poptorch.OutputMode.All)
    test_opts = poptorch.Options().deviceIterations(5)

    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.1307,), (0.3081,)),
        ]
    )
    training_data = poptorch.DataLoader(
        training_opts,
        torchvision.datasets.MNIST("mnist_data/", train=True, download=True, transform=transform),
        batch_size=opts.batch_size,
        shuffle=True,
        drop_last=True,
    )
    test_data = poptorch.DataLoader(
        test_opts,
        torchvision.datasets.MNIST("mnist_data/", train=False, download=True, transform=transform),
        batch_size=opts.test_batch_size,
        shuffle=True,
        drop_last=True,
    )

    model = Network()
    model_with_loss = TrainingModelWithLoss(model)
    training_model = poptorch.trainingModel(
        model_with_loss,
        training_opts,
        optimizer=torch.optim.SGD(model.parameters(), lr=opts.lr),
    )

    nr_steps = len(training_data)
    for epoch in range(1, opts.epochs + 1):
        print("Epoch {0}/{1}".format(epoch, opts.epochs))
        bar = tqdm(training_data, total=nr_steps)
        for data, labels in bar:
            preds, losses = training_model(data, labels)
            with torch.no_grad():
                mean_loss = torch.mean(losses).item()
                acc = accuracy(preds, labels)
                bar.set_description("Loss:{:0.4f} | Accuracy:{:0.2f}%".format(mean_loss, acc))

    training_model.detachFromDevice()

    inference_model = poptorch.inferenceModel(model, test_opts)
    sum_acc = 0.0
    for data, labels in tqdm(test_data, total=len(test_data)):
        output = inference_model(data)
        sum_acc += accuracy(output, labels)
    print("Accuracy on test set: {:0.2f}%".format(sum_acc / len(test_data)))
