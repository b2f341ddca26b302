"""The reports about memory and time: their contents, and figures equal to those of the model."""

from __future__ import annotations

import functools
import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.reports.memory_over_time import curve
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


@functools.cache
def pages(name):
    """Return both reports of a run, which are cached because advice takes a second."""
    return memory_page(RUNS[name]), execution_page(RUNS[name])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "ladder_long"])
def test_text_of_both_pages(golden, name):
    text = "\n\n".join(map(str, pages(name))) + "\n"
    assert max(map(len, text.splitlines())) <= 100
    golden(f"report_{name}.txt", text)


def test_json_of_both_pages(golden):
    made = [page.to_json() for page in pages("ladder_float")]
    for own in made[0]["ipus"]:
        own["liveness"] = [len(own["liveness"]), *own["liveness"][:2]]
    # The last digits of floats depend on the order of additions, so they are not compared.
    made = json.loads(json.dumps(made), parse_float=lambda digits: round(float(digits), 9))
    golden("report_ladder_float.json", json.dumps(made, indent=1) + "\n")


@pytest.mark.parametrize("name", RUNS)
def test_json_has_the_figures_of_the_model(name):
    own = RUNS[name]
    model = own.graph, own.placement, own.settings, own.ipu
    made, taken = (page.to_json() for page in pages(name))
    # The values have plain types, so JSON text gives equal values back.
    assert json.loads(json.dumps([made, taken])) == [made, taken]
    assert made["device"] == taken["device"] == own.ipu.name
    for ipu, theirs in zip(made["ipus"], memory(*model).ipus, strict=True):
        assert ipu["needed"] == theirs.needed == sum(ipu["by_category"].values())
        assert ipu["always_live"] + ipu["not_always_live"] == ipu["needed"]
        assert ipu["by_category"] == theirs.by_category()
        for field in ("capacity", "tiles", "fullest_tile", "peak_at", "fits", "verdict", "share"):
            assert ipu[field] == getattr(theirs, field), field
        largest = [part["bytes"] for part in ipu["largest"]]
        assert largest == sorted(largest, reverse=True)
        assert [ipu["peak_at"], ipu["needed"]] in ipu["liveness"]
    assert made["fits"] == own.fits == (not made["advice"])
    assert made["fits"] == (made["verdict"] == "fits") == (made["share"] <= 0.95)
    assert made["uncertainty"] == 0.05
    report = cycles(*model)
    assert taken["cycles"] == report.total
    assert (taken["cycles_between_updates"], taken["cycles_beside"]) == (report.window, report.call)
    assert taken["samples_per_second"] * taken["seconds"] == pytest.approx(taken["samples"])
    for stage, theirs in zip(taken["stages"], report.stages, strict=True):
        for field in ("forward", "backward", "recompute", "receive", "all_reduce", "update"):
            assert stage.get(field, 0) == round(getattr(theirs, field)), field
    assert [one["busy"] for one in taken["ipus"]] == pytest.approx(list(report.busy))
    shares = [one["share"] for one in taken["slowest"]]
    assert shares == sorted(shares, reverse=True)


@given(
    widths=st.lists(st.integers(1, 600), min_size=4, max_size=8),
    stages=st.integers(1, 3),
    strategy=st.sampled_from(["grouped", "interleaved", "sharded", "serial phased"]),
    recompute=st.sampled_from(["default", "none", "norm", "stage"]),
    is_training=st.booleans(),
)
def test_the_peak_of_a_curve_is_the_needed_memory(widths, stages, strategy, recompute, is_training):
    graph = mlp(widths, 16)
    cuts = [f"layers.{index}" for index in range(1, stages)]
    own = run(
        graph, cuts, strategy=strategy, recompute=recompute, is_training=is_training,
        accumulation=4 if is_training else 1, optimizer=ADAM,
    )  # fmt: skip
    for ipu in memory_page(own).ipus:
        points = curve(own, ipu)
        highest = max(points, key=lambda point: point.bytes)
        assert highest.bytes == ipu.needed
        assert highest.moment == ipu.peak_at
        assert min(point.bytes for point in points) >= ipu.always_live


def test_a_model_of_one_operation_has_reports():
    graph = mlp([4, 2], 1)
    for is_training in (True, False):
        own = run(graph, is_training=is_training, synthetic_data=True)
        assert "fits on 1 mk2 IPU;" in str(memory_page(own))
        assert "samples/s" in str(execution_page(own))


def test_an_absurd_share_is_a_multiple():
    own = run(mlp([784, 256, 10], 10**9), optimizer=ADAM)
    text = str(memory_page(own))
    headline, *rest = text.splitlines()
    times = f"{own.fullest.share:,.0f} times"
    assert headline == (
        f"Memory: does not fit on 1 mk2 IPU; the fullest tile needs {times} its 638,976 bytes"
    )
    assert times in "\n".join(rest)
    assert not re.search(r"[0-9]{5}\.[0-9]%", text)
    assert re.search("micro-batches of [0-9]{2},[0-9]{3}, not 1,000,000,000", text)


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
    console.print(*pages("ladder_half"))
    shown = console.export_text()
    assert "███████░░░" in shown
    assert "▆▇▇" in shown
    assert pages("ladder_half")[0].ipus[1].peak_at in shown


def test_a_bar_and_its_figure_stay_together_on_a_narrow_terminal():
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(pages("ladder_half")[0])
    assert "███████░░░  68.8%" in console.export_text()


@pytest.mark.parametrize("width", [76, 80, 100])
def test_no_number_and_no_title_is_cut_on_a_narrow_terminal(width):
    own = run(
        resnet([3, 4, 23, 3], 64, 64), ["layer3.8"], accumulation=3, optimizer=ADAM,
        ipu=replace(MK2, tiles=900),
    )  # fmt: skip
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    memory_report, execution_report = memory_page(own), execution_page(own)
    console.print(memory_report)
    console.print(execution_report)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for own_ipu in memory_report.ipus:
        assert f"{own_ipu.fullest_tile:,}" in words
    sections = (*memory_report.document().sections, *execution_report.document().sections)
    for section in sections:
        for column in section.columns:
            assert set(column.name.split()) <= set(words)


def test_rich_without_block_characters():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(width=120, file=out).print(pages("ladder_half")[0])
    out.seek(0)
    assert "70.7%" in out.read()


def test_notebooks_show_tables():
    shown = pages("ladder_float")[0]._repr_html_()
    assert shown.count("<table>") == 5
    assert "half precision: all but second moments in float16" in shown
