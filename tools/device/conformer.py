"""The Conformer of ESPnet and WeNet for AISHELL-1, as a graph of the device model.

The sizes are recalled: 12 encoder blocks of width 256, 6 decoder layers, 46.2 million parameters.
Nothing here divides the model into stages or runs it.
"""

from __future__ import annotations

from typing import Final

from popdist_py.ipu.graph import Graph, Product, Type
from tools.device.ipu_graphs import Builder

_WIDTH: Final = 256
_INNER: Final = 2048
_HEADS: Final = 4
_KERNEL: Final = 15
_MELS: Final = 80
# The number of classes: the Chinese characters of AISHELL-1, blank, unknown, and start of sentence.
_WORDS: Final = 4233
_TOKENS: Final = 32


def conformer(frames: int, batch: int, type: Type = "float16") -> Graph:
    """Return the graph for utterances of ``frames`` frames of 80 features, padded to one length."""
    build = Builder(batch, type)
    features = build.input("features", frames * _MELS)
    labels = build.input("labels", _TOKENS, "int32")
    x, length = _subsampled(build, features, frames)
    for index in range(12):
        x = _encoder_block(build, f"encoder.{index}", x, length)
    encoded = _norm(build, "encoder.norm", x)
    x = build.linear("ctc", encoded, length, (_WIDTH, _WORDS))
    aligned = build.add("ctc.loss", "loss", [x, labels], 1)
    table = build.weight("decoder.words.weight", _WORDS * _WIDTH)
    x = build.add("decoder.words", "lookup", [labels], _TOKENS * _WIDTH, weights=[table])
    for index in range(6):
        name = f"decoder.{index}"
        x = _attention(build, f"{name}.own", x, (_TOKENS, _TOKENS))
        x = _attention(build, f"{name}.cross", x, (_TOKENS, length), encoded=encoded)
        x = _feed_forward(build, f"{name}.feed", x, _TOKENS)
    x = _norm(build, "decoder.norm", x)
    x = build.linear("decoder.out", x, _TOKENS, (_WIDTH, _WORDS))
    return build.graph([build.add("loss", "loss", [x, labels], 1), aligned])


def _subsampled(build: Builder, features: str, frames: int) -> tuple[str, int]:
    """Return the features after two convolutions of stride 2, and their number of frames."""
    x, channels, bands = features, 1, _MELS
    for number in (1, 2):
        frames, bands = (frames - 1) // 2, (bands - 1) // 2
        x = _convolution(build, f"subsample.conv{number}", x, (channels, _WIDTH), 9, frames * bands)
        x = build.add(f"subsample.relu{number}", "elementwise", [x], is_in_place=True)
        channels = _WIDTH
    return build.linear("subsample.out", x, frames, (_WIDTH * bands, _WIDTH)), frames


def _encoder_block(build: Builder, name: str, x: str, length: int) -> str:
    x = _feed_forward(build, f"{name}.first", x, length)
    x = _attention(build, f"{name}.attention", x, (length, length), is_relative=True)
    y = _norm(build, f"{name}.conv.norm", x)
    y = _convolution(build, f"{name}.conv.in", y, (_WIDTH, 2 * _WIDTH), 1, length)
    y = build.add(f"{name}.conv.glu", "elementwise", [y], length * _WIDTH, saved=[y])
    channels = (_WIDTH, _WIDTH)
    y = _convolution(build, f"{name}.conv.depthwise", y, channels, _KERNEL, length, _WIDTH)
    y = _norm(build, f"{name}.conv.depthwise_norm", y)
    y = build.add(f"{name}.conv.swish", "elementwise", [y], saved=[y])
    y = _convolution(build, f"{name}.conv.out", y, channels, 1, length)
    x = _added(build, f"{name}.conv", y, x)
    x = _feed_forward(build, f"{name}.second", x, length)
    return _norm(build, f"{name}.norm", x)


def _feed_forward(build: Builder, name: str, x: str, length: int) -> str:
    y = _norm(build, f"{name}.norm", x)
    y = build.linear(f"{name}.inner", y, length, (_WIDTH, _INNER))
    y = build.add(f"{name}.swish", "elementwise", [y], saved=[y])
    y = build.linear(f"{name}.outer", y, length, (_INNER, _WIDTH))
    return _added(build, name, y, x)


def _attention(
    build: Builder,
    name: str,
    x: str,
    lengths: tuple[int, int],
    *,
    encoded: str | None = None,
    is_relative: bool = False,
) -> str:
    """Add attention with ``lengths[0]`` queries of ``x``, and ``lengths[1]`` keys.

    Keys and values come from ``encoded`` if it is given, and otherwise from ``x``.
    """
    length, others = lengths
    y = _norm(build, f"{name}.norm", x)
    read, depth, sizes = encoded or y, _WIDTH // _HEADS, (_WIDTH, _WIDTH)
    query = build.linear(f"{name}.query", y, length, sizes)
    key = build.linear(f"{name}.key", read, others, sizes)
    value = build.linear(f"{name}.value", read, others, sizes)
    product, elements = Product(length, depth, others, _HEADS), _HEADS * length * others
    scores = build.add(f"{name}.scores", "product", [query, key], elements, product=product)
    if is_relative:
        # All samples share the positions, so the time for their projection is negligible.
        position = build.weight(f"{name}.position.weight", _WIDTH**2)
        biases = build.weight(f"{name}.position.biases", 2 * _WIDTH)
        weights = [position, biases]
        relative = build.add(
            f"{name}.relative", "product", [query], elements, weights=weights, product=product
        )
        scores = build.add(f"{name}.sum", "add", [scores, relative], is_in_place=True)
    scores = build.add(f"{name}.softmax", "softmax", [scores], is_in_place=True)
    scores = build.add(f"{name}.softmax_dropout", "elementwise", [scores], saved=[])
    product = Product(length, others, depth, _HEADS)
    y = build.add(f"{name}.mix", "product", [scores, value], length * _WIDTH, product=product)
    return _added(build, name, build.linear(f"{name}.out", y, length, sizes), x)


def _added(build: Builder, name: str, y: str, x: str) -> str:
    """Add a dropout of ``y`` and the residual sum with ``x``."""
    y = build.add(f"{name}.dropout", "elementwise", [y], saved=[])
    return build.add(f"{name}.add", "add", [y, x], is_in_place=True)


def _norm(build: Builder, name: str, x: str) -> str:
    return build.norm(name, x, _WIDTH, has_statistics=False)


def _convolution(
    build: Builder,
    name: str,
    x: str,
    channels: tuple[int, int],
    kernel: int,
    positions: int,
    groups: int = 1,
) -> str:
    """Add a convolution with bias; ``kernel`` and ``positions`` count all elements of each."""
    into, out = channels
    depth = into // groups * kernel
    weights = [build.weight(f"{name}.weight", depth * out), build.weight(f"{name}.bias", out)]
    product = Product(positions, depth, out // groups, groups, is_convolution=True)
    return build.add(name, "product", [x], positions * out, weights=weights, product=product)
