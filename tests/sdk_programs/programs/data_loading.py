"""PopTorch tutorial "Efficient data loading": its blocks, joined to the benchmark it describes.
"""

# %% typed by the reader: imports, the arguments of "Helpful arguments", the numbers of the two cases
import poptorch
import argparse
import time
import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--synthetic-data", action="store_true")
parser.add_argument("--replicas", type=int, default=1)
args = parser.parse_args()

bs = 16
replicas = args.replicas
device_iterations = 50
opts = poptorch.Options()
opts.deviceIterations(device_iterations)
opts.replicationFactor(replicas)

if args.synthetic_data:

# %% from the text
    opts.enableSyntheticData(True)

# %% from the text
class ClassificationModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(41772, 100)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=0)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels=None):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.log_softmax(self.fc2(x))
        if self.training: 
            return x, self.loss(x, labels)
        return x

if __name__ == '__main__':   
    model = ClassificationModel()
    model.train()  # Switch the model to training mode
    # Models are initialised in training mode by default, so the line above will
    # have no effect. Its purpose is to show how the mode can be set explicitly.
    training_model = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))

    # Create a fake dataset from random data
    features = torch.randn([10000, 1, 128, 128])
    labels = torch.empty([10000], dtype = torch.long).random_(10)
    dataset = torch.utils.data.TensorDataset(features, labels)

# %% from the text, indented into the conditional block as its note says
    training_data = poptorch.DataLoader(opts,
                                        dataset=dataset,
                                        batch_size=16,
                                        shuffle=True,
                                        drop_last=True,
                                        num_workers=32,
                                        mode=poptorch.DataLoaderMode.Async)

# %% from the text
    # Number of steps necessary to consume the whole dataset                                  
    steps = len(training_data)

# %% typed by the reader: the batches that the warm-up is shown
    data, labels = next(iter(training_data))

# %% from the text, without the quotation marks of its note
    # Warmup
    print("Compiling + Warmup ...")
    training_model.compile(data, labels)

# %% from the text
    t0 = time.time()
    for i, (data, labels) in enumerate(training_data):
        a, b = data, labels
    t1 = time.time()
    total_time = t1-t0
    print("total execution Time:", total_time, "s")
    print("DataLoader throughput:", (steps*device_iterations*bs*replicas)/total_time, "items/s")

# %% typed by the reader: the same with the model
    t0 = time.time()

# %% from the text
    for data, labels in training_data:
        training_model(data, labels)

# %% typed by the reader: the result
    total_time = time.time() - t0
    kind = "Synthetic" if args.synthetic_data else "Real"
    print(f"{kind} data throughput:", (steps*device_iterations*bs*replicas)/total_time, "items/s")
