"""Models with batch norms, and their training by hand: each group of replicas is one batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import popdist_py.poptorch as poptorch

torch.set_num_threads(1)

MICRO_BATCH, STEPS, CLASSES = 3, 3, 3


class Trained(NamedTuple):
    """What a training ends with; see ``trained``."""

    state: dict[str, torch.Tensor]
    scores: torch.Tensor
    losses: torch.Tensor
    buffers: dict[str, torch.Tensor]
    back_end: str


class Classifier(nn.Module):
    """A body, its scores [samples, classes], and their loss."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x, y):
        scores = self.body(x)
        return scores, F.cross_entropy(scores, y)


def _image_net(norm):
    return Classifier(
        nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


class Sequence(nn.Module):
    """A norm of [samples, channels, length]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(x.flatten(2))


class Residual(nn.Module):
    """Two branches with norms, as where a ResNet halves its pictures."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4),
        )  # fmt: skip
        self.downsample = nn.Sequential(nn.Conv2d(2, 4, 1, 2), nn.BatchNorm2d(4))

    def forward(self, x):
        return F.relu(self.main(x) + self.downsample(x))


class Shared(nn.Module):
    """One norm, used twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return self.norm(F.relu(self.norm(x)) * 3 + x)


class WithoutGradient(nn.Module):
    """A norm in a part that has no backward, before one that has."""

    def __init__(self):
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.norm(x * x)


class Remembering(nn.Module):
    """Keeps a tensor as an attribute from before a norm until after it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.kept = None

    def forward(self, x):
        self.kept = self.first(x)
        return self.norm(torch.tanh(self.kept)) + self.kept


class Recomputed(nn.Module):
    """Runs its norm again in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)

    def forward(self, x):
        return checkpoint(lambda h: torch.tanh(self.norm(h)), self.first(x), use_reentrant=False)


class Halves(nn.Module):
    """Halves but for the loss."""

    def __init__(self):
        super().__init__()
        self.net = _image_net(nn.BatchNorm2d(4)).body.half()

    def forward(self, x, y):
        scores = self.net(x.half())
        return scores, F.cross_entropy(scores.float(), y)


def _head(core):
    return Classifier(core, nn.Flatten(), nn.LazyLinear(CLASSES))


MODELS = {
    "images": lambda: _image_net(nn.BatchNorm2d(4)),
    "vectors": lambda: Classifier(nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6), nn.Tanh(),
                                  nn.Linear(6, CLASSES)),
    "sequences": lambda: _head(Sequence()),
    "residual": lambda: _head(Residual()),
    "shared": lambda: _head(Shared()),
    "no affine": lambda: _image_net(nn.BatchNorm2d(4, affine=False)),
    "untracked": lambda: _image_net(nn.BatchNorm2d(4, track_running_stats=False)),
    "averaging": lambda: _image_net(nn.BatchNorm2d(4, momentum=None)),
    "no gradient": lambda: _head(WithoutGradient()),
    "remembering": lambda: _head(Remembering()),
    "recomputed": lambda: _head(Recomputed()),
    "few": lambda: Classifier(nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "random": lambda: Classifier(Residual(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16, 6),
                                 nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, CLASSES)),
    "half": lambda: Halves(),
}  # fmt: skip


def model_and_data(name, samples, dtype=torch.float64):
    torch.manual_seed(5)
    model = MODELS[name]()
    if name != "half":
        model.to(dtype)
    x = torch.randn(STEPS, samples, 2, 4, 4, dtype=dtype) * 2 + 1
    y = torch.randint(0, CLASSES, (STEPS, samples))
    model(x[0], y[0])  # lazy layers get their shapes
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()
        if isinstance(module, Remembering):
            module.kept = None
    return model, x, y


def options_for(
    size, replicas=None, how="loop", accumulation=1, dtype=torch.float64, deterministic=False
):
    """Return options of this process alone, or without ``replicas`` of an instance of a job."""
    options = poptorch.Options() if replicas else poptorch.DistributedOptions()
    if replicas:
        options.replicationFactor(replicas)
    options.showCompilationProgressBar(False).randomSeed(1)
    options.outputMode(poptorch.OutputMode.All)
    options.Emulator.deterministicReduction(deterministic)
    options.Training.distributedBatchNormReplicaGroupSize(size)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.replicaExecution(how).doublePrecision(dtype == torch.float64)
    return options


def trained(name, options, dtype=torch.float64, first=0, replicas=None):
    """Train wrapped, as replicas ``first`` and following of so many.

    Returns:
        Weights and buffers by name, scores and losses of all steps, the buffers of all local
        replicas by name, and the name of the back end.
    """
    local, accumulation = options.replication_factor, options.Training.gradient_accumulation
    replicas = replicas or local
    model, x, y = model_and_data(name, replicas * accumulation * MICRO_BATCH, dtype)
    wrapped = poptorch.trainingModel(model, options, _optimizer(model))

    def own(batch):
        """Return the samples of these replicas of [accumulation x replicas x micro-batch]."""
        parts = batch.view(accumulation, replicas, MICRO_BATCH, *batch.shape[1:])
        return parts[:, first : first + local].reshape(-1, *batch.shape[1:])

    found = [wrapped(own(step_x), own(step_y)) for step_x, step_y in zip(x, y, strict=True)]
    state = {key: value.clone() for key, value in wrapped.state_dict().items()}
    compiled = wrapped._compiled
    buffers = compiled.state.buffers_of_replicas(frozenset(compiled.state.buffers))
    return Trained(
        state,
        torch.stack([scores for scores, _ in found]),
        torch.stack([loss.reshape(accumulation, local) for _, loss in found]),
        {key: buffer.clone() for key, buffer in buffers.items()},
        compiled.program.back_end,
    )


def by_hand(name, replicas, size, accumulation=1, dtype=torch.float64):
    """Return the same of a loop over groups, each of which is one batch with its own buffers.

    The buffers are those of the first group.
    """
    batch = replicas * accumulation * MICRO_BATCH
    model, x, y = model_and_data(name, batch, dtype)
    parameters = dict(model.named_parameters())
    groups = replicas // size
    buffers = [{key: b.clone() for key, b in model.named_buffers()} for _ in range(groups)]
    optimizer = _optimizer(model)
    scores = []
    for step_x, step_y in zip(x, y, strict=True):
        optimizer.zero_grad()
        for micro_x, micro_y in zip(
            step_x.chunk(accumulation), step_y.chunk(accumulation), strict=True
        ):
            for own, *batch in zip(
                buffers, micro_x.chunk(groups), micro_y.chunk(groups), strict=True
            ):
                out, loss = functional_call(model, {**parameters, **own}, tuple(batch))
                (loss / (groups * accumulation)).backward()
                scores.append(out.detach())
        optimizer.step()
    state = {**{key: p.detach() for key, p in parameters.items()}, **buffers[0]}
    return state, torch.cat(scores).view(STEPS, -1, CLASSES)


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def distance(found, expected):
    """Return the largest relative error of any tensor."""
    assert found.keys() == expected.keys()
    errors = [
        float((found[key] - expected[key]).norm() / expected[key].norm().clamp(min=1e-3))
        for key in expected
        if expected[key].is_floating_point()
    ]
    return max(errors)
