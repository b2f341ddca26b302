"""A PopDist program that uses Horovod and PopTorch, like Graphcore's BERT and CNN programs."""

import horovod.torch as hvd
import popart
import popdist
import popdist.poptorch
import poptorch
import torch
from torch import nn

popdist.init()
hvd.init()
seed = hvd.broadcast(torch.tensor([1234 + popdist.getInstanceIndex()]), root_rank=0).item()
options = popdist.poptorch.Options(ipus_per_replica=popdist.getNumIpusPerReplica())
options.randomSeed(seed)
options._Popart.set(
    "subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime)
).setPatterns({"TiedGather": True})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.layer(x)
        return out, self.loss(out, y)


torch.manual_seed(popdist.getInstanceIndex())  # instances have different initial weights
model = Model()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
training = poptorch.trainingModel(model, options, optimizer)
hvd.broadcast_parameters(training.state_dict(), root_rank=0)
generator = torch.Generator().manual_seed(seed)
data = torch.utils.data.TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 3)
loader = poptorch.DataLoader(options, data, batch_size=2)
for _ in range(2):
    for x, y in loader:
        _, loss = training(x, y)
mean = hvd.allreduce(loss.mean(), name="loss").item()
losses = hvd.allgather(loss.mean().unsqueeze(0))
assert abs(losses.mean().item() - mean) < 1e-6
for other in hvd.allgather_object(model.layer.weight.detach()):
    assert torch.equal(other, model.layer.weight)
counts = hvd.grouped_allreduce([torch.tensor(1.0), torch.tensor(2.0)], op=hvd.Sum)
print(f"seed {seed}, {int(counts[0])} instances on {hvd.size() // hvd.local_size()} host")
