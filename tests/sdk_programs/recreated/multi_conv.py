"""Re-creates, from memory, the multi-convolution examples of PopTorch's user guide and OctConv."""

import torch
import torch.nn as nn

import poptorch

torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1) for _ in range(2)])
        self.fc = nn.Linear(4 * 16 * 16, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, target=None):
        # The convolutions in this block are planned and run together.
        with poptorch.MultiConv():
            y = [layer(x) for layer in self.layers]

        with poptorch.MultiConv().availableMemoryProportions((0.8, 0.7)).partialsTypes(
            [torch.float, torch.float]
        ).cycleBackOff(0.4).planType(poptorch.MultiConvPlanType.Parallel).perConvReservedTiles(100):
            z = [torch.relu(layer(x)) for layer in self.layers]

        out = self.fc((y[0] + y[1] + z[0] + z[1]).flatten(1))
        if target is None:
            return out
        return out, self.loss(out, target)


model = Network()
x, target = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
reference = model(x)
inference = poptorch.inferenceModel(model)
print("as on the CPU:", torch.allclose(inference(x), reference, atol=1e-5))

training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
found = [float(training(x, target)[1]) for _ in range(5)]
print("learns:", found[-1] < found[0])


class Nested(nn.Module):
    def forward(self, x):
        with poptorch.MultiConv(), poptorch.MultiConv():
            return x


try:
    poptorch.inferenceModel(Nested())(x)
except poptorch.Error as error:
    print("refused:", error.message if hasattr(error, "message") else error)
