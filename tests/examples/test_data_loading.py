"""examples/data_loading: what limits is found out, and figures show what a run does."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys

import pytest
from support.repository import ROOT

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.settings import Settings

PROGRAM = ROOT / "examples" / "data_loading" / "data_loading.py"
SMALL = ["--items", "32", "--side", "16", "--batch-size", "4", "--workers", "1"]

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]


@pytest.fixture
def program(monkeypatch):
    """Import a program of the folder by name, as its own process would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    path, known = list(sys.path), set(sys.modules)
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in {"data_loading", "figures"} - known:
        sys.modules.pop(name, None)


def ids(path):
    """Return the ids in an SVG."""
    return re.findall(r'id="([^"]+)"', path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("case", "global_batch", "step"), [("1", 16, 800), ("2", 64, 3200)])
def test_a_case_has_the_sizes_of_the_text(program, case, global_batch, step):
    data_loading = program("data_loading")
    args = data_loading.parse(["--case", case])
    sizes = data_loading.sizes_of(args)
    assert (sizes.global_batch, sizes.step) == (global_batch, step)
    assert sizes.step == sizes.global_batch * sizes.device_iterations
    assert (args.workers, args.items, args.side) == (32, 10_000, 128)


def test_what_a_case_sets_can_be_given_otherwise(program):
    args = program("data_loading").parse(["--workers", "3", "--case", "2", "--replicas", "2"])
    assert (args.workers, args.replicas, args.batch_size) == (3, 2, 16)


@pytest.mark.parametrize(
    ("loader", "synthetic", "given", "expected"),
    [
        (
            100,
            100,
            {},
            "the device limits: the loader gives 1.00 times what it takes; try a larger",
        ),
        (4000, 100, {}, "the device limits: the loader gives 40 times what it takes"),
        (300, 100, {"mode": "sync"}, "--mode async, as in mode sync"),
        (50, 100, {"mode": "sync"}, "the loader limits: it gives 0.50 of what the device takes; "),
        (50, 100, {"workers": 1}, "--workers 2"),
        (50, 100, {"workers": 4}, "--workers 2, one for each core"),
        (50, 100, {"workers": 4, "item_time": 0.1}, "--workers 8"),
        (50, 100, {}, "more --device-iterations"),
    ],
)
def test_the_verdict_follows_the_rule_of_the_text(program, loader, synthetic, given, expected):
    args = argparse.Namespace(**{"mode": "async", "workers": 2, "item_time": None, **given})
    assert expected in program("data_loading").verdict(loader, synthetic, args, 2)


def test_all_three_are_measured(program, capsys, tmp_path, monkeypatch):
    """With items that are waited for, so long that the loader limits however fast this machine is.

    A worker that waits 100 ms for each item cannot give more than 10 in a second.
    """
    file = tmp_path / "measured.json"
    data_loading = program("data_loading")
    monkeypatch.setattr(data_loading, "_LEAST_SECONDS", 0.1)
    report = data_loading.main(
        [*SMALL, "--items", "16", "--device-iterations", "1", "--replicas", "2",
         "--item-time", "0.1", "--json", str(file)]
    )  # fmt: skip
    assert report.sizes.step == 8
    assert 0 < report["DataLoader alone"] < 10
    assert 0 < report["real data"] < 10 < report["synthetic data"]
    out = capsys.readouterr().out
    assert "one step takes 8 items = 8 (global batch) x 1 (device iterations)" in out
    assert "the loader limits: it gives 0." in out
    written = json.loads(file.read_text())
    assert [one["what"] for one in written["measurements"]] == [
        "DataLoader alone", "synthetic data", "real data"
    ]  # fmt: skip

    picture = program("figures").main(["throughput", str(tmp_path / "t.svg"), "--from", str(file)])
    assert {"bar-DataLoader-alone", "bar-synthetic-data", "bar-real-data"} <= set(ids(picture))
    assert "the loader limits" in picture.read_text(encoding="utf-8")


def test_synthetic_data_leaves_out_the_real_one(program):
    report = program("data_loading").main([*SMALL, "--synthetic-data", "--mode", "sync"])
    assert [one.what for one in report.measurements] == ["DataLoader alone", "synthetic data"]


def test_nothing_loaded_before_the_clock_is_counted(program):
    """Some steps lie ready when it starts to drain; behind that epoch, none."""
    data_loading = program("data_loading")
    args = data_loading.parse([*SMALL, "--item-time", "0.02", "--device-iterations", "1"])
    loader = data_loading.make_loader(data_loading.make_dataset(args), args)
    try:
        data_loading.drain(loader)
        assert data_loading.drain(loader) > 32 * 0.02
    finally:
        loader.terminate()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--items", "8"], "--items 8 is given, one step takes 64"),
        (["--side", "8"], "--side 8 is given, 12 or more"),
        (["--json", "none/here/file"], "its folder does not exist"),
        (["--json", "/proc/self"], "it cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused(program, capsys, words, expected):
    with pytest.raises(SystemExit) as caught:
        program("data_loading").main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_more_device_iterations_help_the_modelled_ipu(program):
    """The host starts each call, with synthetic data too."""
    few, many = (["--device-iterations", number, "--side", "16"] for number in ("1", "8"))
    assert 2 * modelled(program, few) < modelled(program, many)
    synthetic = [modelled(program, words, synthetic=True) for words in (few, many)]
    assert 2 * synthetic[0] < synthetic[1]
    assert modelled(program, many) < synthetic[1]


def modelled(program, words, *, synthetic=False):
    """Return the items/s of the IPU's model; nothing is compiled or run."""
    torch = importlib.import_module("torch")
    data_loading = program("data_loading")
    args = data_loading.parse(["--items", "100000", *words])
    model = data_loading.ClassificationModel(args.side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    options = data_loading.make_options(args, synthetic=synthetic)
    training_model = data_loading.poptorch.trainingModel(model, options, optimizer)
    step = data_loading.sizes_of(args).step
    pictures = torch.zeros(1, 1, args.side, args.side).expand(step, -1, -1, -1)
    labels = torch.zeros(step, dtype=torch.long)
    return training_model.executionReport(pictures, labels).report.throughput


def test_the_page_says_what_the_model_of_the_device_says(program):
    page = (ROOT / "docs" / "data-loading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|" + r" ([\d,]+) \|" * 7 + "$", page, re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        micro, accumulation, replicas, iterations, batch, *speeds = (
            int(cell.replace(",", "")) for cell in row
        )
        assert batch == micro * accumulation * replicas
        words = [
            "--side", "128", "--batch-size", str(micro), "--replicas", str(replicas),
            "--gradient-accumulation", str(accumulation), "--device-iterations", str(iterations),
        ]  # fmt: skip
        found = [round(modelled(program, words, synthetic=on)) for on in (False, True)]
        assert found == speeds


@pytest.mark.long
@pytest.mark.mpi
def test_two_instances_are_one_measurement(poprun):
    words = [*SMALL, "--device-iterations", "2", "--steps", "2"]
    done = poprun("--num-instances", 2, "--num-replicas", 2, PROGRAM, *words)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert shown.count("one step takes 16 items = 8 (global batch) x 2") == 1
    assert len(re.findall(r"real data +[\d,]+", shown)) == 1
    assert len(re.findall(r"the (loader|device) limits", shown)) == 1
    assert "[1,1]" not in shown


@pytest.mark.parametrize(
    ("figure", "words", "stages", "settings"),
    [
        ("iterations", [], 1, {"device_iterations": 5}),
        ("pipeline", [], 4, {"accumulation": 8}),
        ("pipeline", ["--stages", "2", "--gradient-accumulation", "3"], 2, {"accumulation": 3}),
    ],
)
def test_a_figure_has_the_cells_of_the_schedule(program, tmp_path, figure, words, stages, settings):
    file = program("figures").main([figure, str(tmp_path / "figure.svg"), *words])
    placement = Placement(tuple(range(stages)), tuple(range(stages)))
    cells = {
        (f"ipu{ipu}-{cell.action}-{cell.micro_batch or cell.step}")
        for ipu, row in enumerate(schedule(placement, Settings(**settings)).rows)
        for cell in row
        if cell.action != "idle"
    }
    drawn = [name for name in ids(file) if name.startswith("ipu")]
    assert sorted(drawn) == sorted(cells)
    queue = [name for name in ids(file) if name.startswith("queue-")]
    assert len(queue) == Settings(**settings).micro_batches


def test_replicas_share_one_all_reduce_before_each_update(program, tmp_path):
    words = ["replicas", "--replicas", "2", "--device-iterations", "3"]
    file = program("figures").main([*words[:1], str(tmp_path / "figure.svg"), *words[1:]])
    drawn = ids(file)
    assert sum(name.startswith("exchange-") for name in drawn) == 3
    for ipu in range(2):
        assert sum(name.startswith(f"ipu{ipu}-update") for name in drawn) == 3
        assert f"ipu{ipu}-forward-3" in drawn
    assert "96 samples" in file.read_text(encoding="utf-8")  # 16 x 2 x 3


def test_samples_go_where_a_run_sends_them(program, tmp_path):
    """A step that returns all that it gets returns it in the order of the shares, replica by
    replica; and what a replica gets is what the batching contract cuts for it.
    """
    torch = importlib.import_module("torch")
    figures = program("figures")
    sizes = figures.Sizes(micro_batch=2, replicas=2, gradient_accumulation=3, device_iterations=2)
    shares = figures.shares_of(sizes)
    assert sorted(s for share in shares for s in share.samples) == list(range(sizes.step))

    options = figures.options_of(sizes)
    batching = options.batching(training=True)
    steps = batching.combined_micro_batches([torch.arange(sizes.step)])
    for share in shares:
        step = share.iteration * sizes.gradient_accumulation + share.accumulation
        (combined,) = steps[step]
        assert batching.per_replica(combined)[share.replica].tolist() == list(share.samples)

    words = ["--batch-size", "2", "--device-iterations", "2", "--gradient-accumulation", "3"]
    file = figures.main(["batching", str(tmp_path / "figure.svg"), *words])
    assert "replica1-iteration1-micro2" in ids(file)
    assert "22, 23" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("figure", ["iterations", "pipeline", "replicas", "batching"])
def test_a_figure_is_the_same_each_time(program, tmp_path, figure):
    files = [program("figures").main([figure, str(tmp_path / name)]) for name in ("a.svg", "b.svg")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pipeline", "a.svg", "--gradient-accumulation", "3"], "4 stages needs 7 or more"),
        (["iterations", "/proc/none/a.svg"], "a.svg is given, No such file"),
        (["pipeline", "a.gif"], ".svg, .png or .pdf"),
        (["throughput", "a.svg", "--from", os.devnull], "--json wrote is needed"),
    ],
)
def test_what_cannot_be_drawn_is_refused(program, capsys, words, expected):
    with pytest.raises(SystemExit) as caught:
        program("figures").main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
