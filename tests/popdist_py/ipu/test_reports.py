"""The two reports: what they show, and that their figures are those of the model."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from popdist_py.ipu.curves import curve
from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import ADAM, HALF_ADAM, Location, Settings
from popdist_py.ipu.specification import MK1, MK2
from tools.device.ipu_graphs import mlp, resnet, transformer

FLOAT = resnet([3, 4, 23, 3], 64, 64)
HALF = FLOAT.cast(data="float16", weights="float16")
MLP = mlp([784, 256, 256, 10], 32)
BERT = transformer(4, 256, 128, 8, words=1000)


def run(graph, cuts=(), *, ipu=MK2, **options):
    return Run(graph, Placement.cut(graph, cuts), Settings(**options), ipu)


RUNS = {
    "ladder_float": run(FLOAT, ["layer3.8"], accumulation=3, optimizer=ADAM),
    "ladder_half": run(HALF, ["layer3.8"], accumulation=3, optimizer=HALF_ADAM),
    "ladder_long": run(
        HALF, ["layer3.8"], accumulation=8, device_iterations=4, optimizer=HALF_ADAM
    ),
    "mlp_inference": run(MLP, is_training=False, device_iterations=4),
    "transformer": run(
        BERT,
        ["layers.1", "layers.2", "layers.3"],
        accumulation=16,
        replicas=2,
        optimizer=ADAM,
        optimizer_location=Location(on_chip=False),
        ipu=MK1,
    ),
    "transformer_phased": run(
        BERT, ["layers.2"], strategy="serial phased", accumulation=2, optimizer=ADAM
    ),
}


@pytest.fixture(params=RUNS)
def named_run(request):
    return request.param, RUNS[request.param]


def test_text_and_json_of_both_pages(golden, named_run):
    name, own = named_run
    pages = memory_page(own), execution_page(own)
    text = "\n\n".join(map(str, pages)) + "\n"
    assert max(map(len, text.splitlines())) <= 100
    golden(f"report_{name}.txt", text)
    made = [page.to_json() for page in pages]
    # Plain types only: what is written comes back.
    assert json.loads(json.dumps(made)) == made
    for own in made[0]["ipus"]:
        own["liveness"] = [len(own["liveness"]), *own["liveness"][:2]]
    # The order of sums shows in the last digits of floats, and means nothing.
    made = json.loads(json.dumps(made), parse_float=lambda digits: round(float(digits), 9))
    golden(f"report_{name}.json", json.dumps(made, indent=1) + "\n")


def test_what_json_holds_is_the_model_s(named_run):
    _, own = named_run
    model = own.graph, own.placement, own.settings, own.ipu
    made = memory_page(own).to_json()
    for ipu, theirs in zip(made["ipus"], memory(*model).ipus, strict=True):
        assert ipu["needed"] == theirs.needed == sum(ipu["by_category"].values())
        assert ipu["always_live"] + ipu["not_always_live"] == ipu["needed"]
    assert made["fits"] == own.fits == (not made["advice"])
    taken, report = execution_page(own).to_json(), cycles(*model)
    assert taken["cycles"] == report.total
    assert taken["samples_per_second"] * taken["seconds"] == pytest.approx(taken["samples"])


@given(
    widths=st.lists(st.integers(1, 600), min_size=4, max_size=8),
    stages=st.integers(1, 3),
    strategy=st.sampled_from(["grouped", "interleaved", "sharded", "serial phased"]),
    recompute=st.sampled_from(["default", "none", "norm", "stage"]),
    is_training=st.booleans(),
)
def test_the_highest_of_a_curve_is_what_is_needed(widths, stages, strategy, recompute, is_training):
    graph = mlp(widths, 16)
    cuts = [f"layers.{index}" for index in range(1, stages)]
    own = run(
        graph, cuts, strategy=strategy, recompute=recompute, is_training=is_training,
        accumulation=4 if is_training else 1, optimizer=ADAM,
    )  # fmt: skip
    for ipu in memory_page(own).ipus:
        points = curve(own, ipu.ipu)
        highest = max(points, key=lambda point: point.bytes)
        assert highest.bytes == ipu.needed
        assert highest.moment == ipu.peak_at
        assert min(point.bytes for point in points) >= ipu.always_live


def test_one_operation_is_no_reason_to_fail():
    graph = mlp([4, 2], 1)
    for is_training in (True, False):
        own = run(graph, is_training=is_training, synthetic_data=True)
        assert "fits on 1 mk2 IPU;" in str(memory_page(own))
        assert "samples/s" in str(execution_page(own))


def test_columns_of_many_ipus_have_room():
    graph = transformer(12, 64, 16, 1)
    own = run(graph, [f"layers.{index}" for index in range(1, 12)], accumulation=23)
    text = f"{memory_page(own)}\n{execution_page(own)}"
    assert text.count("By category") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_a_long_name_is_cut_in_its_middle():
    graph = mlp([4, 2], 1)
    long = "module." * 20 + "end"
    (first, *rest) = graph.operations
    graph = replace(graph, operations=(replace(first, name=long), *rest))
    text = str(execution_page(run(graph)))
    assert "module.module." in text
    assert long not in text
    assert "module.end" in text
    assert max(map(len, text.splitlines())) <= 100


def test_rich_draws_bars_and_curves():
    console = Console(width=120, record=True, force_terminal=True, file=io.StringIO())
    console.print(memory_page(RUNS["ladder_half"]), execution_page(RUNS["ladder_half"]))
    shown = console.export_text()
    assert "███████░░░" in shown
    assert "▆▇▇" in shown
    assert memory_page(RUNS["ladder_half"]).ipus[1].peak_at in shown


def test_a_bar_and_its_figure_stay_together_on_a_narrow_terminal():
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(memory_page(RUNS["ladder_half"]))
    assert "███████░░░  68.8%" in console.export_text()


def test_rich_without_block_characters():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(width=120, file=out).print(memory_page(RUNS["ladder_half"]))
    out.seek(0)
    assert "70.7%" in out.read()


def test_notebooks_show_tables():
    shown = memory_page(RUNS["ladder_float"])._repr_html_()
    assert shown.count("<table>") == 5
    assert "half precision: all but second moments in float16" in shown
