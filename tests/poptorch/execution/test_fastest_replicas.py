"""Finding the fastest back end in the first steps."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py import measured_values
from popdist_py.poptorch.compilation.compiler import Compiler
from popdist_py.poptorch.execution import fastest_replicas
from popdist_py.poptorch.execution.fastest_replicas import FastestReplicas


class Clock:
    """The time, which only back ends move on."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Timed:
    """A back end that takes as long as it is told, and half as much again at first."""

    def __init__(self, name, seconds, clock, needs_context=False):
        self.name, self.seconds, self.clock = name, seconds, clock
        self.needs_context = needs_context

    def run(self, call, inputs, number, scale):
        self.clock.now += self.seconds
        return [self.name]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(fastest_replicas, "time", clock)
    return clock


def ran(replicas, steps, window=1):
    names = []
    for number in range(steps):
        if number % window == 0:
            replicas.begin_window()
        names += replicas.run(None, [], number, 1.0)
    return names


def made(clock, seconds, **kwargs):
    candidates = {name: Timed(name, s, clock, name == "slow") for name, s in seconds.items()}
    return FastestReplicas(candidates, **kwargs)


def test_the_fastest_is_found_and_stays(clock):
    settled = []
    replicas = made(
        clock, {"fast": 0.01, "slow": 0.02}, on_settled=lambda *choice: settled.append(choice)
    )
    assert replicas.needs_context
    assert replicas.back_end is None
    assert ran(replicas, 8) == ["fast"] * 2 + ["slow"] * 2 + ["fast"] * 4
    assert replicas.back_end == "fast"
    assert not replicas.needs_context
    [(name, seconds)] = settled
    assert name == "fast"
    assert seconds == pytest.approx({"fast": 0.01, "slow": 0.02})


def test_close_ones_have_more_turns(clock):
    replicas = made(clock, {"a": 0.011, "b": 0.01, "c": 0.05})
    assert ran(replicas, 15) == list("aabbcc" + "aabb" + "aabb" + "b")


def test_long_steps_are_not_repeated(clock):
    replicas = made(clock, {"a": 1.1, "b": 1.0})
    assert ran(replicas, 5) == list("aabbb")


def test_a_back_end_runs_whole_accumulation_windows(clock):
    changes = []
    replicas = made(
        clock, {"a": 0.01, "b": 0.03}, window=3, on_change=lambda: changes.append(clock.now)
    )
    assert ran(replicas, 15, window=3) == list("aaaaaa" + "bbbbbb" + "aaa")
    assert changes == pytest.approx([0.06, 0.24])


def test_a_window_that_failed_in_between_is_run_again(clock):
    replicas = made(clock, {"a": 0.04, "b": 0.02}, window=2)
    # The call that failed ended one and a half windows; the next call begins a window.
    assert ran(replicas, 3, window=2) == list("aaa")
    assert ran(replicas, 8, window=2) == list("aa" + "bbbb" + "bb")
    assert replicas.back_end == "b"


def test_the_others_are_let_go_once_the_choice_is_made(clock):
    candidates = {name: Timed(name, s, clock) for name, s in (("a", 0.01), ("b", 0.02))}
    loser = weakref.ref(candidates["b"])
    replicas = FastestReplicas(candidates)
    del candidates
    ran(replicas, 4)
    assert loser() is not None
    ran(replicas, 1)
    assert loser() is None
    assert replicas.names == ("a", "b")


def test_the_slowest_instance_counts(clock):
    others = [{"a": 0.05, "b": 0.01}, {}]

    def slowest(seconds):
        return [max(s, o) for s, o in zip(seconds, others[0].values(), strict=True)]

    replicas = made(clock, {"a": 0.01, "b": 0.02}, slowest=slowest)
    ran(replicas, 5)
    assert replicas.back_end == "b"


def test_one_alone_is_not_timed(clock):
    replicas = made(clock, {"a": 0.01})
    assert replicas.back_end == "a"
    assert ran(replicas, 2) == ["a", "a"]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def train(execution, model, steps):
    options = quiet_options().replicationFactor(2).broadcastBuffers(False)
    options.Training.gradientAccumulation(2)
    options.outputMode(poptorch.OutputMode.All)
    options.Emulator.replicaExecution(execution)
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    losses = [training(*classified(16, seed=step))[1] for step in range(steps)]
    return training._compiled.program.replicas, losses, model.state_dict()


def test_a_training_that_tries_back_ends_is_the_one_of_the_loop(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Equal random numbers, where a seed of the program would leave nothing to try.
    monkeypatch.setattr(Compiler, "_seed", lambda _: 3)
    torch.manual_seed(0)
    model = Noisy()
    _, expected, weights = train("loop", copy.deepcopy(model), 20)
    poptorch.setLogLevel("INFO")
    try:
        replicas, losses, ours = train("auto", copy.deepcopy(model), 20)
        again, _, _ = train("auto", copy.deepcopy(model), 1)
    finally:
        poptorch.setLogLevel("WARN")
    assert len(replicas.names) > 1
    assert replicas.back_end in replicas.names
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, weights, rtol=1e-4, atol=1e-5)
    lines = [r.getMessage() for r in caplog.records if "from now on" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"Replicas run as {replicas.back_end} from now on; measured: ")
    # The second training of the model knows the choice.
    assert again.back_end == replicas.back_end
    assert again.names == (replicas.back_end,)


def test_a_training_goes_on_with_another_gradient_accumulation(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def made(accumulation):
        options = quiet_options().replicationFactor(2)
        options.Training.gradientAccumulation(accumulation)
        model = Mlp()
        return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))

    first = made(1)
    for step in range(3):
        first(*classified(8, seed=step))
    after = made(2)
    after.load_training_state(first.training_state(), [first.instance_state()])
    after(*classified(8))
    assert len(after._compiled.program.replicas.names) > 1
    assert after.rng_state[1] == 5


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(6, 4)

    def forward(self, x, y):
        out = self.layers(x[None])[0][0]
        return out, nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize(
    ("make", "expected"), [(Mlp, "fused graph"), (Noisy, "graph"), (Recurrent, "loop")]
)
def test_no_time_decides_where_a_program_sets_a_seed(make, expected, monkeypatch):
    recalled = []
    monkeypatch.setattr(measured_values, "recall", lambda *words: recalled.append(words))
    options = quiet_options().replicationFactor(2).broadcastBuffers(False).randomSeed(3)
    model = make()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
    training.compile(*classified(8))
    assert training._compiled.program.replicas.names == (expected,)
    assert training._compiled.program.replicas.back_end == expected
    assert "back_ends" not in [words[0] for words in recalled]
