"""Re-creates, from memory, the execution strategies of PopTorch's user guide.

BeginBlock, Block and BlockFunction; PipelinedExecution with Stages and with AutoStage,
ShardedExecution, SerialPhasedExecution, ParallelPhasedExecution.
"""

import torch

import poptorch

torch.manual_seed(0)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = torch.nn.Linear(5, 10)
        self.layer2 = torch.nn.Linear(10, 5)
        self.layer3 = torch.nn.Linear(5, 5)
        self.layer4 = torch.nn.Linear(5, 5)
        self.act = torch.nn.ReLU()
        self.softmax = torch.nn.Softmax(dim=1)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, target=None):
        with poptorch.Block("B1"):
            x = self.act(self.layer1(x))
        with poptorch.Block("B2"):
            x = self.act(self.layer2(x))
        with poptorch.Block("B3"):
            x = self.act(self.layer3(x))
        with poptorch.Block("B4"):
            x = self.softmax(self.layer4(x))
            if target is None:
                return x
            return x, self.loss(x, target)


class Annotated(torch.nn.Module):
    """Blocks that begin at a layer, and one of a function."""

    def __init__(self):
        super().__init__()
        self.layer1 = torch.nn.Linear(5, 10)
        self.layer2 = torch.nn.Linear(10, 5)
        self.loss = torch.nn.CrossEntropyLoss()
        poptorch.BeginBlock(self.layer1, "B1", ipu_id=0)
        self.layer2 = poptorch.BeginBlock(self.layer2, ipu_id=1)

    @poptorch.BlockFunction("loss", ipu_id=1)
    def with_loss(self, x, target):
        return x, self.loss(x, target)

    def forward(self, x, target=None):
        x = self.layer2(torch.relu(self.layer1(x)))
        return x if target is None else self.with_loss(x, target)


def strategies():
    stages = [poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1), poptorch.Stage("B3").ipu(2)]
    yield "pipelined", poptorch.PipelinedExecution(*stages, poptorch.Stage("B4").ipu(3))
    yield "pipelined by name", poptorch.PipelinedExecution("B1", "B2", "B3", "B4")
    yield "pipelined, two stages", poptorch.PipelinedExecution(
        poptorch.Stage("B1", "B2").ipu(0), poptorch.Stage("B3", "B4").ipu(1)
    )
    yield "sharded", poptorch.ShardedExecution(*stages, poptorch.Stage("B4").ipu(3))
    strategy = poptorch.SerialPhasedExecution(
        poptorch.Phase(poptorch.Stage("B1")),
        poptorch.Phase(poptorch.Stage("B2")),
        poptorch.Phase(poptorch.Stage("B3")),
        poptorch.Phase(poptorch.Stage("B4")),
    )
    strategy.phase(0).ipus(0)
    strategy.phase(1).ipus(1)
    strategy.phase(2).ipus(0)
    strategy.phase(3).ipus(1)
    strategy.setTensorsLiveness(poptorch.Liveness.AlwaysLive)
    yield "serial phased", strategy
    strategy = poptorch.ParallelPhasedExecution(
        poptorch.Phase("B1").ipus(0),
        poptorch.Phase("B2").ipus(1),
        poptorch.Phase("B3").ipus(0),
        poptorch.Phase("B4").ipus(1),
    )
    strategy.sendTensorsOffChipAfterFwd()
    yield "parallel phased", strategy


def losses(model, strategy, accumulation):
    opts = poptorch.Options()
    opts.deviceIterations(2)
    opts.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, opts, optimizer)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(2 * accumulation * 2, 5, generator=generator)
    target = torch.randint(0, 5, (2 * accumulation * 2,), generator=generator)
    found = [float(training(data, target)[1]) for _ in range(3)]
    training.destroy()
    return found


initial = Network().state_dict()
found = {}
for name, strategy in strategies():
    model = Network()
    model.load_state_dict(initial)
    found[name] = losses(model, strategy, 8)
    assert found[name][-1] < found[name][0], name
    print(f"{name}: the same losses: {torch.allclose(torch.tensor(found[name]), torch.tensor(found['pipelined']))}")

model = Annotated()
auto = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
print("auto stages:", len(losses(model, auto, 8)), "steps")
print("by IPU:", len(losses(model, None, 8)), "steps")
poptorch.removeBlocks(model)
print("without blocks:", len(losses(model, poptorch.ShardedExecution(), 1)), "steps")
