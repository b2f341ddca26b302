"""Re-creates, from memory, PopTorch's tutorial "Observing tensors in PopTorch"."""

import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as transforms

import poptorch

torch.manual_seed(42)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(972, 100)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels=None):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.log_softmax(self.fc2(x))
        if self.training:
            loss = self.loss(x, labels)
            return x, poptorch.ipu_print_tensor(loss, "loss")
        return x


transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
train_dataset = torchvision.datasets.FashionMNIST("./datasets/", transform=transform, download=True, train=True)

model = Model()
opts = poptorch.Options()
opts.deviceIterations(2)

# The gradient and the bias of the last layer, under names of our own
opts.anchorTensor("grad_bias", "Gradient___fc2.bias")
opts.anchorTensor("update_weight", "UpdatedVar___fc2.weight", output_mode=poptorch.OutputMode.All)

train_dataloader = poptorch.DataLoader(opts, train_dataset, batch_size=16, shuffle=False)
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.001)
poptorch_model = poptorch.trainingModel(model, opts, optimizer)

data, labels = next(iter(train_dataloader))
poptorch_model.compile(data, labels)

tensor_names = poptorch_model.getTensorNames()
print([name for name in tensor_names if name.startswith("Gradient___fc")])

grad_bias, weights = [], []
for step, (data, labels) in enumerate(train_dataloader):
    if step == 3:
        break
    poptorch_model(data, labels)
    grad_bias.append(poptorch_model.getAnchoredTensor("grad_bias"))
    weights.append(poptorch_model.getAnchoredTensor("update_weight"))

print("gradients:", [tuple(x.shape) for x in grad_bias])
print("weights:", [tuple(x.shape) for x in weights])
print("histogram:", int(torch.histc(torch.cat([x.flatten() for x in grad_bias]), bins=10).sum()), "values")
poptorch_model.detachFromDevice()
