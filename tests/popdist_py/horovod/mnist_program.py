"""Horovod's MNIST example with generated digits; the program prints the mean loss of a test."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=48)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=5)
        self.fc1 = nn.Linear(4 * 5 * 5, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.fc1(x.view(-1, 100)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 14, 14, generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


hvd.init()
torch.manual_seed(42 + hvd.rank())  # the weights of rank 0 replace those of other ranks
torch.set_num_threads(1)
train_set, test_set = digits(480, 1), digits(120, 2)
samplers = [DistributedSampler(s, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
            for s in (train_set, test_set)]  # fmt: skip
train_loader, test_loader = (
    DataLoader(data, batch_size=args.batch_size // hvd.size(), sampler=sampler)
    for data, sampler in zip((train_set, test_set), samplers, strict=True)
)

if hvd.rank() == 0:
    torch.manual_seed(42)
model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)

for epoch in range(1, args.epochs + 1):
    model.train()
    samplers[0].set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()

model.eval()
test_loss = correct = 0.0
with torch.no_grad():
    for data, target in test_loader:
        output = model(data)
        test_loss += F.nll_loss(output, target, reduction="sum").item()
        correct += output.argmax(1).eq(target).float().sum().item()
test_loss = metric_average(test_loss / len(samplers[1]), "avg_loss")
accuracy = metric_average(correct / len(samplers[1]), "avg_accuracy")
if hvd.rank() == 0:
    print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {100 * accuracy:.2f}%")
