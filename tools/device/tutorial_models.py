"""Graphs of the small models in those of Graphcore's tutorials that give measured times.

The layers are those of the tutorials' texts. Nothing here divides a model into stages or runs it.
"""

from __future__ import annotations

from popdist_py.ipu.graph import Graph
from tools.device.ipu_graphs import Builder


def data_loading_model(batch: int) -> Graph:
    """Return the classifier of the text on data loading, for images of 128 x 128 pixels."""
    build = Builder(batch)
    x = build.input("images", 128 * 128)
    labels = build.input("labels", 1, "int32")
    x = _convolution(build, "conv1", x, (1, 5), 3, 126)
    x = _relu(build, "relu1", x)
    x = build.add("pool", "pool", [x], 5 * 63 * 63)
    x = _convolution(build, "conv2", x, (5, 12), 5, 59)
    x = _relu(build, "relu2", x)
    x = build.norm("norm", x, 12, has_statistics=False)
    x = build.linear("fc1", x, 1, (12 * 59 * 59, 100))
    x = _relu(build, "relu3", x)
    x = build.linear("fc2", x, 1, (100, 10))
    x = build.add("log_softmax", "softmax", [x])
    return build.graph([x, build.add("loss", "loss", [x, labels], 1)])


def mnist_model(batch: int) -> Graph:
    """Return the network of the text on pipelining, for images of 28 x 28 pixels."""
    build = Builder(batch)
    x = build.input("images", 28 * 28)
    labels = build.input("labels", 1, "int32")
    side, into = 28, 1
    for name, out in (("layer1", 10), ("layer2", 20)):
        side -= 4
        x = _convolution(build, f"{name}.conv", x, (into, out), 5, side)
        side //= 2
        x = build.add(f"{name}.pool", "pool", [x], out * side**2)
        x = _relu(build, f"{name}.relu", x)
        into = out
    x = build.linear("layer3", x, 1, (into * side**2, 256))
    x = _relu(build, "layer3_act", x)
    x = build.linear("layer4", x, 1, (256, 10))
    return build.graph([x, build.add("loss", "loss", [x, labels], 1)])


def _convolution(
    build: Builder, name: str, x: str, channels: tuple[int, int], kernel: int, side: int
) -> str:
    """Add a convolution and its bias; the IPU adds the bias in a separate program."""
    x = build.conv(name, x, channels, kernel, side)
    bias = build.weight(f"{name}.bias", channels[1])
    return build.add(f"{name}.add", "add", [x], weights=[bias], is_in_place=True)


def _relu(build: Builder, name: str, x: str) -> str:
    return build.add(name, "elementwise", [x], is_in_place=True)
