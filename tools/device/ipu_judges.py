"""Runs that only judge the device model: configurations of examples, and runs that cannot fit.

The configurations are recalled from Graphcore's examples and the Hugging Face library for IPUs.
Most runs that are too large need more memory for their variables alone than the IPUs have. No
constant of the device model is fitted to a run of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from popdist_py.ipu.graph import Graph
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, Optimizer, Recompute, Settings
from popdist_py.ipu.specification import MK1
from tools.device.ipu_graphs import resnet
from tools.device.ipu_models import (
    Transformer,
    bert,
    bert_for_questions,
    encoder_decoder,
    gpt,
    vgg_16,
    vit,
)
from tools.device.ipu_published import (
    AWAY,
    HALF_MOMENTUM,
    PUBLISHED,
    SHARDED_AWAY,
    Certainty,
    Published,
)

__all__ = ["ALL_RUNS", "JUDGES"]

_LIBRARY: Final = "Hugging Face's library for IPUs"
_BERT: Final = "Graphcore examples, nlp/bert"
_GPT2: Final = "Graphcore examples, nlp/gpt2"
_ARITHMETIC: Final = "arithmetic"

_BASE: Final = Transformer(12, 768, 128)
_LARGE: Final = Transformer(24, 1024, 128, serial=2)
_QUICK_BASE: Final = replace(_BASE, dropout=False)
_QUICK_LARGE: Final = replace(_LARGE, dropout=False)
_ROBERTA: Final = {"words": 50_265, "serial": 1}
_GPT2_SMALL: Final = Transformer(12, 768, 1024, words=50_272, serial=4)
_GPT2_MEDIUM: Final = Transformer(24, 1024, 1024, words=50_272, serial=4)
_GPT2_LARGE: Final = Transformer(36, 1280, 1024, words=50_272, serial=8)
_GPT2_XL: Final = Transformer(48, 1600, 1024, words=50_272, serial=8)
_T5_SMALL: Final = Transformer(12, 512, 1024, words=32_128, serial=2)
_T5_BASE: Final = Transformer(24, 768, 512, words=32_128, serial=4)
_WHISPER_SMALL: Final = Transformer(24, 768, 1500, words=51_865, serial=5)

# The Hugging Face library marks the outputs of each layer as recomputation checkpoints. The layers
# of GPT-2 also return their keys and values. PopART marks a copy of each output, and it removes
# copies that no operation reads, so the marks of keys and values are left out.
_LAYERS: Final = r"layers\.\d+\.norm"
_SUMS: Final = r"layers\.\d+\.add"
_BLOCKS: Final = r".*\.relu3"

# The Hugging Face library stores both of Adam's moments in float32 by default.
_FLOAT_MOMENTS: Final = Optimizer(state=("float32", "float32"), accumulator="float16")
_COMBINED: Final = replace(HALF_MOMENTUM, is_combined=True)
_INFERENCE: Final = Settings(is_training=False, device_iterations=1000)


def _pipeline(replicas: int = 4, **changes: Any) -> Settings:
    """Return the settings of the Hugging Face library for training over several IPUs."""
    settings = Settings(
        accumulation=64,
        replicas=replicas,
        optimizer=_FLOAT_MOMENTS,
        optimizer_location=SHARDED_AWAY if replicas > 1 else AWAY,
        partials="float16",
        memory_proportion=0.2,
        recomputes_last=True,
    )
    return replace(settings, **changes)


def _cuts(counts: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the layers that begin a stage, from the layers of each stage."""
    return tuple(f"layers.{sum(counts[:index])}" for index in range(1, len(counts)))


def _ran(
    name: str, source: str, graph: Callable[[], Graph], certainty: Certainty = "from memory",
    **fields: Any,
) -> Published:  # fmt: skip
    return Published(name=name, source=source, certainty=certainty, ran=True, graph=graph, **fields)


def _encoder(
    name: str, source: str, sizes: Transformer, batch: int, counts: Sequence[int], **changes: Any
) -> Published:
    """Return a fine-tuning run of an encoder, whose head follows the last layer."""
    graph = partial(bert_for_questions, sizes, batch)
    settings = _pipeline(**changes)
    return _ran(name, source, graph, cut=_cuts(counts), keeps=_LAYERS, settings=settings)


def _pretraining(
    name: str, sizes: Transformer, batch: int, counts: Sequence[int], **changes: Any
) -> Published:
    """Return a pre-training run of BERT, with the embedding and the heads on the first IPU."""
    return _ran(
        name,
        f"{_BERT} and {_LIBRARY}",
        partial(bert, sizes, batch),
        cut=(*_cuts(counts), "pooler"),
        ipus=(*range(len(counts)), 0),
        keeps=_LAYERS,
        settings=_pipeline(**{"accumulation": 512, "optimizer": HALF_ADAM, **changes}),
    )


def _generation(
    name: str, sizes: Transformer, batch: int, counts: Sequence[int], **changes: Any
) -> Published:
    """Return a training run of GPT-2, with the embedding and the head on the first IPU."""
    return _ran(
        name,
        _GPT2,
        partial(gpt, sizes, batch),
        cut=(*_cuts(counts), "head"),
        ipus=(*range(len(counts)), 0),
        keeps=_SUMS,
        settings=_pipeline(**{"optimizer": HALF_ADAM, "memory_proportion": 0.15, **changes}),
    )


def _asked(name: str, source: str, graph: Callable[[], Graph], *cut: str) -> Published:
    """Return an inference run that fitted."""
    return _ran(f"{name}, inference", source, graph, cut=cut, settings=_INFERENCE)


def _residual(
    name: str, batch: int, recompute: Recompute, optimizer: Optimizer, keeps: str = ""
) -> Published:
    """Return a training run of ResNet-50 on one IPU."""
    return _ran(
        name,
        "Graphcore examples, vision/cnns (PyTorch)",
        partial(resnet, [3, 4, 6, 3], 224, batch, "float16"),
        keeps=keeps,
        settings=Settings(
            accumulation=16, replicas=16, recompute=recompute, optimizer=optimizer,
            partials="float16",
        ),
    )  # fmt: skip


_RAN: Final = (
    _encoder("BERT-base, SQuAD, 384 tokens, batch 2, four IPUs", _LIBRARY,
        replace(_BASE, length=384), 2, (3, 3, 3, 3)),
    _encoder("BERT-base, GLUE, 128 tokens, batch 8, four IPUs", _LIBRARY, _BASE, 8, (3, 3, 3, 3)),
    _encoder("BERT-base, four choices of 128 tokens, four IPUs", _LIBRARY, _BASE, 4, (3, 3, 3, 3),
        replicas=1),
    _encoder("BERT-large, GLUE, 128 tokens, batch 4, four IPUs", _LIBRARY, _LARGE, 4, (3, 7, 7, 7),
        memory_proportion=(0.1, 0.15)),
    _encoder("BERT-large, SQuAD, 384 tokens, batch 2, four IPUs", _BERT,
        replace(_LARGE, length=384), 2, (3, 7, 7, 7),
        optimizer=HALF_ADAM, memory_proportion=(0.1, 0.15)),
    _encoder("BERT-large, SQuAD, 384 tokens, batch 1, one replica", _LIBRARY,
        replace(_LARGE, length=384), 1, (3, 7, 7, 7), replicas=1, memory_proportion=(0.1, 0.15)),
    _encoder("DistilBERT, GLUE, 128 tokens, batch 8, two IPUs", _LIBRARY,
        replace(_BASE, layers=6), 8, (3, 3), replicas=8),
    _encoder("RoBERTa-large, GLUE, 128 tokens, batch 2, eight IPUs", _LIBRARY,
        replace(_LARGE, **_ROBERTA), 2, (0, 3, 3, 3, 3, 4, 4, 4), replicas=2),
    _pretraining("BERT-base, 128 tokens, batch 32, three layers on each IPU", _BASE, 32,
        (3, 3, 3, 3)),
    _pretraining("BERT-base, 512 tokens, batch 4, three layers on each IPU",
        replace(_BASE, length=512, predictions=76), 4, (3, 3, 3, 3)),
    _pretraining("BERT-large, 128 tokens, batch 8, one replica", _LARGE, 8, (3, 7, 7, 7),
        replicas=1, memory_proportion=(0.15, 0.25)),
    _generation("GPT-2 small, 128 tokens, batch 8, four IPUs", replace(_GPT2_SMALL, length=128), 8,
        (0, 4, 4, 4)),
    _generation("GPT-2 small, 128 tokens, batch 2, one replica", replace(_GPT2_SMALL, length=128),
        2, (0, 4, 4, 4), replicas=1, optimizer=_FLOAT_MOMENTS),
    _generation("GPT-2 large, 1024 tokens, batch 1, eight IPUs", _GPT2_LARGE, 1,
        (0, 4, 5, 5, 5, 6, 6, 5), replicas=2),
    _ran("T5-small, 1024 to 128 tokens, batch 1, four IPUs", _LIBRARY,
        partial(encoder_decoder, _T5_SMALL, 128, 1), cut=("layers.0", "layers.6", "head"),
        ipus=(0, 1, 3, 0), keeps=_SUMS, settings=_pipeline(1)),
    _ran("T5-base, 512 to 128 tokens, batch 1, eight IPUs", _LIBRARY,
        partial(encoder_decoder, _T5_BASE, 128, 1),
        cut=(*(f"layers.{start}" for start in range(0, 24, 4)), "head"),
        ipus=(0, 1, 2, 3, 5, 6, 7, 0), keeps=_SUMS, settings=_pipeline(2)),
    _ran("Whisper-small, 224 tokens, batch 1, four IPUs", _LIBRARY,
        partial(encoder_decoder, _WHISPER_SMALL, 224, 1, hears=True),
        cut=("layers.5", "target", "layers.17", "head"), ipus=(0, 1, 2, 3, 2), keeps=_SUMS,
        settings=_pipeline(1, accumulation=16, memory_proportion=(0.2, 0.2, 0.6, 0.6))),
    _ran("ViT-large, batch 2, eight IPUs", "fewer tokens than BERT-large of SQuAD on four IPUs",
        partial(vit, 24, 1024, 2), "inferred", cut=_cuts((3,) * 8), keeps=_SUMS,
        settings=_pipeline(2)),
    _ran("DeiT-small, batch 7, four IPUs", "Graphcore examples, vision/dino: the student alone",
        partial(vit, 12, 384, 7), cut=_cuts((3,) * 4), keeps=_SUMS, settings=_pipeline()),
    _residual("ResNet-50, half, batch 16, combined accumulator", 16, "stage", _COMBINED, _BLOCKS),
    _residual("ResNet-50, half, batch 20, combined accumulator", 20, "stage", _COMBINED, _BLOCKS),
    _asked("BERT-base, 384 tokens, batch 4", _BERT,
        partial(bert_for_questions, replace(_QUICK_BASE, length=384), 4)),
    _asked("BERT-large, 128 tokens, batch 4, two IPUs", _BERT,
        partial(bert_for_questions, _QUICK_LARGE, 4), "layers.12"),
    _asked("GPT-2 small, 128 tokens, batch 1", _LIBRARY,
        partial(gpt, replace(_GPT2_SMALL, length=128, dropout=False), 1)),
    _asked("GPT-2 large, 128 tokens, batch 1, four IPUs", _LIBRARY,
        partial(gpt, replace(_GPT2_LARGE, length=128, dropout=False), 1),
        "layers.9", "layers.18", "layers.27"),
    _asked("ViT-base, batch 16", "Graphcore examples, vision/vit", partial(vit, 12, 768, 16)),
    _asked("ResNet-152, half, batch 4", "Graphcore examples, vision/cnns",
        partial(resnet, [3, 8, 36, 3], 224, 4, "float16")),
)  # fmt: skip


def _too_large(
    name: str, graph: Callable[[], Graph], settings: Settings, **fields: Any
) -> Published:
    return Published(
        name=name, source=_ARITHMETIC, certainty="inferred", ran=False, graph=graph,
        settings=settings, **fields,
    )  # fmt: skip


def _enlarged(run: Published, name: str, **changes: Any) -> Published:
    """Return a run that does not fit: a run that fitted, with other fields or settings."""
    fields = {key: changes.pop(key) for key in ("graph", "cut", "ipus") if key in changes}
    return replace(
        run, name=name, source=_ARITHMETIC, certainty="inferred", ran=False,
        settings=replace(run.settings, **changes), **fields,
    )  # fmt: skip


_BY_NAME: Final = {run.name: run for run in (*PUBLISHED, *_RAN)}
_PRETRAINED: Final = _BY_NAME["BERT-base, 128 tokens, batch 32, three layers on each IPU"]
_LARGE_ALONE: Final = _BY_NAME["BERT-large, 128 tokens, batch 8, one replica"]
_MEDIUM: Final = _BY_NAME["GPT-2 medium, 1024 tokens, batch 1, four IPUs"]
_ON_CHIP: Final = {"optimizer_location": Settings().optimizer_location, "replicas": 1}


def _alone(optimizer: Optimizer, recompute: Recompute = "none") -> Settings:
    """Return settings for training on one IPU, with all variables on the chip."""
    return Settings(accumulation=16, optimizer=optimizer, recompute=recompute)


_TOO_LARGE: Final = (
    _too_large("BERT-base, SQuAD, 384 tokens, batch 2, on one IPU",
        partial(bert_for_questions, replace(_BASE, length=384), 2), _alone(_FLOAT_MOMENTS)),
    _too_large("BERT-base, SQuAD, 128 tokens, batch 1, on one IPU",
        partial(bert_for_questions, _BASE, 1), _alone(HALF_ADAM, "stage"), keeps=_LAYERS),
    _too_large("BERT-base, SQuAD, 384 tokens, batch 2, on one Mk1",
        partial(bert_for_questions, replace(_BASE, length=384), 2),
        replace(_alone(HALF_ADAM, "stage"), optimizer_location=AWAY), keeps=_LAYERS, ipu=MK1),
    _too_large("BERT-large, SQuAD, 384 tokens, batch 1, states on two IPUs",
        partial(bert_for_questions, replace(_LARGE, length=384), 1),
        _pipeline(optimizer=HALF_ADAM, **_ON_CHIP), cut=("layers.12",), keeps=_LAYERS),
    _too_large("DistilBERT, 128 tokens, float, batch 1, on one IPU",
        partial(bert_for_questions, replace(_BASE, layers=6), 1, "float32"), _alone(ADAM)),
    _enlarged(_PRETRAINED, "BERT-base, 128 tokens, batch 32, no recomputation", recompute="none"),
    _enlarged(_PRETRAINED, "BERT-base, 512 tokens, batch 32, four IPUs",
        graph=partial(bert, replace(_BASE, length=512, predictions=76), 32)),
    _enlarged(_LARGE_ALONE, "BERT-large, 128 tokens, batch 64, four IPUs",
        graph=partial(bert, _LARGE, 64)),
    _enlarged(_LARGE_ALONE, "BERT-large, 128 tokens, batch 8, half states on the chip",
        **_ON_CHIP),
    _enlarged(_MEDIUM, "GPT-2 medium, 1024 tokens, states on the chip", **_ON_CHIP),
    _enlarged(_MEDIUM, "GPT-2 medium, 1024 tokens, batch 1, two IPUs", cut=("layers.12", "head"),
        ipus=(0, 1, 0)),
    _too_large("GPT-2 small, 1024 tokens, batch 1, on one IPU", partial(gpt, _GPT2_SMALL, 1),
        replace(_alone(HALF_ADAM), optimizer_location=AWAY)),
    _too_large("GPT-2 medium, 128 tokens, float, inference",
        partial(gpt, replace(_GPT2_MEDIUM, length=128, dropout=False), 1, "float32"), _INFERENCE),
    _too_large("GPT-2 large, 1024 tokens, one IPU, inference",
        partial(gpt, replace(_GPT2_LARGE, dropout=False), 1), _INFERENCE),
    _too_large("GPT-2 XL, 1024 tokens, two IPUs, inference",
        partial(gpt, replace(_GPT2_XL, dropout=False), 1), _INFERENCE, cut=("layers.24",)),
    _too_large("RoBERTa-large, 128 tokens, float, inference",
        partial(bert_for_questions, replace(_QUICK_LARGE, **_ROBERTA), 1, "float32"), _INFERENCE),
    _too_large("XLM-RoBERTa-large, 128 tokens, inference",
        partial(bert_for_questions, replace(_QUICK_LARGE, words=250_002), 1), _INFERENCE),
    _too_large("ViT-huge, batch 1, inference", partial(vit, 32, 1280, 1), _INFERENCE),
    _too_large("ViT-large, batch 1, on one IPU", partial(vit, 24, 1024, 1),
        replace(_alone(HALF_ADAM, "stage"), optimizer_location=AWAY), keeps=_SUMS),
    _too_large("ViT-base, batch 32, no recomputation, on one IPU", partial(vit, 12, 768, 32),
        replace(_alone(HALF_ADAM), optimizer_location=AWAY)),
    _too_large("ResNet-50, float, batch 32, no recomputation",
        partial(resnet, [3, 4, 6, 3], 224, 32), _alone(MOMENTUM)),
    _too_large("ResNet-152, half, batch 16, no recomputation",
        partial(resnet, [3, 8, 36, 3], 224, 16, "float16"), _alone(_COMBINED)),
    _too_large("ResNet-152, float, batch 2, on one IPU", partial(resnet, [3, 8, 36, 3], 224, 2),
        _alone(ADAM)),
    _too_large("VGG-16, float, batch 1, on one IPU", partial(vgg_16, 1), _alone(MOMENTUM)),
)  # fmt: skip

JUDGES: Final = (*_RAN, *_TOO_LARGE)
ALL_RUNS: Final = (*PUBLISHED, *JUDGES)
