"""MLOps course, "Distributed training": data_parallel.py, the exercise on nn.DataParallel.
"""

# %% typed by the reader: the course's FashionCNN and a batch of FashionMNIST
import torch
import torchvision
from torch import nn


class FashionCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.layer2 = nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(64 * 6 * 6, 600)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(600, 120)
        self.fc3 = nn.Linear(120, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(x))
        x = self.drop(self.fc1(x.view(x.size(0), -1)))
        return self.fc3(self.fc2(x))


MyModelClass = FashionCNN
transform = torchvision.transforms.ToTensor()
dataset = torchvision.datasets.FashionMNIST("./data", download=True, transform=transform)
input = batch = torch.stack([dataset[i][0] for i in range(64)])
n_reps = 5

# %% from the text
from torch import nn
model = MyModelClass()
model = nn.DataParallel(model, device_ids=[0, 1])  # data parallel on gpu 0 and 1
preds = model(input)  # same as usual

# %% typed by the reader: the shape
print(tuple(preds.shape))

# %% from the text
import time
start = time.time()
for _ in range(n_reps):
    out = model(batch)
end = time.time()

# %% typed by the reader: the time
print(f"{n_reps} times: {end - start} s")
