"""Graphs for the device model, made by hand from the known shapes of well-known models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from popdist_py.ipu.graph import (
    Graph,
    Kind,
    Operation,
    Product,
    Tensor,
    Type,
    Weight,
    saved_by,
)


class Builder:
    """Builds a graph; each method adds an operation, input or weight, and returns its name."""

    def __init__(self, batch: int, type: Type = "float32") -> None:
        self.batch = batch
        self.type = type
        self.inputs: list[Tensor] = []
        self.weights: list[Weight] = []
        self.operations: list[Operation] = []
        self.sizes: dict[str, int] = {}

    def input(self, name: str, elements: int, type: Type | None = None) -> str:
        """Add an input of the graph, with ``elements`` elements for one sample."""
        self.inputs.append(Tensor(name, elements, type or self.type))
        self.sizes[name] = elements
        return name

    def weight(self, name: str, elements: int, *, is_trained: bool = True) -> str:
        """Add a weight with ``elements`` elements."""
        self.weights.append(Weight(name, elements, self.type, is_trained))
        return name

    def add(
        self,
        name: str,
        kind: Kind,
        inputs: Sequence[str],
        elements: int | None = None,
        *,
        weights: Sequence[str] = (),
        product: Product | None = None,
        is_in_place: bool = False,
        is_checkpoint: bool = False,
        saved: Sequence[str] | None = None,
    ) -> str:
        """Add an operation. By default, its output is as large as its first input."""
        size = self.sizes[inputs[0]] if elements is None else elements
        output = Tensor(f"{name}:out", size, self.type, is_batched=kind != "loss")
        self.operations.append(
            Operation(
                name,
                kind,
                tuple(inputs),
                output,
                tuple(weights),
                saved_by(kind, inputs, output.name, has_weights=bool(weights))
                if saved is None
                else tuple(saved),
                product,
                is_in_place,
                is_checkpoint,
            )
        )
        self.sizes[output.name] = size
        return output.name

    def linear(self, name: str, x: str, rows: int, features: tuple[int, int]) -> str:
        """Add a linear layer: a matrix product with a weight, and a bias."""
        depth, columns = features
        weights = [
            self.weight(f"{name}.weight", depth * columns),
            self.weight(f"{name}.bias", columns),
        ]
        product = Product(rows, depth, columns)
        return self.add(name, "product", [x], rows * columns, weights=weights, product=product)

    def conv(
        self, name: str, x: str, channels: tuple[int, int], kernel: int, side: int, groups: int = 1
    ) -> str:
        """Add a square convolution, where ``side`` is the side of the output."""
        into, out = channels
        depth = into // groups * kernel**2
        weight = self.weight(f"{name}.weight", depth * out)
        product = Product(side**2, depth, out // groups, groups, is_convolution=True)
        return self.add(name, "product", [x], side**2 * out, weights=[weight], product=product)

    def norm(self, name: str, x: str, channels: int, *, has_statistics: bool = True) -> str:
        """Add a normalisation of each channel."""
        weights = [self.weight(f"{name}.weight", channels), self.weight(f"{name}.bias", channels)]
        if has_statistics:
            weights += [
                self.weight(f"{name}.{part}", channels, is_trained=False)
                for part in ("running_mean", "running_var")
            ]
        return self.add(name, "norm", [x], weights=weights)

    def graph(self, outputs: Sequence[str]) -> Graph:
        """Return the graph of all operations that were added."""
        return Graph(
            tuple(self.inputs),
            tuple(self.weights),
            tuple(self.operations),
            tuple(outputs),
            self.batch,
        )


def mlp(widths: Sequence[int], batch: int, type: Type = "float32") -> Graph:
    """Return the graph of linear layers with ReLU between them, and a loss."""
    build = Builder(batch, type)
    x = build.input("input", widths[0])
    labels = build.input("labels", 1, "int32")
    for index, features in enumerate(pairwise(widths)):
        x = build.linear(f"layers.{index}", x, 1, features)
        if index < len(widths) - 2:
            x = build.add(f"layers.{index}.relu", "elementwise", [x], is_in_place=True)
    loss = build.add("loss", "loss", [x, labels], 1)
    return build.graph([x, loss])


def cnn(batch: int, type: Type = "float32") -> Graph:
    """Return a small CNN: a convolution, a batch norm, ReLU, a pool, and a classifier."""
    build = Builder(batch, type)
    x = build.input("input", 3 * 16 * 16)
    labels = build.input("labels", 1, "int32")
    x = build.conv("conv", x, (3, 8), 3, 16)
    x = build.norm("norm", x, 8)
    x = build.add("relu", "elementwise", [x], is_in_place=True)
    x = build.add("pool", "pool", [x], 8 * 8 * 8)
    x = build.linear("fc", x, 1, (512, 10))
    loss = build.add("loss", "loss", [x, labels], 1)
    return build.graph([x, loss])


def resnet(
    blocks: Sequence[int],
    side: int,
    batch: int,
    type: Type = "float32",
    classes: int = 1000,
    *,
    groups: int = 1,
    has_statistics: bool = True,
) -> Graph:
    """Return a ResNet of bottlenecks with torchvision's names; ResNet-101 has [3, 4, 23, 3].

    With ``groups`` 32, it is a ResNeXt of 32 groups of 4 channels. Without ``has_statistics``, the
    norms are group norms.
    """
    build = Builder(batch, type)
    x = build.input("input", 3 * side * side)
    labels = build.input("labels", 1, "int32")
    side //= 2
    x = build.conv("conv1", x, (3, 64), 7, side)
    x = build.norm("bn1", x, 64, has_statistics=has_statistics)
    x = build.add("relu", "elementwise", [x], is_in_place=True)
    side //= 2
    x = build.add("maxpool", "pool", [x], 64 * side * side)
    into = 64
    for layer, count in enumerate(blocks):
        width = 64 * 2**layer
        inner = width if groups == 1 else 2 * width
        for index in range(count):
            before = side
            if layer and not index:
                side //= 2
            x = _bottleneck(
                build, f"layer{layer + 1}.{index}", x, (into, inner, 4 * width), (before, side),
                groups=groups, has_statistics=has_statistics,
            )  # fmt: skip
            into = 4 * width
    x = build.add("avgpool", "elementwise", [x], into)
    x = build.linear("fc", x, 1, (into, classes))
    loss = build.add("loss", "loss", [x, labels], 1)
    return build.graph([x, loss])


def _bottleneck(
    build: Builder,
    name: str,
    x: str,
    channels: tuple[int, int, int],
    sides: tuple[int, int],
    *,
    groups: int,
    has_statistics: bool,
) -> str:
    into, width, out = channels
    before, side = sides
    shortcut = x
    for number, (shape, kernel, size) in enumerate(
        (((into, width), 1, before), ((width, width), 3, side), ((width, out), 1, side)), 1
    ):
        of_conv = groups if number == 2 else 1
        x = build.conv(f"{name}.conv{number}", x, shape, kernel, size, of_conv)
        x = build.norm(f"{name}.bn{number}", x, shape[1], has_statistics=has_statistics)
        if number < 3:
            x = build.add(f"{name}.relu{number}", "elementwise", [x], is_in_place=True)
    if into != out or before != side:
        shortcut = build.conv(f"{name}.downsample.0", shortcut, (into, out), 1, side)
        shortcut = build.norm(f"{name}.downsample.1", shortcut, out, has_statistics=has_statistics)
    x = build.add(f"{name}.add", "add", [x, shortcut], is_in_place=True)
    return build.add(f"{name}.relu3", "elementwise", [x], is_in_place=True)


def transformer(
    layers: int,
    width: int,
    length: int,
    batch: int,
    *,
    heads: int = 0,
    words: int = 0,
    type: Type = "float16",
) -> Graph:
    """Return BERT's encoder layers as a graph; ``words`` adds an embedding and a tied head."""
    build = Builder(batch, type)
    heads = heads or width // 64
    labels = build.input("labels", length, "int32")
    size = length * width
    if words:
        ids = build.input("ids", length, "int32")
        table = build.weight("embedding.weight", words * width)
        x = build.add("embedding", "lookup", [ids], size, weights=[table])
        x = build.norm("embedding.norm", x, width, has_statistics=False)
    else:
        x = build.input("input", size)
    for index in range(layers):
        x = _encoder_layer(build, f"layers.{index}", x, (length, width, heads))
    if words:
        product = Product(length, width, words)
        x = build.add(
            "head", "product", [x], length * words, weights=["embedding.weight"], product=product
        )
    loss = build.add("loss", "loss", [x, labels], 1)
    return build.graph([loss])


def _encoder_layer(build: Builder, name: str, x: str, sizes: tuple[int, int, int]) -> str:
    length, width, heads = sizes
    depth = width // heads
    query, key, value = (
        build.linear(f"{name}.attention.{part}", x, length, (width, width))
        for part in ("query", "key", "value")
    )
    scores = build.add(
        f"{name}.attention.scores", "product", [query, key], heads * length**2,
        product=Product(length, depth, length, heads),
    )  # fmt: skip
    scores = build.add(f"{name}.attention.softmax", "softmax", [scores], is_in_place=True)
    mixed = build.add(
        f"{name}.attention.mix", "product", [scores, value], length * width,
        product=Product(length, length, depth, heads),
    )  # fmt: skip
    mixed = build.linear(f"{name}.attention.out", mixed, length, (width, width))
    x = build.add(f"{name}.attention.add", "add", [mixed, x], is_in_place=True)
    x = build.norm(f"{name}.attention.norm", x, width, has_statistics=False)
    inner = build.linear(f"{name}.inner", x, length, (width, 4 * width))
    inner = build.add(f"{name}.gelu", "elementwise", [inner], saved=[inner])
    outer = build.linear(f"{name}.outer", inner, length, (4 * width, width))
    outer = build.add(f"{name}.add", "add", [outer, x], is_in_place=True)
    return build.norm(f"{name}.norm", outer, width, has_statistics=False)


def with_checkpoints(graph: Graph, ending: str) -> Graph:
    """Return a graph with a checkpoint after each operation whose name ends with ``ending``."""
    operations = tuple(
        replace(o, is_checkpoint=True) if o.name.endswith(ending) else o for o in graph.operations
    )
    return replace(graph, operations=operations)


def with_8_bit_input(graph: Graph) -> Graph:
    """Return a graph whose first input is uint8; the IPU casts and normalises it."""
    first, *others = graph.inputs
    image = replace(first, name="image", type="uint8")
    cast, centred = replace(first, name="cast:out"), replace(first, name="subtract:out")
    statistics = tuple(
        Weight(name, 3, first.type, is_trained=False) for name in ("mean", "deviation")
    )
    normalize = (
        Operation("cast", "elementwise", (image.name,), cast),
        Operation("subtract", "add", (cast.name,), centred, weights=("mean",), is_in_place=True),
        Operation(
            "divide", "elementwise", (centred.name,), first, weights=("deviation",),
            is_in_place=True,
        ),
    )  # fmt: skip
    return replace(
        graph,
        inputs=(image, *others),
        weights=(*statistics, *graph.weights),
        operations=(*normalize, *graph.operations),
    )
