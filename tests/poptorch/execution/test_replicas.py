"""Ways of running replicas: all must agree with one after the other, over a zoo of models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


class Images(nn.Module):
    def __init__(self, norm, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            norm,
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(36, 3),
        )

    def forward(self, x, y):
        out = self.layers(x.reshape(-1, 1, 6, 6))
        return out, F.cross_entropy(out, y % 3)


class Words(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.core = core
        self.out = nn.Linear(8, 4)

    def forward(self, x, y):
        tokens = (x.abs() * 10).long() % 4
        hidden = self.core(self.embedding(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        out = self.out(hidden[:, -1])
        return out, F.cross_entropy(out, y)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(36, 36)
        self.b = nn.Linear(36, 36)
        self.b.weight = self.a.weight

    def forward(self, x, y):
        out = self.b(torch.tanh(self.a(x)))
        return out, F.nll_loss(F.log_softmax(out, 1), y)


class TwoLosses(Mlp):
    def forward(self, x, y):
        out = self.layers(x)
        total = F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, torch.zeros_like(out))
        return out, poptorch.identity_loss(total, reduction="none")


class HiddenLoss(Mlp):
    """The loss is not returned."""

    def forward(self, x, y):
        out = self.layers(x)
        F.cross_entropy(out, y)
        return out


class Dicts(Mlp):
    def forward(self, x, y):
        batch = {"x": x, "y": y}
        out = self.layers(batch["x"])
        return {"out": out, "loss": F.cross_entropy(out, batch["y"])}


class InPlace(Mlp):
    def forward(self, x, y):
        hidden = self.layers(x)
        hidden.mul_(2).add_(1)
        mask = torch.zeros_like(hidden)
        mask[:, 1:] = 1
        out = hidden * mask
        return out, F.cross_entropy(out, y)


class ByShape(Mlp):
    def forward(self, x, y):
        out = self.layers(x)
        if x.shape[0] > 1:
            out = out * 2
        for _ in range(x.shape[0]):
            out = out + 0.1
        return out, F.cross_entropy(out, y)


def frozen():
    model = Mlp(36)
    model.layers[0].weight.requires_grad_(False)
    return model


ZOO = {
    "mlp": lambda: Mlp(36),
    "batch norm": lambda: Images(nn.BatchNorm2d(4)),
    "group norm": lambda: Images(nn.GroupNorm(2, 4)),
    "dropout": lambda: Images(nn.Identity(), dropout=0.5),
    "gru": lambda: Words(nn.GRU(8, 8, batch_first=True)),
    "lstm": lambda: Words(nn.LSTM(8, 8, batch_first=True)),
    "transformer": lambda: Words(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "transformer with dropout": lambda: Words(
        nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
    ),
    "tied weights": Tied,
    "two losses": lambda: TwoLosses(36),
    "hidden loss": lambda: HiddenLoss(36),
    "dictionaries": lambda: Dicts(36),
    "in place": lambda: InPlace(36),
    "shapes decide": lambda: ByShape(36),
    "frozen": frozen,
    "regression": lambda: _Regression(),
}


class _Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = WithLoss(nn.Linear(36, 1), nn.L1Loss())

    def forward(self, x, y):
        return self.inner(x, y[:, None].float())


def train(model, execution, steps=2):
    options = quiet_options().replicationFactor(4).broadcastBuffers(False).randomSeed(7)
    options.outputMode(poptorch.OutputMode.All).deviceIterations(2)
    options.Emulator.replicaExecution(execution)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    outputs = [training(*classified(16, 36, seed=step)) for step in range(steps)]
    return training, outputs, copy.deepcopy(model.state_dict())


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [tensor for item in values for tensor in flat(item)]


def assert_same(ours, reference):
    for (name, tensor), expected in zip(ours[2].items(), reference[2].values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5, msg=name)
    for tensor, expected in zip(flat(ours[1]), flat(reference[1]), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


_OF_MANY = {"gru", "transformer"}  # a default test has the longer one of two that are alike


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep) if n in _OF_MANY else n for n in ZOO]
)
def test_all_ways_agree_with_the_loop(name):
    torch.manual_seed(0)
    model = ZOO[name]()
    reference = train(copy.deepcopy(model), "loop")
    assert reference[0]._compiled.program.back_end == "loop"
    for execution in ("fused", "auto"):
        assert_same(train(copy.deepcopy(model), execution), reference)


def test_what_cannot_run_fused_says_why(caplog):
    class Loud(Mlp):
        def forward(self, x, y):
            out = self.layers(poptorch.ipu_print_tensor(x, "x"))
            return out, F.cross_entropy(out, y)

    with pytest.raises(poptorch.Error, match=r"fused.*not possible"):
        train(Loud(36), "fused")
    poptorch.setLogLevel("INFO")
    try:
        train(Loud(36), "auto")
    finally:
        poptorch.setLogLevel("WARN")
    lines = [r.getMessage() for r in caplog.records if "one after the other" in r.getMessage()]
    assert len(lines) == 1


def test_python_state_outside_torch_is_not_baked_into_a_graph():
    """NumPy in a forward cannot be recorded: what depends on the data must stay so."""

    class Numeric(Mlp):
        def forward(self, x, y):
            shift = torch.from_numpy(x.detach().numpy().mean(axis=1, keepdims=True).copy())
            out = self.layers(x + shift)
            return out, F.cross_entropy(out, y)

    model = Numeric(36)
    reference = copy.deepcopy(model)
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x, y = classified(4, 36, seed=step)
        training(x, y)
        optimizer.zero_grad()
        reference(x, y)[1].backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach())


class Layouts(nn.Module):
    """Weights, and gradients in a recorded graph, that lie in memory in another order."""

    def __init__(self):
        super().__init__()
        self.images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 16).t())
        self.last = nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        hidden = self.images(x).flatten(1) @ self.transposed
        out = torch.einsum("ij,kj->ik", hidden, self.last)
        return poptorch.identity_loss(out.square(), reduction="mean")


@pytest.mark.parametrize("kind", [poptorch.optim.SGD, poptorch.optim.Adam])
@pytest.mark.parametrize(
    ("execution", "deterministic"), [("loop", False), ("loop", True), ("graph", False)]
)
def test_layouts_in_memory_do_not_matter(kind, execution, deterministic):
    torch.manual_seed(0)
    model = Layouts()
    reference = copy.deepcopy(model)
    options = quiet_options().replicationFactor(2)
    options.Emulator.deterministicReduction(deterministic).set(replica_execution=execution)
    training = poptorch.trainingModel(model, options, kind(model.parameters(), lr=0.01))
    theirs = kind.__mro__[2](reference.parameters(), lr=0.01)
    for step in range(2):
        x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        training(x)
        theirs.zero_grad()
        reference(x).backward()
        theirs.step()
    assert training._compiled.program.back_end == execution
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    """The biases of two branches have one gradient, and so has a scalar and the loss itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
        self.penalty = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, y):
        out = self.a(x) + self.b(x)
        return out, poptorch.identity_loss(F.cross_entropy(out, y) + self.penalty, "none")


@pytest.mark.parametrize("execution", ["loop", "graph", "fused graph"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_share_memory_are_accumulated_apart(execution, accumulation):
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    options = quiet_options().replicationFactor(2)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.set(replica_execution=execution)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, loss_scaling=8.0, max_grad_norm=0.1
    )
    training = poptorch.trainingModel(model, options, optimizer)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x, y = classified(8 * accumulation, seed=step)
        training(x, y)
        theirs.zero_grad()
        reference(x, y)[1].backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        theirs.step()
    assert training._compiled.program.back_end == execution
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_random_streams_do_not_depend_on_the_split_of_replicas():
    """Replica r of a step draws the same numbers wherever it runs."""
    model = nn.Dropout(0.5)
    both = poptorch.inferenceModel(model, quiet_options().replicationFactor(2).randomSeed(3))
    x = torch.ones(2, 64)
    whole = both(x)
    for process in range(2):
        options = quiet_options().randomSeed(3)
        options.Distributed.configureProcessId(process, 2)
        part = poptorch.inferenceModel(model, options)(x[process : process + 1])
        assert torch.equal(part[0], whole[process])
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_deterministic_reduction_adds_in_a_tree(accumulation):
    torch.manual_seed(0)
    model = Mlp()
    single = copy.deepcopy(model)
    options = quiet_options().replicationFactor(4)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.deterministicReduction()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = classified(8 * accumulation)
    training(x, y)
    gradients = []
    for replica in range(4):
        single.zero_grad()
        for step in range(accumulation):
            rows = slice((step * 4 + replica) * 2, (step * 4 + replica) * 2 + 2)
            loss = single(x[rows], y[rows])[1]
            loss.backward(torch.tensor(1.0 / (4 * accumulation)))
        gradients.append([p.grad.clone() for p in single.parameters()])
    for index, (ours, before) in enumerate(
        zip(model.parameters(), single.parameters(), strict=True)
    ):
        g = [gradient[index] for gradient in gradients]
        assert torch.equal(ours.detach(), before.detach() - ((g[0] + g[1]) + (g[2] + g[3])))


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="'auto', 'loop' or 'fused'"):
        poptorch.Options().Emulator.replicaExecution("quick")


def test_compiling_prints_once_whatever_is_tried(capsys):
    class Talking(Mlp):
        def forward(self, x, y):
            print("a forward")
            return super().forward(x, y)

    options = quiet_options()
    options.replicationFactor(2)
    model = poptorch.inferenceModel(Talking(), options)
    x, y = classified(4)
    model.compile(x, y)
    assert capsys.readouterr().out.count("a forward") == 1
