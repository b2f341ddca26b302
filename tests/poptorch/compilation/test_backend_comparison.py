"""Comparing back ends with the loop: rounding, however much a model enlarges it, is no error."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, classified, quiet_options
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import backend_comparison, backends, tensor_distances
from popdist_py.poptorch.compilation.backends import BACKENDS, Backend
from popdist_py.poptorch.execution.replicas import LoopReplicas

LEAK = 1e-4


def compiled(model, execution, inputs=6, replicas=4):
    options = quiet_options().replicationFactor(replicas).broadcastBuffers(False)
    options.Emulator.set(replica_execution=execution)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(*classified(8, inputs))
    return training._compiled.program.back_end


def use(monkeypatch, replicas):
    """Let the registry hold the loop and one back end of another device."""
    row = Backend(
        name="toy", option="device", can_run=lambda _: None, make=lambda model, *_: replicas(model)
    )
    monkeypatch.setattr(backends, "BACKENDS", (BACKENDS[0], row))


class Deep(nn.Module):
    """Norms over two samples, one after the other, enlarge a rounding at every layer."""

    def __init__(self):
        super().__init__()
        layers = [
            layer
            for _ in range(16)
            for layer in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), Squared())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(12, 4))

    def forward(self, x, y):
        out = self.layers(x)
        return out, F.cross_entropy(out, y)


class Squared(nn.Module):
    def forward(self, x):
        return x + x * x


class OtherRounding(LoopReplicas):
    """Rounds otherwise than the loop: its inputs are off by up to one rounding."""

    def run(self, call, inputs, number, scale):
        x, *others = inputs
        generator = torch.Generator().manual_seed(5)
        roundings = torch.randint(-1, 2, x.shape, generator=generator)
        x = x * (1 + torch.finfo(x.dtype).eps * roundings)
        return super().run(call, [x, *others], number, scale)


def test_rounding_that_a_model_enlarges_is_no_error(monkeypatch):
    torch.manual_seed(0)
    assert compiled(Deep(), "fused graph", 12) == "fused graph"
    assert compiled(Deep(), "fused", 12) == "fused graph"
    use(monkeypatch, OtherRounding)
    assert compiled(Deep(), "device", 12) == "toy"
    monkeypatch.setattr(backend_comparison, "_NOISE", 0.0)
    with pytest.raises(poptorch.Error, match="not those of the loop"):
        compiled(Deep(), "device", 12)


HELD: dict[str, torch.Tensor] = {}


class Remembering(Mlp):
    """Each forward adds something of the one before it, which is the replica before."""

    def forward(self, x, y):
        out = self.layers(x)
        before = HELD.get("out", torch.zeros_like(out))
        HELD["out"] = out.detach()
        out = out + LEAK * before
        return out, F.cross_entropy(out, y)


class Counting(Mlp):
    """Each forward adds the index of its replica, which Python counts."""

    calls = 0

    def forward(self, x, y):
        out = self.layers(x) + LEAK * (Counting.calls % 4)
        Counting.calls += 1
        return out, F.cross_entropy(out, y)


class Mix(torch.autograd.Function):
    """The identity, but of many replicas it returns something of their neighbours."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_, gradient):
        return gradient

    @staticmethod
    def vmap(_, in_dims, x):
        return Mix.apply(x + LEAK * x.roll(1, in_dims[0])), in_dims[0]


class Mixing(Mlp):
    def forward(self, x, y):
        out = Mix.apply(self.layers(x))
        return out, F.cross_entropy(out, y)


@pytest.mark.parametrize("model", [Remembering, Counting, Mixing])
@pytest.mark.parametrize("execution", ["fused", "fused graph", "auto"])
def test_replicas_that_leak_into_one_another_run_in_the_loop(model, execution):
    HELD.clear()
    Counting.calls = 0
    torch.manual_seed(0)
    if execution == "fused":
        with pytest.raises(poptorch.Error, match=r"fused.*not possible"):
            compiled(model(), execution)
    else:
        # In a graph for each replica, no replica has a neighbour.
        expected = "graph" if model is Mixing and execution == "auto" else "loop"
        assert compiled(model(), execution) == expected


class LeakingInputs(LoopReplicas):
    def run(self, call, inputs, number, scale):
        x = inputs[0] + LEAK * inputs[0].roll(2, 0)
        return super().run(call, [x, *inputs[1:]], number, scale)


class WrongGradients(LoopReplicas):
    def run(self, call, inputs, number, scale):
        return super().run(call, inputs, number, scale * (1 + LEAK))


class StaleBuffers(LoopReplicas):
    """Reads buffers as they were when it was made."""

    def __init__(self, model):
        super().__init__(model)
        self._buffers = list(model.state.buffers.values())
        self._values = [buffer.clone() for buffer in self._buffers]

    def run(self, call, inputs, number, scale):
        now = [buffer.clone() for buffer in self._buffers]
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)
            outputs = super().run(call, inputs, number, scale)
            for buffer, value in zip(self._buffers, now, strict=True):
                buffer.copy_(value)
        return outputs


class WithBuffer(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x, y):
        return super().forward(x + self.shift, y)


@pytest.mark.parametrize("wrong", [LeakingInputs, WrongGradients, StaleBuffers])
def test_a_small_error_of_a_back_end_is_found(wrong, monkeypatch):
    torch.manual_seed(0)
    use(monkeypatch, wrong)
    with pytest.raises(poptorch.Error, match=r"toy: its .* are not those of the loop"):
        compiled(WithBuffer(), "device")


def test_an_error_is_found_behind_norms_that_enlarge_rounding(monkeypatch):
    torch.manual_seed(0)
    use(monkeypatch, LeakingInputs)
    with pytest.raises(poptorch.Error, match=r"toy: its .* are not those of the loop"):
        compiled(Deep(), "device", 12)


def test_comparing_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    training = poptorch.inferenceModel(model.train(), quiet_options().replicationFactor(1))
    host = torch.get_rng_state()
    training.compile(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), host)
    state = training._compiled.state
    for device, value in zip(state.parameters.values(), model.parameters(), strict=True):
        assert torch.equal(device, value)
    for device, value in zip(state.buffers.values(), model.buffers(), strict=True):
        assert torch.equal(device, value)


def test_all_replicas_run_where_equal_ones_would_not_do_the_same(monkeypatch):
    """Those with random numbers differ."""
    runs = []
    run_one = LoopReplicas.run_one

    def counted(self, replica, *args):
        runs.append(replica)
        return run_one(self, replica, *args)

    monkeypatch.setattr(LoopReplicas, "run_one", counted)
    compiled(Mlp(), "fused graph")
    assert runs == [0, 1]
    runs.clear()
    model = Mlp()
    model.layers.append(nn.Dropout(0.5))
    compiled(model, "graph")
    assert runs == [0, 1, 2, 3]


SUM: list[int] = []


class Summing(Mlp):
    """Weighs its outputs by the sum of the labels, or by one that was found before."""

    def forward(self, x, y):
        out = self.layers(x) * (SUM[0] if SUM else y.sum())
        return out, F.cross_entropy(out, y)


class KeepsSum(LoopReplicas):
    def run(self, call, inputs, number, scale):
        SUM.append(int(classified(8)[1].sum()))
        try:
            return super().run(call, inputs, number, scale)
        finally:
            SUM.clear()


def test_a_sum_of_whole_numbers_is_another_one_where_back_ends_are_compared(monkeypatch):
    torch.manual_seed(0)
    use(monkeypatch, KeepsSum)
    assert compiled(Summing(), "auto", replicas=1) == "loop"


class FarFromItsDomain(Mlp):
    """Its numbers are finite only near those that it is made for."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def forward(self, x):
        out = self.layers(x) * (x[:, -1:] - self.bound).log()
        return out, poptorch.identity_loss(out.square(), "mean")


@pytest.mark.parametrize(
    ("bound", "wrong", "expected"),
    [
        (0.9, None, "fused graph"),
        (0.9, "gradients", "loop"),
        (0.999, None, "loop"),
        (2.0, None, "loop"),
    ],
    ids=["finite nearby", "wrong nearby", "finite at its own numbers", "never finite"],
)
def test_numbers_that_are_not_finite_prove_nothing(bound, wrong, expected, monkeypatch):
    torch.manual_seed(0)
    if wrong:
        use(monkeypatch, WrongGradients)
    model = FarFromItsDomain(bound)
    options = quiet_options().replicationFactor(4)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    x = classified(8)[0]
    x[:, -1] = 1.0
    training.compile(x)
    assert training._compiled.program.back_end == expected


class Mixed(nn.Module):
    """Weights of 32 bits and a backward that rounds to 16."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
        self.batch, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        out = self.last(self.batch(self.norm(self.first(x)))).float()
        return poptorch.identity_loss(out.square(), "mean")


class SameAgain(LoopReplicas):
    """All replicas one by one, as the loop runs them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loop_over_two_replicas_rounds_as_the_loop_over_all(dtype, monkeypatch):
    torch.manual_seed(0)
    use(monkeypatch, SameAgain)
    distances = []

    def noted(expected, got):
        distances.append(
            [tensor_distances.distance(a, b) for a, b in zip(expected, got, strict=True)]
        )
        return distances[-1]

    monkeypatch.setattr(backend_comparison, "distances", noted)
    model = Mixed().to(dtype)
    options = quiet_options().replicationFactor(4)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(classified(8)[0].half())
    assert training._compiled.program.back_end == "toy"
    assert not any(distance for of_kind in distances for distance in of_kind)


class Keeping(Mlp):
    """Adds to its outputs what it kept of the forward before, and counts."""

    def __init__(self):
        super().__init__()
        self.kept, self.count = [0.0], {"runs": 0}

    def forward(self, x, y):
        out = self.layers(x)
        result = out + self.kept[0] * self.count["runs"]
        self.kept[0] = out.detach()
        self.count["runs"] += 1
        return result, F.cross_entropy(result, y)


def test_trials_leave_nothing_in_the_lists_of_a_module():
    results = []
    for execution in ("loop", "auto"):
        torch.manual_seed(0)
        model = Keeping()
        options = quiet_options().replicationFactor(4)
        options.Emulator.replicaExecution(execution)
        training = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        results.append([training(*classified(8, seed=step))[0] for step in range(3)])
        assert training._compiled.program.back_end == "loop"
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_a_count_in_a_list_is_not_recorded():
    model = Keeping()
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(*classified(8))
    assert training._compiled.program.back_end == "loop"


class Withheld(torch.autograd.Function):
    """The identity, which gives its input no gradient."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        return None


class HalfTrained(Mlp):
    def __init__(self, withheld):
        super().__init__()
        self.withheld = withheld

    def forward(self, x, y):
        hidden = self.layers[0](x)
        if self.withheld:
            hidden = Withheld.apply(hidden)
        out = self.layers[2](hidden)
        return out, F.cross_entropy(out, y)


@pytest.mark.parametrize("withheld", [False, True])
def test_parameters_are_trained_if_the_loss_gives_them_a_gradient(withheld):
    model = HalfTrained(withheld)
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(*classified(8))
    used = {"layers.2.weight", "layers.2.bias"}
    if not withheld:
        used |= {"layers.0.weight", "layers.0.bias"}
    assert training._compiled.executable.first_forward.used_parameters == used


class NotesMemory(LoopReplicas):
    """Notes whether the weights' memory was there, while it runs, as when it was made."""

    held: ClassVar[list[bool]] = []

    def __init__(self, model):
        super().__init__(model)
        weights = model.state.parameters.values()
        self._memory = [StorageWeakRef(weight.untyped_storage()) for weight in weights]

    def run(self, *args):
        NotesMemory.held += [not memory.expired() for memory in self._memory]
        return super().run(*args)


class LooksIntoWeights(NotesMemory):
    """Looks into the memory of the weights, as a forward that keeps one somewhere does."""

    def __init__(self, model):
        super().__init__(model)
        self.weights = list(model.state.parameters.values())
        self.views = [weight.detach() for weight in self.weights]


def test_weights_that_the_host_has_are_not_kept_while_back_ends_are_compared(monkeypatch):
    use(monkeypatch, NotesMemory)
    NotesMemory.held.clear()
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(*classified(8))
    assert NotesMemory.held
    assert not any(NotesMemory.held)
    device = training._compiled.state.parameters.values()
    for weight, host in zip(device, model.parameters(), strict=True):
        assert torch.equal(weight, host)


def test_weights_that_something_looks_into_stay_where_they_are(monkeypatch):
    made = []
    use(monkeypatch, lambda model: made.append(LooksIntoWeights(model)) or made[-1])
    NotesMemory.held.clear()
    compiled(Mlp(), "device")
    assert NotesMemory.held
    assert all(NotesMemory.held)
    for weight, view in zip(made[0].weights, made[0].views, strict=True):
        assert weight.data_ptr() == view.data_ptr()


def test_trained_weights_that_the_host_has_not_yet_stay():
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training(*classified(8))
    first = training._compiled.program
    before = [weight.detach().clone() for weight in training._compiled.state.parameters.values()]
    training.setOptimizer(torch.optim.Adam(model.parameters()))
    assert training._compiled.program is not first
    for weight, value in zip(training._compiled.state.parameters.values(), before, strict=True):
        assert torch.equal(weight, value)


@pytest.mark.parametrize("special", [1.0, float("inf"), float("nan")])
def test_large_tensors_are_compared_in_pieces(special, monkeypatch):
    torch.manual_seed(0)
    expected = torch.randn(7, 5)
    got = expected + 1e-3 * torch.randn(7, 5)
    expected[6, 4] = got[6, 4] = special
    whole = tensor_distances.distance(expected, got), tensor_distances._size(expected)
    assert 0 < whole[0] < 1
    monkeypatch.setattr(tensor_distances, "_PIECE", 10)
    in_pieces = tensor_distances.distance(expected, got), tensor_distances._size(expected)
    assert in_pieces == pytest.approx(whole)
    got[6, 4] = 0.0 if special != 1.0 else 9.0
    assert tensor_distances.distance(expected, got) > 1
    assert tensor_distances.says_nothing([torch.full((7, 5), torch.nan), expected]) == {0}
