"""Small models of many kinds, each with the arguments of one micro-batch."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.resnet import BasicBlock, ResNet


class WithLoss(nn.Module):
    """A model with its loss; the names of the model's weights do not change."""

    def __init__(self, model, loss=None):
        super().__init__()
        self.model = model
        self.loss = loss or nn.CrossEntropyLoss()

    def forward(self, input, labels):
        output = self.model(input)
        return output, self.loss(output, labels)


class Mlp(nn.Module):
    def __init__(self, widths=(20, 50, 50, 10)):
        super().__init__()
        parts = []
        for into, out in pairwise(widths):
            parts += [nn.Linear(into, out), nn.ReLU()]
        self.layers = nn.Sequential(*parts[:-1])

    def forward(self, x):
        return self.layers(x)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu, self.pool, self.fc = nn.ReLU(), nn.MaxPool2d(2), nn.Linear(512, 10)

    def forward(self, x):
        return self.fc(self.pool(self.relu(self.norm(self.conv(x)))).flatten(1))


class Layer(nn.Module):
    """An encoder layer like that of BERT, written by hand."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        shares = (q @ k.transpose(-1, -2)).div(math.sqrt(width // self.heads)).softmax(-1)
        mixed = (shares @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.first(self.out(mixed) + x)
        return self.second(self.outer(F.gelu(self.inner(x))) + x)


class Bert(nn.Module):
    """An embedding, ``layers`` encoder layers, and a head that shares the embedding's weight."""

    def __init__(self, layers=2, width=64, words=100, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids, labels):
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x)
        scores = x @ self.embedding.weight.t()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """A model with torch's own encoder layers and dropout."""

    def __init__(self, layers=2, width=32, heads=4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, **arguments):
        super().__init__()
        self.layer = kind(12, 20, batch_first=True, **arguments)
        self.head = nn.LazyLinear(10)
        self.head(torch.zeros(1, 20 * (2 if arguments.get("bidirectional") else 1)))

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Gpt(nn.Module):
    """Causal attention with learned positions, where one matrix product computes q, k and v."""

    def __init__(self, width=32, heads=4, words=50, length=16):
        super().__init__()
        self.heads = heads
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, labels):
        batch, length = ids.shape
        x = self.words(ids) + self.positions(torch.arange(length))
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        first = F.relu(self.down(x))
        return self.last(torch.cat([first, self.up(F.relu(self.middle(first)))], 1))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(100, 16, mode="mean"), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.bags(x))


def images(side, batch=4):
    return torch.rand(batch, 3, side, side), torch.randint(0, 10, (batch,))


def words(batch=3, length=16):
    ids = torch.randint(0, 50, (batch, length))
    return ids, ids.clone()


def sequences(batch=3, length=7, width=12):
    return torch.rand(batch, length, width), torch.randint(0, 10, (batch,))


MODELS = {
    "mlp": lambda: (WithLoss(Mlp()), (torch.rand(6, 20), torch.randint(0, 10, (6,)))),
    "cnn": lambda: (WithLoss(Cnn()), images(16)),
    "resnet": lambda: (
        WithLoss(ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10)),
        images(32),
    ),
    "bert": lambda: (Bert(), words()),
    "encoder": lambda: (WithLoss(Encoder()), sequences(width=32)),
    "lstm": lambda: (WithLoss(Recurrent(nn.LSTM)), sequences()),
    "gru": lambda: (WithLoss(Recurrent(nn.GRU)), sequences()),
    "bags": lambda: (WithLoss(Bags()), (words()[0], torch.randint(0, 10, (3,)))),
    "gpt": lambda: (Gpt(), words()),
    "unet": lambda: (
        WithLoss(UNet()),
        (torch.rand(2, 3, 16, 16), torch.randint(0, 2, (2, 16, 16))),
    ),
    "mobilenet": lambda: (
        WithLoss(
            torchvision.models.MobileNetV2(
                num_classes=10, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]
            )
        ),
        images(32),
    ),
    "efficientnet": lambda: (
        WithLoss(
            EfficientNet(
                [MBConvConfig(1, 3, 1, 32, 16, 1, 1, 1), MBConvConfig(6, 5, 2, 16, 24, 2, 1, 1)],
                dropout=0.2,
                num_classes=10,
            )
        ),
        images(32),
    ),
    "vit": lambda: (
        WithLoss(torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)),
        images(32),
    ),
}
