"""Functions that make models for the tests of the command; some of the functions fail."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """A transformer that converts token indices to logits of words."""

    def __init__(self, layers: int = 2, width: int = 64, words: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tied(Encoder):
    """A transformer whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__(layers=4, width=256)
        self.head.weight = self.embedding.weight


class WithLoss(nn.Module):
    """A training model in PopTorch's style: its forward pass returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x, labels=None):
        out = self.fc(x)
        if labels is None:
            return out
        return out, nn.functional.cross_entropy(out, labels)


class Squared(nn.Module):
    """A model whose forward pass fails if its input is not square."""

    def forward(self, x):
        return x @ x


class Reading(nn.Module):
    """A model whose forward pass reads a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if x.sum().item() > 0 else x


class Nothing(nn.Module):
    """A model whose forward pass returns None."""

    def forward(self, x):
        return None


def mlp(width: int = 16, depth: int = 2, classes: int = 4, activation: str = "ReLU") -> nn.Module:
    layers = [
        layer
        for _ in range(depth)
        for layer in (nn.Linear(width, width), getattr(nn, activation)())
    ]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def large():
    """Return a model whose weights do not fit on an IPU, without writing the weights."""
    return nn.utils.skip_init(nn.Linear, 20_000, 20_000)


def with_dict():
    labels = torch.zeros(4, dtype=torch.int64)
    return WithLoss(), {"x": torch.zeros(4, 8), "labels": labels}


def with_tuple():
    return WithLoss(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))


def with_tensor():
    return WithLoss(), torch.zeros(4, 8)


def frozen():
    model = mlp()
    model[0].eval()
    return model


def failing():
    raise RuntimeError("no weights here")


def leaving():
    raise SystemExit(0)


def text():
    return "a model"


number = 3
