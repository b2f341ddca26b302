"""Re-creates, from memory, Graphcore's feature example "Distributed training with PopDist".

ResNet-18 on CIFAR-10; a checkpoint of every instance, which have to hold equal weights.
"""

import argparse
import os

import popdist
import popdist.poptorch
import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as transforms

import poptorch


class ModelWithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        logits = self.model(images)
        if labels is None:
            return logits
        return logits, self.loss(logits, labels)


def create_options(args):
    if popdist.isPopdistEnvSet():
        opts = popdist.poptorch.Options(ipus_per_replica=1)
    else:
        opts = poptorch.Options()
        opts.replicationFactor(args.replicas)
    opts.randomSeed(args.seed)
    opts.deviceIterations(args.device_iterations)
    return opts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--device-iterations", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-output-dir", default="checkpoints")
    args = parser.parse_args()

    if popdist.isPopdistEnvSet():
        # Initialise popdist so that the instances can communicate.
        popdist.init()
        print(f"instance {popdist.getInstanceIndex()} of {popdist.getNumInstances()}: {popdist.getNumLocalReplicas()} of {popdist.getNumTotalReplicas()} replicas")

    torch.manual_seed(args.seed)
    opts = create_options(args)
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))]
    )
    dataset = torchvision.datasets.CIFAR10("./datasets", train=True, download=True, transform=transform)
    dataloader = poptorch.DataLoader(opts, dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = torchvision.models.resnet18(num_classes=10)
    model.train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training_model = poptorch.trainingModel(ModelWithLoss(model), opts, optimizer)

    for epoch in range(args.epochs):
        losses = [float(training_model(images, labels)[1].mean()) for images, labels in dataloader]
        print(f"epoch {epoch + 1}: {len(losses)} steps, loss {sum(losses) / len(losses):.4f}")

    os.makedirs(args.checkpoint_output_dir, exist_ok=True)
    path = os.path.join(args.checkpoint_output_dir, f"checkpoint-instance-{popdist.getInstanceIndex()}.pt")
    torch.save({"model_state_dict": model.state_dict(), "loss": losses[-1]}, path)
    print("saved", path)
