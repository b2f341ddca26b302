"""Models of published runs on IPUs in their true sizes, as graphs for the device model.

The tests compare the number of parameters of each graph with that of the published model. Nothing
here divides a model into stages or runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from popdist_py.ipu.graph import Graph, Product, Type
from tools.device.ipu_graphs import Builder


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a transformer.

    Attributes:
        layers: The number of layers, whose names are ``layers.0`` and so on.
        width: The number of elements of a token's activation.
        length: The number of tokens of a sample.
        words: The number of words of the vocabulary.
        predictions: The number of a sample's masked tokens, which the head of BERT predicts.
        serial: The number of parts into which the embedding of words is divided
            (``embedding_serialization_factor``).
        dropout: Whether the model has dropouts.
        memory: The length of the encoder's result, which each layer of a decoder reads; 0 for
            models without an encoder.
    """

    layers: int
    width: int
    length: int
    words: int = 30_522
    predictions: int = 20
    serial: int = 1
    dropout: bool = True
    memory: int = 0

    @property
    def heads(self) -> int:
        """The number of attention heads, each of 64 columns."""
        return self.width // 64


def bert(sizes: Transformer, batch: int, type: Type = "float16") -> Graph:
    """Return BERT with its pre-training heads; the decoder shares the embedding of words."""
    build = Builder(batch, type)
    width = sizes.width
    positions = build.input("positions", sizes.predictions, "int32")
    labels = build.input("labels", sizes.predictions, "int32")
    following = build.input("following", 1, "int32")
    x, tables = _embedding(build, sizes, places=512, kinds=2)
    x = build.norm("embeddings.norm", x, width, has_statistics=False)
    x = _dropout(build, "embeddings.dropout", x, sizes)
    for index in range(sizes.layers):
        x = _layer(build, f"layers.{index}", x, sizes, normalizes_first=False)
    first = build.add("pooler.first", "view", [x], width)
    first = build.linear("pooler.dense", first, 1, (width, width))
    first = build.add("pooler.tanh", "elementwise", [first])
    first = build.linear("head.following", first, 1, (width, 2))
    x = build.add("head.gather", "lookup", [x, positions], sizes.predictions * width,
        saved=[positions])  # fmt: skip
    x = build.linear("head.dense", x, sizes.predictions, (width, width))
    x = build.add("head.gelu", "elementwise", [x], saved=[x])
    x = build.norm("head.norm", x, width, has_statistics=False)
    x = _decoder(build, x, tables, sizes, sizes.predictions, has_bias=True)
    words = build.add("head.loss", "loss", [x, labels], 1)
    pairs = build.add("head.following_loss", "loss", [first, following], 1)
    return build.graph([words, pairs])


def bert_for_questions(sizes: Transformer, batch: int, type: Type = "float16") -> Graph:
    """Return BERT with the head for SQuAD, which predicts where the answer begins and ends."""
    build = Builder(batch, type)
    labels = build.input("labels", 2, "int32")
    x, _ = _embedding(build, sizes, places=512, kinds=2)
    x = build.norm("embeddings.norm", x, sizes.width, has_statistics=False)
    for index in range(sizes.layers):
        x = _layer(build, f"layers.{index}", x, sizes, normalizes_first=False)
    x = build.linear("head.dense", x, sizes.length, (sizes.width, 2))
    return build.graph([build.add("head.loss", "loss", [x, labels], 1)])


def gpt(sizes: Transformer, batch: int, type: Type = "float16") -> Graph:
    """Return GPT-2, whose head shares the embedding of words and reads every token."""
    build = Builder(batch, type)
    labels = build.input("labels", sizes.length, "int32")
    x, tables = _embedding(build, sizes, places=1024, kinds=0)
    x = _dropout(build, "embeddings.dropout", x, sizes)
    for index in range(sizes.layers):
        x = _layer(build, f"layers.{index}", x, sizes, normalizes_first=True)
    x = build.norm("head.norm", x, sizes.width, has_statistics=False)
    x = _decoder(build, x, tables, sizes, sizes.length, has_bias=False)
    return build.graph([build.add("head.loss", "loss", [x, labels], 1)])


def vit(layers: int, width: int, batch: int, type: Type = "float16", *, side: int = 224) -> Graph:
    """Return a vision transformer with patches of 16 x 16, like that of torchvision."""
    build = Builder(batch, type)
    images = build.input("images", 3 * side * side)
    labels = build.input("labels", 1, "int32")
    grid = side // 16
    sizes = Transformer(layers, width, grid**2 + 1, dropout=False)
    x = build.conv("patches", images, (3, width), 16, grid)
    places = [
        build.weight("patches.bias", width),
        build.weight("class_token", width),
        build.weight("positions", sizes.length * width),
    ]
    x = build.add("embeddings.add", "add", [x], sizes.length * width, weights=places)
    for index in range(layers):
        x = _layer(build, f"layers.{index}", x, sizes, normalizes_first=True)
    x = build.norm("norm", x, width, has_statistics=False)
    x = build.add("first", "view", [x], width)
    x = build.linear("head", x, 1, (width, 1000))
    return build.graph([x, build.add("loss", "loss", [x, labels], 1)])


def encoder_decoder(
    sizes: Transformer, target: int, batch: int, type: Type = "float16", *, hears: bool = False
) -> Graph:
    """Return an encoder and a decoder that share the embedding of words with the head.

    The layers of the encoder are ``layers.0`` and so on, and those of the decoder follow.

    Args:
        sizes: The sizes of the encoder. ``sizes.layers`` counts the layers of encoder and decoder
            together.
        target: The tokens of a sample that the decoder reads.
        batch: The samples of a micro-batch.
        type: The type of all activations and weights.
        hears: Whether the encoder reads 80 frequencies at twice as many times as it has tokens
            (Whisper). The embedding of words is then in the decoder. If ``hears`` is False, the
            encoder reads words (T5, BART), and the graph begins with the look-ups of the encoder's
            and the decoder's words.
    """
    build = Builder(batch, type)
    labels = build.input("labels", target, "int32")
    decoder = replace(sizes, length=target, memory=sizes.length)
    tables: list[str] = []
    y = ""
    if hears:
        x = _heard(build, sizes)
    else:
        x, tables = _embedding(build, sizes, places=sizes.length, kinds=0)
        y = _looked_up(build, tables, decoder)
    for index in range(sizes.layers // 2):
        x = _layer(build, f"layers.{index}", x, sizes, normalizes_first=True)
    memory = build.norm("encoder.norm", x, sizes.width, has_statistics=False)
    if hears:
        tables = _tables(build, sizes)
        y = _looked_up(build, tables, decoder)
    for index in range(sizes.layers // 2, sizes.layers):
        y = _layer(build, f"layers.{index}", y, decoder, normalizes_first=True, memory=memory)
    y = build.norm("decoder.norm", y, sizes.width, has_statistics=False)
    y = _decoder(build, y, tables, sizes, target, has_bias=False)
    return build.graph([build.add("head.loss", "loss", [y, labels], 1)])


def _heard(build: Builder, sizes: Transformer) -> str:
    """Add the two convolutions over time with which Whisper begins."""
    moments, width = 2 * sizes.length, sizes.width
    x = build.input("features", 80 * moments)
    for number, (channels, rows) in enumerate(((80, moments), (width, sizes.length)), 1):
        name = f"convolutions.{number}"
        weights = [
            build.weight(f"{name}.weight", 3 * channels * width),
            build.weight(f"{name}.bias", width),
        ]
        product = Product(rows, 3 * channels, width, is_convolution=True)
        x = build.add(name, "product", [x], rows * width, weights=weights, product=product)
        x = build.add(f"{name}.gelu", "elementwise", [x], saved=[x])
    places = build.weight("positions.weight", sizes.length * width, is_trained=False)
    return build.add("positions.add", "add", [x], weights=[places], is_in_place=True)


def _looked_up(build: Builder, tables: Sequence[str], sizes: Transformer) -> str:
    """Add the look-up of the words that a decoder reads."""
    ids = build.input("target_ids", sizes.length, "int32")
    return build.add("target.words", "lookup", [ids], sizes.length * sizes.width, weights=tables)


def _tables(build: Builder, sizes: Transformer) -> list[str]:
    """Add the parts of the embedding of words."""
    rows = ceil(sizes.words / sizes.serial)
    parts = [min(rows, sizes.words - rows * index) for index in range(sizes.serial)]
    return [
        build.weight(f"embeddings.words.{index}.weight", part * sizes.width)
        for index, part in enumerate(parts)
    ]


def _embedding(
    build: Builder, sizes: Transformer, *, places: int, kinds: int
) -> tuple[str, list[str]]:
    """Return the sum of the embeddings, and the weight names of the embedding of words."""
    ids = build.input("ids", sizes.length, "int32")
    tables = _tables(build, sizes)
    size = sizes.length * sizes.width
    x = build.add("embeddings.words", "lookup", [ids], size, weights=tables)
    others = [build.weight("embeddings.positions.weight", places * sizes.width)]
    if kinds:
        others.append(build.weight("embeddings.kinds.weight", kinds * sizes.width))
    return build.add("embeddings.add", "add", [x], weights=others, is_in_place=True), tables


def _decoder(
    build: Builder, x: str, tables: Sequence[str], sizes: Transformer, rows: int, *, has_bias: bool
) -> str:
    weights = list(tables)
    if has_bias:
        weights.append(build.weight("head.decoder.bias", sizes.words))
    product = Product(rows, sizes.width, sizes.words, serial=sizes.serial)
    return build.add(
        "head.decoder", "product", [x], rows * sizes.words, weights=weights, product=product
    )


def _dropout(build: Builder, name: str, x: str, sizes: Transformer) -> str:
    """The backward pass computes the mask again from the seed, so no tensor is saved."""
    return build.add(name, "elementwise", [x], saved=[]) if sizes.dropout else x


def _layer(
    build: Builder,
    name: str,
    x: str,
    sizes: Transformer,
    *,
    normalizes_first: bool,
    memory: str = "",
) -> str:
    """Add attention and two linear layers, with norms after them (BERT) or before (GPT-2, ViT)."""

    def norm(part: str, x: str) -> str:
        return build.norm(f"{name}.{part}", x, sizes.width, has_statistics=False)

    for part, source in (("attention", ""), ("cross", memory)):
        if part == "attention" or source:
            read = norm(f"{part}.norm", x) if normalizes_first else x
            made = _attention(build, f"{name}.{part}", read, sizes, source)
            x = build.add(f"{name}.{part}.add", "add", [made, x], is_in_place=True)
            if not normalizes_first:
                x = norm(f"{part}.norm", x)
    read = norm("norm", x) if normalizes_first else x
    length, width = sizes.length, sizes.width
    made = build.linear(f"{name}.inner", read, length, (width, 4 * width))
    made = build.add(f"{name}.gelu", "elementwise", [made], saved=[made])
    made = build.linear(f"{name}.outer", made, length, (4 * width, width))
    made = _dropout(build, f"{name}.dropout", made, sizes)
    x = build.add(f"{name}.add", "add", [made, x], is_in_place=True)
    return x if normalizes_first else norm("norm", x)


def _attention(build: Builder, name: str, x: str, sizes: Transformer, memory: str = "") -> str:
    """Add attention of ``x`` to ``memory`` (the encoder's result), or to ``x`` itself if empty."""
    length, width, heads = sizes.length, sizes.width, sizes.heads
    depth = width // heads
    other = sizes.memory if memory else length
    query = build.linear(f"{name}.query", x, length, (width, width))
    key, value = (
        build.linear(f"{name}.{part}", memory or x, other, (width, width))
        for part in ("key", "value")
    )
    scores = build.add(
        f"{name}.scores", "product", [query, key], heads * length * other,
        product=Product(length, depth, other, heads),
    )  # fmt: skip
    scores = build.add(f"{name}.softmax", "softmax", [scores], is_in_place=True)
    scores = _dropout(build, f"{name}.scores_dropout", scores, sizes)
    mixed = build.add(
        f"{name}.mix", "product", [scores, value], length * width,
        product=Product(length, other, depth, heads),
    )  # fmt: skip
    mixed = build.linear(f"{name}.out", mixed, length, (width, width))
    return _dropout(build, f"{name}.dropout", mixed, sizes)


# The expansion, channels, blocks, stride and kernel of each stage of EfficientNet-B0.
_STAGES = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip


def efficientnet(
    scale: tuple[float, float],
    side: int,
    batch: int,
    type: Type = "float16",
    *,
    group: int = 1,
    has_statistics: bool = True,
) -> Graph:
    """Return an EfficientNet scaled in width and depth, where (1.0, 1.0) gives B0.

    With ``group`` 16, it is Graphcore's G16, which has groups of 16 channels and an expansion of 4.
    The original has groups of one channel and an expansion of 6.
    """
    width, depth = scale
    build = Builder(batch, type)
    x = build.input("images", 3 * side * side)
    labels = build.input("labels", 1, "int32")

    def convolution(
        name: str, x: str, channels: tuple[int, int], kernel: int, side: int, groups: int = 1
    ) -> str:
        x = build.conv(name, x, channels, kernel, side, groups)
        return build.norm(f"{name}.norm", x, channels[1], has_statistics=has_statistics)

    side = ceil(side / 2)
    into = _rounded(32 * width)
    x = convolution("stem", x, (3, into), 3, side)
    x = _swish(build, "stem.swish", x)
    for stage, (expansion, channels, blocks, stride, kernel) in enumerate(_STAGES):
        out = _rounded(channels * width)
        for index in range(ceil(blocks * depth)):
            name, before, source = f"blocks.{stage}.{index}", side, x
            inner = into * (expansion if group == 1 or expansion == 1 else 4)
            if expansion > 1:
                x = convolution(f"{name}.expand", x, (into, inner), 1, side)
                x = _swish(build, f"{name}.expand.swish", x)
            if stride == 2 and not index:
                side = ceil(side / 2)
            groups = max(1, inner // group)
            x = convolution(f"{name}.spatial", x, (inner, inner), kernel, side, groups)
            x = _swish(build, f"{name}.spatial.swish", x)
            x = _squeeze_excite(build, f"{name}.se", x, (inner, max(1, into // 4)))
            x = convolution(f"{name}.project", x, (inner, out), 1, side)
            if into == out and before == side:
                x = build.add(f"{name}.add", "add", [x, source], is_in_place=True)
            into = out
    out = _rounded(1280 * width)
    x = convolution("head", x, (into, out), 1, side)
    x = _swish(build, "head.swish", x)
    x = build.add("pool", "elementwise", [x], out, saved=[])
    x = build.linear("classifier", x, 1, (out, 1000))
    return build.graph([x, build.add("loss", "loss", [x, labels], 1)])


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8, or the next one if the nearest is over 10 % less."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def _swish(build: Builder, name: str, x: str) -> str:
    return build.add(name, "elementwise", [x], saved=[x])


def _squeeze_excite(build: Builder, name: str, x: str, channels: tuple[int, int]) -> str:
    many, few = channels
    s = build.add(f"{name}.pool", "elementwise", [x], many, saved=[])
    s = build.linear(f"{name}.reduce", s, 1, (many, few))
    s = _swish(build, f"{name}.swish", s)
    s = build.linear(f"{name}.expand", s, 1, (few, many))
    s = build.add(f"{name}.sigmoid", "elementwise", [s], is_in_place=True)
    return build.add(f"{name}.scale", "elementwise", [x, s], saved=[x, s])


def unet(side: int, batch: int, type: Type = "float16") -> Graph:
    """Return U-Net as first published: without padding, from 572 to 388 pixels, two classes."""
    build = Builder(batch, type)
    x = build.input("images", side * side)
    into, skips = 1, []

    def double(name: str, x: str, channels: tuple[int, int]) -> str:
        nonlocal side
        for number, shape in enumerate((channels, (channels[1], channels[1])), 1):
            side -= 2
            x = build.conv(f"{name}.conv{number}", x, shape, 3, side)
            bias = build.weight(f"{name}.conv{number}.bias", shape[1])
            x = build.add(f"{name}.bias{number}", "add", [x], weights=[bias], is_in_place=True)
            x = build.add(f"{name}.relu{number}", "elementwise", [x], is_in_place=True)
        return x

    for level in range(4):
        x = double(f"down.{level}", x, (into, 64 * 2**level))
        into = 64 * 2**level
        skips.append((x, into, side))
        side //= 2
        x = build.add(f"down.{level}.pool", "pool", [x], into * side**2)
    x = double("bottom", x, (into, 1024))
    into = 1024
    for level, (skip, channels, _) in reversed(list(enumerate(skips))):
        product = Product(side**2, into, 4 * channels, is_convolution=True)
        weight = build.weight(f"up.{level}.weight", into * 4 * channels)
        bias = build.weight(f"up.{level}.bias", channels)
        side *= 2
        x = build.add(f"up.{level}.up", "product", [x], channels * side**2,
            weights=[weight, bias], product=product)  # fmt: skip
        cropped = build.add(f"up.{level}.crop", "add", [skip], channels * side**2)
        x = build.add(f"up.{level}.concat", "add", [x, cropped], 2 * channels * side**2)
        x = double(f"up.{level}", x, (2 * channels, channels))
        into = channels
    labels = build.input("labels", side**2, "int32")
    x = build.linear("head", x, side**2, (into, 2))
    return build.graph([build.add("loss", "loss", [x, labels], 1)])


def vgg_16(batch: int, type: Type = "float32") -> Graph:
    """Return VGG-16 for images of 224 x 224 pixels."""
    build = Builder(batch, type)
    x = build.input("images", 3 * 224 * 224)
    labels = build.input("labels", 1, "int32")
    into, side = 3, 224
    for stage, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for index in range(count):
            name = f"features.{stage}.{index}"
            x = build.conv(name, x, (into, channels), 3, side)
            bias = build.weight(f"{name}.bias", channels)
            x = build.add(f"{name}.add", "add", [x], weights=[bias], is_in_place=True)
            x = build.add(f"{name}.relu", "elementwise", [x], is_in_place=True)
            into = channels
        side //= 2
        x = build.add(f"features.{stage}.pool", "pool", [x], channels * side**2)
    for index, features in enumerate(pairwise((512 * 49, 4096, 4096, 1000))):
        x = build.linear(f"classifier.{index}", x, 1, features)
        if index < 2:
            x = build.add(f"classifier.{index}.relu", "elementwise", [x], is_in_place=True)
    return build.graph([x, build.add("loss", "loss", [x, labels], 1)])
