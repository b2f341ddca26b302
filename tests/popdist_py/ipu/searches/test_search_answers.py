"""The results of searches, as sentences and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import Run
from popdist_py.ipu.searches.search_answers import (
    find_batch,
    find_recomputation,
    find_splits,
    first_modules,
)
from popdist_py.ipu.settings import ADAM, MOMENTUM, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp, resnet, transformer

BERT = transformer(4, 256, 128, 8, words=1000)
RUN = Run(BERT, Placement.cut(BERT), Settings(accumulation=7, optimizer=ADAM), MK2)
PLAIN = replace(RUN, graph=transformer(4, 256, 128, 8))
RESNET = resnet([1, 2, 2, 1], 224, 36, "float16")
TIGHT = Run(RESNET, Placement.cut(RESNET), Settings(accumulation=6, optimizer=MOMENTUM), MK2)
WIDE = mlp([30_000, 30_000, 10], 1)
HOPELESS = Run(WIDE, Placement.cut(WIDE), Settings(), MK2)


def test_batch():
    answer = find_batch(RUN)
    batch = answer.to_json()["batch"]
    assert answer.run.fits
    assert answer.run.graph.batch == batch
    assert str(answer).startswith(f"The largest micro-batch that fits: {batch:,}\n")


def test_splits():
    answer = find_splits(PLAIN, 4)
    names = answer.to_json()["splits"]
    assert len(names) == 3
    # The names in the answer are valid for a placement, and give the placement that was found.
    assert Placement.cut(PLAIN.graph, names) == answer.run.placement
    lines = str(answer).splitlines()
    assert lines[0] == f"The best splits over 4 IPUs: {', '.join(names)}"
    assert [line.split()[-1] for line in lines[4:8]] == ["layers.0.attention.query", *names]
    assert first_modules(BERT, Placement.cut(BERT)) == []
    assert "one IPU has room" in str(find_splits(RUN, 1))


def test_splits_with_a_shared_weight():
    """The head returns to the first IPU, so a pipeline of five stages needs nine micro-batches."""
    answer = find_splits(RUN, 4)
    made = answer.to_json()
    assert (len(made["splits"]), made["ipus"]) == (4, [0, 1, 2, 3, 0])
    assert made["micro_batches"] == answer.run.settings.accumulation == 9
    assert made["split"] == f"{','.join(made['splits'])}@0"
    assert str(answer).endswith(f"\n  --split {made['split']}\n  --accumulation 9")
    lines = str(answer).splitlines()
    assert lines[0].startswith("The best splits over 4 IPUs, with 9 micro-batches: ")
    assert lines[0].endswith("(on IPU 0 again, because it shares a weight)")
    assert lines[4].endswith(f"embedding, {made['splits'][-1]}")
    enough = replace(RUN, settings=replace(RUN.settings, accumulation=16))
    assert "micro_batches" not in find_splits(enough, 4).to_json()


@pytest.fixture(scope="module")
def recomputation():
    return find_recomputation(TIGHT)


def test_recomputation(recomputation):
    answer = recomputation
    made = answer.to_json()
    assert made["recompute"] == "stage"
    assert f"behind {len(made['checkpoints'])} operations" in answer.sentence
    marked = {o.name for o in answer.run.graph.operations if o.is_checkpoint}
    assert set(made["checkpoints"]) == marked
    assert find_recomputation(RUN).to_json()["recompute"] == "none"


def test_curve_of_memory_against_time(recomputation):
    answer = recomputation
    made = answer.to_json()
    speeds = [point["samples_per_second"] for point in made["curve"]]
    shares = [point["share"] for point in made["curve"]]
    assert speeds == sorted(speeds, reverse=True)
    assert shares == sorted(shares, reverse=True)
    (chosen,) = [p for p in made["curve"] if p["checkpoints"] == made["checkpoints"]]
    assert (chosen["share"], chosen["verdict"]) == (made["share"], "fits")
    assert f"\n  {chosen['share']:>12.1%}" in str(answer)


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (find_batch(HOPELESS), "batch"),
        (find_splits(HOPELESS, 3), "splits"),
        (find_recomputation(HOPELESS), "recompute"),
    ],
)
def test_nothing_found(answer, question):
    made = answer.to_json()
    assert json.loads(json.dumps(made)) == made
    curve = made.pop("curve", [])
    assert [point["verdict"] for point in curve] == ["does not fit"] * len(curve)
    assert made == {"version": 1, "question": question, "found": False}
    assert "\n" not in str(answer)
