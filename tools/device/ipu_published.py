"""Training and inference runs that are known to have fitted, or not, into the memory of IPUs.

Most runs are recalled from the configurations of Graphcore's examples and of the Hugging Face
library for IPUs. Each run says how certain it is. Only runs that a document states are evidence.
The runs that calibrate bound constants of the device model; all others only judge it. The module
``ipu_judges`` has more runs that only judge. Nothing here computes the memory of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import (
    ADAM,
    HALF_ADAM,
    MOMENTUM,
    SGD,
    Location,
    Optimizer,
    Settings,
)
from popdist_py.ipu.specification import IPU, MK1, MK2
from tools.device.conformer import conformer
from tools.device.ipu_graphs import mlp, resnet
from tools.device.ipu_models import (
    Transformer,
    bert,
    bert_for_questions,
    efficientnet,
    gpt,
    unet,
    vgg_16,
    vit,
)
from tools.device.tutorial_models import data_loading_model, mnist_model

Certainty: TypeAlias = Literal["published", "from memory", "inferred"]
Role: TypeAlias = Literal["calibrates", "judges"]

# The element types of ``--precision 16.16`` in Graphcore's CNN examples.
HALF_MOMENTUM: Final = Optimizer(state=("float16",), accumulator="float16")
# The CNN examples' RMSprop stores mean squares in float32.
RMSPROP: Final = Optimizer(state=("float16", "float32"), accumulator="float16")
AWAY: Final = Location(on_chip=False)
SHARDED_AWAY: Final = Location(on_chip=False, is_sharded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A run on IPUs, and whether it fitted into their memory.

    Attributes:
        name: The name of the run, with its model and sizes.
        source: The document that describes the run.
        certainty: "published" if a document states the run, "from memory" if it is recalled, and
            "inferred" if it follows from remarks or arithmetic.
        ran: Whether the run fitted on hardware.
        graph: A function that returns the graph of the model.
        cut: The modules that begin a stage.
        ipus: The IPU of each stage. If ``ipus`` is empty, each stage has the next IPU.
        keeps: A regular expression for the names of operations whose output is a checkpoint.
        settings: The options of the run.
        ipu: The type of IPU.
        role: "calibrates" if the run bounds a constant of the device model, which was chosen within
            the bounds. "judges" if the run only judges the model.
    """

    name: str
    source: str
    certainty: Certainty
    ran: bool
    graph: Callable[[], Graph]
    cut: tuple[str, ...] = ()
    ipus: tuple[int, ...] = ()
    keeps: str = ""
    settings: Settings
    ipu: IPU = MK2
    role: Role = "judges"

    @property
    def is_evidence(self) -> bool:
        """Whether a document states the run, so that it is not recalled or inferred."""
        return self.certainty == "published"

    def is_right(self, verdict: Verdict) -> bool:
        """Return whether a verdict agrees with the run; "close" agrees with every run."""
        return verdict != ("does not fit" if self.ran else "fits")

    @property
    def run(self) -> Run:
        """The configuration of the run for the device model."""
        graph = self.graph()
        operations = tuple(
            replace(o, is_checkpoint=bool(re.fullmatch(self.keeps, o.name)))
            for o in graph.operations
        )
        graph = replace(graph, operations=operations)
        placement = Placement.cut(graph, self.cut)
        if self.ipus:
            placement = replace(placement, ipus=self.ipus)
        return Run(graph, placement, self.settings, self.ipu)


_CNN: Final = "Graphcore examples, vision/cnns"
_BERT: Final = "Graphcore examples, nlp/bert"
_GPT2: Final = "Graphcore examples, nlp/gpt2"
_VIT: Final = "Graphcore examples, vision/vit"
_ARITHMETIC: Final = "arithmetic: its variables alone are more than there is"
_LADDER: Final = "Graphcore's tutorial on memory and performance"


def _resnet_50(batch: int, **options: Any) -> Callable[[], Graph]:
    return partial(resnet, [3, 4, 6, 3], 224, batch, "float16", **options)


def _group_norm(batch: int) -> Callable[[], Graph]:
    return _resnet_50(batch, has_statistics=False)


_ONE_IPU: Final = Settings(
    accumulation=6, recompute="stage", partials="float16", optimizer=HALF_MOMENTUM, replicas=16
)
_MK1_PIPELINE: Final = Settings(accumulation=64, optimizer=HALF_MOMENTUM, partials="float16")
_INFERENCE: Final = Settings(is_training=False, device_iterations=1000)
_G16_B0: Final = partial(efficientnet, (1.0, 1.0), 224, group=16, has_statistics=False)
_G16_B4: Final = partial(efficientnet, (1.4, 1.8), 380, group=16, has_statistics=False)
_BLOCKS: Final = r"(blocks\.\d+\.\d+\.(project\.norm|add))"


def _ladder(type_: Literal["float32", "float16"]) -> Callable[[], Graph]:
    return partial(resnet, [3, 4, 23, 3], 64, 64, type_)


CNNS: Final = (
    Published(
        name="ResNet-50, half, batch 20, recomputation",
        source=f"{_CNN}: mk2_resnet50_mlperf_pod16_bs20",
        certainty="published",
        ran=True,
        graph=_resnet_50(20),
        keeps=r".*\.relu3",
        settings=_ONE_IPU,
        # This run bounds the constants of code and gaps from above.
        role="calibrates",
    ),
    Published(
        name="ResNet-50, half, batch 16, recomputation",
        source=f"{_CNN} (PyTorch)",
        certainty="from memory",
        ran=True,
        graph=_resnet_50(16),
        keeps=r".*\.relu3",
        settings=replace(_ONE_IPU, optimizer=MOMENTUM, partials="float32"),
    ),
    Published(
        name="ResNet-50, half, batch 20, no recomputation",
        source="the example recomputes for this reason",
        certainty="inferred",
        ran=False,
        graph=_resnet_50(20),
        settings=replace(_ONE_IPU, recompute="none"),
    ),
    Published(
        name="ResNet-50, half, batch 64, no recomputation",
        source="activations alone",
        certainty="inferred",
        ran=False,
        graph=_resnet_50(64),
        settings=replace(_ONE_IPU, recompute="none"),
    ),
    Published(
        name="ResNet-50, half, group norm, batch 1, on one Mk1",
        source=f"{_CNN} (TensorFlow): plain SGD is its default",
        certainty="from memory",
        ran=True,
        graph=_group_norm(1),
        settings=Settings(memory_proportion=0.1),
        ipu=MK1,
    ),
    Published(
        name="ResNet-50, half, group norm, batch 4, two Mk1",
        source=f"{_CNN} (TensorFlow)",
        certainty="from memory",
        ran=True,
        graph=_group_norm(4),
        cut=("layer3.2",),
        keeps=r".*\.relu3",
        settings=replace(_MK1_PIPELINE, recomputes_last=True),
        ipu=MK1,
    ),
    Published(
        name="ResNet-50, half, group norm, batch 4, four Mk1",
        source=f"{_CNN} (TensorFlow)",
        certainty="from memory",
        ran=True,
        graph=_group_norm(4),
        cut=("layer2.0", "layer3.0", "layer4.0"),
        settings=_MK1_PIPELINE,
        ipu=MK1,
    ),
    Published(
        name="ResNet-50, half, batch 16, on one Mk1",
        source="the examples pipeline batch 4 on Mk1",
        certainty="inferred",
        ran=False,
        graph=_resnet_50(16),
        keeps=r".*\.relu3",
        settings=_ONE_IPU,
        ipu=MK1,
    ),
    Published(
        name="ResNet-50, half, batch 64, inference",
        source=f"{_CNN}: inference",
        certainty="from memory",
        ran=True,
        graph=_resnet_50(64),
        settings=_INFERENCE,
    ),
    Published(
        name="ResNet-50, half, batch 4, inference on Mk1",
        source=f"{_CNN}: inference",
        certainty="from memory",
        ran=True,
        graph=_resnet_50(4),
        settings=_INFERENCE,
        ipu=MK1,
    ),
    Published(
        name="ResNeXt-101 32x4d, half, batch 8, inference",
        source="Graphcore examples, ResNeXt inference",
        certainty="from memory",
        ran=True,
        graph=partial(resnet, [3, 4, 23, 3], 224, 8, "float16", groups=32),
        settings=_INFERENCE,
    ),
    Published(
        name="ResNeXt-101 32x4d, half, batch 6, inference on Mk1",
        source="Graphcore examples, ResNeXt inference: batch 48 over eight",
        certainty="from memory",
        ran=True,
        graph=partial(resnet, [3, 4, 23, 3], 224, 6, "float16", groups=32),
        settings=_INFERENCE,
        ipu=MK1,
    ),
    Published(
        name="EfficientNet-B0, half, batch 64, inference",
        source=f"{_CNN}: inference",
        certainty="from memory",
        ran=True,
        graph=partial(efficientnet, (1.0, 1.0), 224, 64),
        settings=_INFERENCE,
    ),
    Published(
        name="EfficientNet-B4, half, batch 16, inference",
        source=f"{_CNN}: inference",
        certainty="from memory",
        ran=True,
        graph=partial(efficientnet, (1.4, 1.8), 380, 16),
        settings=_INFERENCE,
    ),
    Published(
        name="EfficientNet-B0 G16, half, group norm, batch 24, two IPUs",
        source=f"{_CNN}: efficientnet-b0-g16-gn",
        certainty="from memory",
        ran=True,
        graph=partial(_G16_B0, batch=24),
        cut=("blocks.3.0",),
        keeps=_BLOCKS,
        settings=Settings(
            accumulation=64, optimizer=RMSPROP, partials="float16", recomputes_last=True
        ),
    ),
    Published(
        name="EfficientNet-B4 G16, half, group norm, batch 6, four IPUs",
        source=f"{_CNN}: efficientnet-b4-g16-gn, global batch 6144 over 16 IPUs",
        certainty="from memory",
        ran=True,
        graph=partial(_G16_B4, batch=6),
        cut=("blocks.2.0", "blocks.3.2", "blocks.5.1"),
        keeps=_BLOCKS,
        settings=Settings(
            accumulation=256,
            optimizer=RMSPROP,
            partials="float16",
            replicas=4,
            recomputes_last=True,
        ),
    ),
    Published(
        name="EfficientNet-B4, half, batch 16, on one IPU",
        source="the examples take four IPUs for batch 6",
        certainty="inferred",
        ran=False,
        graph=partial(efficientnet, (1.4, 1.8), 380, 16),
        settings=replace(_ONE_IPU, recompute="none"),
    ),
    *(
        Published(
            name=f"ResNet-101, 64 x 64, {'float' if type_ == 'float32' else 'half'}, batch 64, "
            "two IPUs",
            source=_LADDER,
            certainty="published",
            ran=type_ == "float16",
            graph=_ladder(type_),
            cut=("layer3.8",),
            settings=Settings(accumulation=3, optimizer=optimizer),
            # The memory and cycles of ResNet-101 fix the planner's factor for a matrix product.
            role="calibrates",
        )
        for type_, optimizer in (("float32", ADAM), ("float16", HALF_ADAM))
    ),
    Published(
        name="U-Net, 572 x 572, half, batch 1, four IPUs",
        source="Graphcore examples, U-Net for medical images",
        certainty="from memory",
        ran=True,
        graph=partial(unet, 572, 1),
        cut=("down.2", "up.3", "up.1"),
        keeps=r"(down|up)\.\d\.relu2|bottom\.relu2",
        settings=Settings(
            accumulation=24,
            optimizer=HALF_ADAM,
            optimizer_location=AWAY,
            partials="float16",
            recomputes_last=True,
            memory_proportion=0.2,
        ),
    ),
    Published(
        name="U-Net, 572 x 572, float, batch 1, on one IPU",
        source="the example takes four IPUs in half",
        certainty="inferred",
        ran=False,
        graph=partial(unet, 572, 1, "float32"),
        settings=Settings(accumulation=24, optimizer=ADAM),
    ),
    Published(
        name="VGG-16, float, batch 16, on one IPU",
        source=_ARITHMETIC,
        certainty="inferred",
        ran=False,
        graph=partial(vgg_16, 16),
        settings=Settings(accumulation=4, optimizer=MOMENTUM),
    ),
    Published(
        name="MNIST, float, batch 40, on one Mk1",
        source="Graphcore's tutorial on MNIST",
        certainty="published",
        ran=True,
        graph=partial(mlp, [784, 128, 10], batch=40),
        settings=Settings(optimizer=SGD),
        ipu=MK1,
    ),
)

_LAYERS: Final = r"layers\.\d+\.norm"
_ADDS: Final = r"layers\.\d+\.add"


def _starts(counts: Sequence[int], *, head: bool) -> tuple[str, ...]:
    """Return the modules that begin a stage, from each stage's layers; the head is the last."""
    starts = [sum(counts[:index]) for index in range(1, len(counts))]
    return (*(f"layers.{start}" for start in starts), *(["head"] if head else []))


def _pretraining(
    name: str,
    certainty: Certainty,
    sizes: Transformer,
    batch: int,
    counts: Sequence[int],
    **changes: Any,
) -> Published:
    """Return a pre-training run of BERT, with the embedding and the heads on the first IPU."""
    settings = Settings(
        accumulation=512,
        replicas=4,
        optimizer=HALF_ADAM,
        optimizer_location=SHARDED_AWAY,
        partials="float16",
        memory_proportion=0.2,
    )
    return Published(
        name=name,
        source=f"{_BERT}: pre-training",
        certainty=certainty,
        ran=True,
        graph=partial(bert, sizes, batch),
        cut=(*_starts(counts, head=False), "pooler"),
        ipus=(*range(len(counts)), 0),
        keeps=_LAYERS,
        settings=replace(settings, **changes),
    )


_BASE: Final = Transformer(12, 768, 128)
_LARGE: Final = Transformer(24, 1024, 128, serial=2)
_LARGE_LAYERS: Final = (3, 7, 7, 7)


def _answers(
    name: str, certainty: Certainty, sizes: Transformer, batch: int, *starts: int
) -> Published:
    """Return a fine-tuning run on SQuAD with the settings of Hugging Face's library for IPUs."""
    return Published(
        name=name,
        source="Hugging Face's library for IPUs",
        certainty=certainty,
        ran=True,
        graph=partial(bert_for_questions, sizes, batch),
        cut=tuple(f"layers.{start}" for start in starts),
        keeps=_LAYERS,
        settings=Settings(
            accumulation=16,
            optimizer=HALF_ADAM,
            optimizer_location=AWAY,
            partials="float16",
            memory_proportion=0.2,
            recomputes_last=True,
        ),
    )


def _without_training(
    name: str, ran: bool, graph: Callable[[], Graph], ipu: IPU = MK2, *starts: int
) -> Published:
    return Published(
        name=f"{name}, inference",
        source=f"{_BERT}: inference" if ran else _ARITHMETIC,
        certainty="from memory" if ran and ipu is MK2 else "inferred",
        ran=ran,
        graph=graph,
        cut=tuple(f"layers.{start}" for start in starts),
        settings=_INFERENCE,
        ipu=ipu,
    )


_QUICK_BASE: Final = replace(_BASE, dropout=False)
_QUICK_LARGE: Final = replace(_LARGE, dropout=False)
_ROBERTA: Final = {"length": 384, "words": 50_265}

BERTS: Final = (
    _pretraining("BERT-base, 128 tokens, batch 10", "from memory", _BASE, 10, (0, 4, 4, 4)),
    _pretraining("BERT-base, 128 tokens, batch 16", "from memory", _BASE, 16, (3, 3, 3, 3)),
    _pretraining("BERT-base, 128 tokens, batch 32", "from memory", _BASE, 32, (0, 4, 4, 4)),
    _pretraining(
        "BERT-base, 512 tokens, batch 8",
        "from memory",
        replace(_BASE, length=512, predictions=76),
        8,
        (0, 4, 4, 4),
    ),
    _pretraining("BERT-large, 128 tokens, batch 8", "from memory", _LARGE, 8, _LARGE_LAYERS),
    _pretraining(
        "BERT-large, 384 tokens, batch 3",
        "from memory",
        replace(_LARGE, length=384, predictions=56),
        3,
        _LARGE_LAYERS,
    ),
    _pretraining(
        "BERT-large, 512 tokens, batch 2",
        "from memory",
        replace(_LARGE, length=512, predictions=76),
        2,
        _LARGE_LAYERS,
    ),
    _pretraining(
        "BERT-large, 128 tokens, batch 8, eight IPUs",
        "inferred",
        _LARGE,
        8,
        (0, 3, 3, 3, 3, 4, 4, 4),
    ),
    Published(
        name="BERT-base, SQuAD, 384 tokens, batch 2, two IPUs",
        source="Hugging Face's library for IPUs; there on four, the variables are few",
        certainty="inferred",
        ran=True,
        graph=partial(bert_for_questions, replace(_BASE, length=384), 2),
        cut=("layers.5",),
        keeps=_LAYERS,
        settings=Settings(
            accumulation=16,
            optimizer=HALF_ADAM,
            optimizer_location=AWAY,
            partials="float16",
            memory_proportion=0.2,
            recomputes_last=True,
        ),
    ),
    Published(
        name="BERT-large, SQuAD, 384 tokens, batch 1, four IPUs",
        source="Hugging Face's library for IPUs",
        certainty="from memory",
        ran=True,
        graph=partial(bert_for_questions, replace(_LARGE, length=384), 1),
        cut=_starts(_LARGE_LAYERS, head=False),
        keeps=_LAYERS,
        settings=Settings(
            accumulation=128,
            replicas=4,
            optimizer=HALF_ADAM,
            optimizer_location=SHARDED_AWAY,
            partials="float16",
            memory_proportion=(0.1, 0.15),
            recomputes_last=True,
        ),
    ),
    _answers(
        "DistilBERT, SQuAD, 384 tokens, batch 2, two IPUs",
        "inferred",
        replace(_BASE, layers=6, length=384),
        2,
        3,
    ),
    _answers(
        "RoBERTa-base, SQuAD, 384 tokens, batch 2, four IPUs",
        "from memory",
        replace(_BASE, **_ROBERTA),
        2,
        3,
        6,
        9,
    ),
    _answers(
        "RoBERTa-large, SQuAD, 384 tokens, batch 1, eight IPUs",
        "from memory",
        replace(_LARGE, **_ROBERTA),
        1,
        *(0, 3, 6, 9, 12, 16, 20),
    ),
    _without_training(
        "BERT-large, 128 tokens, batch 1", True, partial(bert_for_questions, _QUICK_LARGE, 1)
    ),
    _without_training(
        "BERT-large, 128 tokens, float, batch 1",
        False,
        partial(bert_for_questions, _QUICK_LARGE, 1, "float32"),
    ),
    _without_training(
        "BERT-large, 128 tokens, batch 1, on one Mk1",
        False,
        partial(bert_for_questions, _QUICK_LARGE, 1),
        MK1,
    ),
    _without_training(
        "BERT-base, 128 tokens, batch 4, two Mk1",
        True,
        partial(bert_for_questions, _QUICK_BASE, 4),
        MK1,
        6,
    ),
    Published(
        name="BERT-base, 128 tokens, batch 2, seven Mk1",
        source=f"{_BERT} (PopART), two layers on each IPU",
        certainty="from memory",
        ran=True,
        graph=partial(bert, _BASE, 2),
        cut=(*_starts((0, 2, 2, 2, 2, 2, 2), head=False), "pooler"),
        ipus=(*range(7), 0),
        keeps=_LAYERS,
        settings=Settings(
            accumulation=64,
            optimizer=replace(HALF_MOMENTUM, is_combined=True),
            partials="float16",
            memory_proportion=0.1,
        ),
        ipu=MK1,
    ),
    Published(
        name="BERT-base, 128 tokens, batch 16, inference",
        source=f"{_BERT}: inference",
        certainty="from memory",
        ran=True,
        graph=partial(bert_for_questions, replace(_BASE, dropout=False), 16),
        settings=_INFERENCE,
    ),
    Published(
        name="BERT-base, 128 tokens, batch 16, on one IPU",
        source=_ARITHMETIC,
        certainty="inferred",
        ran=False,
        graph=partial(bert, _BASE, 16),
        settings=Settings(accumulation=16, optimizer=HALF_ADAM, recompute="stage"),
        keeps=_LAYERS,
    ),
    Published(
        name="BERT-large, 128 tokens, batch 1, on one IPU",
        source=_ARITHMETIC,
        certainty="inferred",
        ran=False,
        graph=partial(bert, _LARGE, 1),
        settings=Settings(accumulation=16, optimizer=HALF_ADAM, recompute="stage"),
        keeps=_LAYERS,
    ),
    replace(
        _pretraining("", "inferred", _LARGE, 8, _LARGE_LAYERS),
        name="BERT-large, 128 tokens, batch 8, states in float on the chip",
        source="the example keeps them in Streaming Memory",
        ran=False,
        settings=Settings(accumulation=512, optimizer=ADAM, memory_proportion=0.2),
    ),
)


def _generation(
    name: str, certainty: Certainty, sizes: Transformer, counts: Sequence[int]
) -> Published:
    """Return a training run of GPT-2, with the embedding and the head on the first IPU."""
    return Published(
        name=name,
        source=_GPT2,
        certainty=certainty,
        ran=True,
        graph=partial(gpt, sizes, 1),
        cut=_starts(counts, head=True),
        ipus=(*range(len(counts)), 0),
        keeps=_ADDS,
        settings=Settings(
            accumulation=1024,
            replicas=4,
            optimizer=HALF_ADAM,
            optimizer_location=SHARDED_AWAY,
            partials="float16",
            memory_proportion=0.15,
        ),
    )


_SMALL: Final = Transformer(12, 768, 1024, words=50_257, serial=4)
_MEDIUM: Final = Transformer(24, 1024, 1024, words=50_257, serial=4)
_GPT2_LARGE: Final = Transformer(36, 1280, 512, words=50_257, serial=8)


def _vision(name: str, certainty: Certainty, batch: int, counts: Sequence[int]) -> Published:
    return Published(
        name=name,
        source=_VIT,
        certainty=certainty,
        ran=True,
        graph=partial(vit, 12, 768, batch),
        cut=_starts(counts, head=False),
        keeps=_ADDS,
        settings=Settings(
            accumulation=128,
            replicas=4,
            optimizer=HALF_ADAM,
            partials="float16",
            memory_proportion=0.2,
            recomputes_last=True,
        ),
    )


OTHERS: Final = (
    _generation("GPT-2 small, 1024 tokens, batch 1, two IPUs", "inferred", _SMALL, (4, 8)),
    _generation(
        "GPT-2 small, 1024 tokens, batch 1, four IPUs", "from memory", _SMALL, (0, 4, 4, 4)
    ),
    _generation(
        "GPT-2 medium, 1024 tokens, batch 1, four IPUs", "from memory", _MEDIUM, (1, 7, 8, 8)
    ),
    _generation(
        "GPT-2 large, 512 tokens, batch 1, eight IPUs",
        "from memory",
        _GPT2_LARGE,
        (1, 5, 5, 5, 5, 5, 5, 5),
    ),
    Published(
        name="GPT-2 medium, 1024 tokens, batch 1, on one IPU",
        source=_ARITHMETIC,
        certainty="inferred",
        ran=False,
        graph=partial(gpt, _MEDIUM, 1),
        keeps=_ADDS,
        settings=Settings(accumulation=16, optimizer=HALF_ADAM, recompute="stage"),
    ),
    _vision("ViT-base, batch 17, four IPUs", "from memory", 17, (3, 3, 3, 3)),
    _vision("ViT-base, batch 8, two IPUs", "inferred", 8, (6, 6)),
    Published(
        name="ViT-base, float, batch 8, on one IPU",
        source=_ARITHMETIC,
        certainty="inferred",
        ran=False,
        graph=partial(vit, 12, 768, 8, "float32"),
        settings=Settings(accumulation=16, optimizer=ADAM),
    ),
    Published(
        # AISHELL-1's longest utterances have about 1,500 frames.
        name="Conformer, 1500 frames, batch 4, two IPUs",
        source="Graphcore examples, speech/conformer",
        certainty="inferred",
        ran=True,
        graph=partial(conformer, 1500, 4),
        cut=("encoder.5",),
        keeps=r"encoder\.\d+\.norm|decoder\.\d+\.feed\.add",
        settings=Settings(
            accumulation=16,
            optimizer=HALF_ADAM,
            partials="float16",
            replicas=2,
            recomputes_last=True,
            memory_proportion=0.2,
        ),
    ),
)

TUTORIALS: Final = (
    Published(
        name="Classifier of 128 x 128 images, float, batch 16",
        source="Graphcore's tutorial on data loading",
        certainty="published",
        ran=True,
        graph=partial(data_loading_model, 16),
        settings=Settings(device_iterations=50, optimizer=MOMENTUM),
    ),
    Published(
        name="MNIST, float, batch 40, four IPUs",
        source="Graphcore's tutorial on pipelining",
        certainty="published",
        ran=True,
        graph=partial(mnist_model, 40),
        cut=("layer2", "layer3", "layer4"),
        settings=Settings(accumulation=10, device_iterations=10, optimizer=ADAM, output_mode="all"),
    ),
)

PUBLISHED: Final = (*CNNS, *BERTS, *OTHERS, *TUTORIALS)
