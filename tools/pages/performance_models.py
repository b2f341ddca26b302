"""The parts of docs/performance.md on known models, from benchmarks/models.py and cnns.py.

Nothing here measures or writes files.
"""

from __future__ import annotations

from typing import Any

from tools.pages.performance_collectives import table_line

Row = dict[str, Any]

MODELS = """
## Known models on one instance

One step of SGD with momentum in float32 beside a hand-written step over the same samples in one
piece (`benchmarks/models.py`): images of 64x64 (ViT-B/16 with 4 layers: 224x224), 128 tokens;
micro-batches of 2 samples for convolutions, else 1. *compile*: seconds in a process that has
compiled nothing before, and three plain steps + 2 s; *again*: with an executable in the cache, and
one plain step + 1 s; *memory*: what a process needs at its peak beyond what it needed before there
was a model; *half*: the half model's step. The last four columns are ratios.

| model | R | runs as | compile | again | ours, ms | ours / plain | half / float | memory / plain |
|---|--:|---|--:|--:|--:|--:|--:|--:|
"""

CNNS = """
## CNN application

Images per second of training with two instances (`benchmarks/cnns.py`), beside a script written by
hand, with two processes under torchrun (`benchmarks/cnn_reference.py`). `examples/cnns/train.py`
and the script have generated images of {side}x{side}, the same global batch, SGD with momentum, and
float32 throughout. R: replicas of an instance. *script*: DistributedDataParallel over gloo takes
the images of a rank in one piece; *accumulated*: in R micro-batches, which is what R replicas
compute. The target of ours / script is {target}.

| model | R | micro-batch | ours | script | accumulated | ours / script | ours / accumulated |
|---|--:|--:|--:|--:|--:|--:|--:|
"""
_CNN_TARGET = 1.3


def cnns(rows: list[Row]) -> list[str]:
    """Return the table of the CNN application; nothing where it was not measured."""
    if not rows:
        return []
    parts = [CNNS.format(side=rows[0]["side"], target=_CNN_TARGET)]
    for row in rows:
        ways = ("ours", "reference", "accumulated")
        rates = [row.get(f"{way}_images_per_s") for way in ways]
        ratios = [row.get(f"ours/{way}") for way in ways[1:]]
        cells = [row["model"], row["replicas"], row["micro_batch"]]
        cells += ["" if rate is None else f"{rate:.0f}" for rate in rates]
        parts.append(table_line([*cells, *map(_two, ratios)]))
    met = sum(row["ours/reference"] >= _CNN_TARGET for row in rows)
    return [*parts, f"\nRows that reach the target beside the script: {met} of {len(rows)}.\n"]


def known_models(rows: list[Row]) -> list[str]:
    """Return the table, and how many rows reach each target."""
    parts = [MODELS]
    for row in rows:
        cells = [row["model"], row["replicas"], row["execution"]]
        cells += [f"{row['compile_s']:.1f} ({row['allowed_s']:.1f})"]
        cells += [f"{row['second_s']:.1f} ({row['allowed2_s']:.1f})", f"{row['ours_ms']:,.0f}"]
        cells += [_two(row.get(ratio)) for ratio in ("ours/plain", "half/float", "memory")]
        parts.append(table_line(cells))
    targets = {
        "compiling within the time in brackets (R = 1 and 4)": [
            row["compile_s"] <= row["allowed_s"] for row in rows if row["replicas"] <= 4
        ],
        "the second start": [row["second_s"] <= row["allowed2_s"] for row in rows],
        "at most 1.00 of the hand-written step with R = 1": [
            row["ours/plain"] <= 1.00 for row in rows if row["replicas"] == 1
        ],
        "at most 1.05 with more": [
            row["ours/plain"] <= 1.05 for row in rows if row["replicas"] > 1
        ],
        "half at most 1.3 of float32": [
            row["half/float"] <= 1.3 for row in rows if "half/float" in row
        ],
        "memory at most 1.3": [row["memory"] <= 1.3 for row in rows],
    }
    reached = [f"{name}: {sum(met)} of {len(met)}" for name, met in targets.items() if met]
    return [*parts, "\nTargets, and the rows that reach them:\n\n", *_items(reached)]


def _items(texts: list[str]) -> list[str]:
    return [f"- {text}\n" for text in texts]


def _two(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
