"""Re-creates, from memory, PopTorch's tutorial "Half and mixed precision in PopTorch"."""

import argparse

import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as transforms
from tqdm import tqdm

import poptorch


class CustomModel(nn.Module):
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
        # The model is responsible for the calculation of the loss when using an IPU.
        if self.training:
            return x, self.loss(x, labels)
        return x


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-half", dest="model_half", action="store_true", help="Cast the model parameters to FP16")
    parser.add_argument("--data-half", dest="data_half", action="store_true", help="Cast the data to FP16")
    parser.add_argument("--optimizer-half", dest="optimizer_half", action="store_true", help="Cast the accumulation type of the optimiser to FP16")
    parser.add_argument("--stochastic-rounding", dest="stochastic_rounding", action="store_true", help="Use stochastic rounding")
    parser.add_argument("--partials-half", dest="partials_half", action="store_true", help="Set partials data type to FP16")
    args = parser.parse_args()

    model_half, data_half = args.model_half, args.data_half
    optimizer_half = args.optimizer_half

    model = CustomModel()
    if model_half:
        model = model.half()

    transform_list = [transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))]
    if data_half:
        transform_list.append(transforms.ConvertImageDtype(torch.half))
    transform = transforms.Compose(transform_list)

    train_dataset = torchvision.datasets.FashionMNIST("./datasets/", transform=transform, download=True, train=True)
    test_dataset = torchvision.datasets.FashionMNIST("./datasets/", transform=transform, download=True, train=False)

    train_opts = poptorch.Options()
    train_opts.deviceIterations(20)
    if args.stochastic_rounding:
        train_opts.Precision.enableStochasticRounding(True)
    if args.partials_half:
        train_opts.Precision.setPartialsType(torch.half)
    else:
        train_opts.Precision.setPartialsType(torch.float)

    train_dataloader = poptorch.DataLoader(train_opts, train_dataset, batch_size=12, shuffle=True, num_workers=2)

    optimizer = poptorch.optim.AdamW(
        params=model.parameters(),
        lr=0.001,
        loss_scaling=1024 if model_half or optimizer_half else 1.0,
        accum_type=torch.float16 if optimizer_half else torch.float32,
        first_order_momentum_accum_type=torch.float16 if optimizer_half else torch.float32,
        second_order_momentum_accum_type=torch.float32,
    )
    poptorch_model = poptorch.trainingModel(model, options=train_opts, optimizer=optimizer)

    for epoch in tqdm(range(2), desc="epochs"):
        total_loss = 0.0
        for data, labels in tqdm(train_dataloader, desc="batches", leave=False):
            output, loss = poptorch_model(data, labels)
            total_loss += loss
    poptorch_model.detachFromDevice()

    model.eval()
    eval_opts = poptorch.Options()
    poptorch_model_inf = poptorch.inferenceModel(model, options=eval_opts)
    test_dataloader = poptorch.DataLoader(eval_opts, test_dataset, batch_size=32, num_workers=2)

    correct = count = 0
    for data, label in tqdm(test_dataloader, desc="batches", leave=False):
        predictions = poptorch_model_inf(data).data.float().max(dim=1).indices
        correct += int((predictions == label).sum())
        count += len(label)
    poptorch_model_inf.detachFromDevice()
    print(f"Eval accuracy: {100 * correct / count:.2f}% with {data.dtype} data, {next(model.parameters()).dtype} weights")
