"""PopTorch tutorial "Efficient data loading": the loader with asynchronous options, one step, accumulation.
"""

# %% typed by the reader: imports and the names that the block uses
import poptorch
import torch
import torch.nn as nn

bs, num_workers, K = 16, 4, 2
opts = poptorch.Options()
opts.deviceIterations(5)

# %% from the text, out of its sentence
opts.Training.gradientAccumulation(K)

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

# %% from the text, without the quotation marks of its note; indented into the conditional block
    training_data = poptorch.DataLoader(opts,
                                      dataset=dataset,
                                      batch_size=bs,
                                       shuffle=True,
                                       drop_last=True,
                                       num_workers=num_workers,
                                       mode=poptorch.DataLoaderMode.Async,
                                       async_options={"early_preload":True, "miss_sleep_time_in_ms":0})

# %% typed by the reader: one step, and how many samples it has
    data, labels = next(iter(training_data))
    print("N =", len(data), "= Global batch size x Device iterations =", bs * K, "x 5")
    print("returned:", [tuple(x.shape) for x in training_model(data, labels)])

# %% from the text
    training_model(data, labels)

# %% typed by the reader: the loader ends its processes
    training_data.terminate()
