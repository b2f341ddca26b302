"""Re-creates, from memory, optimiser schedules, saving and precompilation of PopTorch's user guide."""

import torch

import poptorch

torch.manual_seed(0)


class ExampleModelWithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(10, 10)
        self.loss = torch.nn.MSELoss()

    def forward(self, x, target=None):
        fc = self.fc(x)
        if self.training:
            return fc, self.loss(fc, target)
        return fc


input, target = torch.rand(10, 10), torch.rand(10, 10)
model = ExampleModelWithLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
poptorch_model = poptorch.trainingModel(model, options=poptorch.Options(), optimizer=optimizer)
losses, rates = [], []
for _ in range(6):
    losses.append(float(poptorch_model(input, target)[1]))
    rates.append(optimizer.param_groups[0]["lr"])
    scheduler.step()
    poptorch_model.setOptimizer(optimizer)
print("rates:", rates)
print("learns:", losses[-1] < losses[0])

torch.save(model.state_dict(), "weights.pth")
poptorch_model.destroy()

# The optimiser's own state, of a poptorch optimiser
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
poptorch_model = poptorch.trainingModel(model, optimizer=optimizer)
for _ in range(3):
    poptorch_model(input, target)
torch.save(
    {"optimizer_state_dict": optimizer.state_dict(), "model_state_dict": model.state_dict()},
    "checkpoint.pth",
)
after = float(poptorch_model(input, target)[1])
new_model = ExampleModelWithLoss()
new_optimizer = poptorch.optim.AdamW(new_model.parameters(), lr=0.01)
checkpoint = torch.load("checkpoint.pth")
new_model.load_state_dict(checkpoint["model_state_dict"])
new_optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
new_poptorch_model = poptorch.trainingModel(new_model, optimizer=new_optimizer)
print("continues:", abs(float(new_poptorch_model(input, target)[1]) - after) < 1e-6)

# Precompilation on a machine without IPUs, then the program that runs
opts = poptorch.Options()
opts.useOfflineIpuTarget(poptorch.ipuHardwareVersion() if poptorch.ipuHardwareIsAvailable() else 2)
exported = poptorch.trainingModel(ExampleModelWithLoss(), opts)
exported.compileAndExport("training_model.poptorch", input, target)
loaded = poptorch.load("training_model.poptorch")
print("loaded:", tuple(loaded(input, target)[0].shape))

# Rather an IPU than a CPU, where there is one
print("on the device:", poptorch.isRunningOnIpu())
