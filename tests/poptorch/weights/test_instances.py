"""Several instances of one job: shared first weights, and the same bits for every split."""

from __future__ import annotations

import pytest

PROGRAM = """
import sys
import torch
from torch import nn
import popdist_py
from popdist_py import poptorch

torch.set_num_threads(1)
popdist_py.init()
index, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x, y):
        out = self.layers(x.to(dtype))
        return out, nn.functional.cross_entropy(out.float(), y)


torch.manual_seed(0 if index == 0 else 100 + index)
net = Net()
half = sys.argv[1] == "half"
dtype = torch.float16 if half else torch.float32
net.to(dtype)
options = poptorch.DistributedOptions().showCompilationProgressBar(False).randomSeed(5)
options.Training.gradientAccumulation(2)
options.Emulator.deterministicReduction()
options.Precision.enableStochasticRounding(half)
options.Training.setAutomaticLossScaling(half)
optimizer = poptorch.optim.Adam(
    net.parameters(), lr=0.05, accum_type=dtype, first_order_momentum_accum_type=dtype
)
training = poptorch.trainingModel(net, options, optimizer)
torch.manual_seed(1)
for step in range(4):
    x = torch.randn(2, 4, 3, 6)  # [accumulation][replica][micro-batch]
    y = torch.randint(0, 4, (2, 4, 3))
    mine = slice(index * 4 // count, (index + 1) * 4 // count)
    training(x[:, mine].reshape(-1, 6), y[:, mine].reshape(-1))
bits = "".join(p.detach().numpy().tobytes().hex() for p in net.parameters())
print(f"weights {index} {bits}")
"""


@pytest.mark.mpi
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("dtype", "splits"), [("float", (2, 4)), ("half", (1, 2))])
def test_every_split_ends_with_the_same_bits(poprun, script, dtype, splits):
    program = script(PROGRAM)
    found = set()
    for instances in splits:
        done = poprun(
            "--num-instances",
            instances,
            "--num-replicas",
            4,
            "--oversubscribe",
            program,
            dtype,
            timeout=80,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if "weights" in line]
        assert sorted(int(words[-2]) for words in lines) == list(range(instances))
        found |= {words[-1] for words in lines}
    assert len(found) == 1


GROUPED = """
import torch
from torch import nn
import popdist_py
from popdist_py import poptorch

popdist_py.init()
index = popdist_py.getInstanceIndex()


class Scale(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(groups, 2))

    def forward(self, x):
        return poptorch.identity_loss(self.w * x, "sum")


kinds = poptorch.CommGroupType
for kind, size, groups in ((kinds.Orthogonal, 2, 2), (kinds.NoGrouping, 1, 4)):
    model = Scale(groups)
    options = poptorch.DistributedOptions().showCompilationProgressBar(False)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    training.w.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
    training(torch.tensor([[1.0], [2.0], [4.0], [8.0]])[2 * index : 2 * index + 2].expand(2, 2))
    print("row sums", index, *model.w.sum(1).tolist())
"""


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_weights_grouped_over_the_replicas_of_several_instances(poprun, script):
    done = poprun(
        "--num-instances", 2, "--num-replicas", 4, "--oversubscribe", script(GROUPED), timeout=80
    )
    assert done.returncode == 0, done.stderr
    found = [line.partition("row sums ")[2] for line in done.stdout.splitlines()]
    expected = [
        f"{index} {rows}" for index in (0, 1) for rows in ("-2.5 -5.0", "-0.5 -1.0 -2.0 -4.0")
    ]
    assert sorted(line for line in found if line) == sorted(expected)
