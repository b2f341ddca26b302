"""The tables and grids of the page about the device model are what the model computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.repository import ROOT

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.reports import execution_page
from popdist_py.ipu.schedule import least_accumulation, schedule
from popdist_py.ipu.schedule_views import grid
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import HALF_ADAM, Settings
from popdist_py.ipu.specification import IPUS, MK2
from popdist_py.ipu.transfers import host_traffic
from tools.device.ipu_graphs import resnet, with_8_bit_input
from tools.device.ipu_judges import ALL_RUNS
from tools.device.ipu_throughputs import THROUGHPUTS, mean_ratio

PAGE = (ROOT / "docs" / "device.md").read_text(encoding="utf-8")
# ResNet-101 over two IPUs on hardware: accumulation, device iterations, 8-bit input, cycles, MiB
# that the first IPU received, and kB that the first and the second IPU sent.
LADDER = (
    (3, 1, False, 60_111_417, 4.5, (51.8, 141)),
    (8, 1, False, 95_653_315, 12.0, (138, 141)),
    (8, 4, False, 283_021_420, 48.0, (552, 142)),
    (8, 4, True, 278_393_266, 24.0, (551, 142)),
)


def block(name):
    """Return the lines of a marked block of the page."""
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].splitlines()


def rows(name):
    """Return the cells of a marked table, without its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in block(name)[2:]]


def spread(ratios, digits):
    """Return the smallest and the largest ratio, as the page shows them."""
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


def test_agreement_with_known_runs():
    fits, throughput, *_ = rows("agreement")
    count, right = Counter(), Counter()
    for known in ALL_RUNS:
        count[known.role] += 1
        right[known.role] += known.is_right(known.run.fullest.verdict)
    expected = []
    for role in ("calibrates", "judges"):
        expected += [str(count[role]), f"{right[role]} right"]
    assert fits[1:] == expected
    estimates = [known.estimate for known in THROUGHPUTS]
    expected = []
    for role in ("calibrates", "judges"):
        ratios = [
            own / known.samples
            for own, known in zip(estimates, THROUGHPUTS, strict=True)
            if known.role == role
        ]
        mean = mean_ratio(estimates, THROUGHPUTS, role)
        expected += [str(len(ratios)), f"{spread(ratios, 2)}, mean {mean:.2f}"]
    assert throughput[1:] == expected


def test_agreement_with_measured_steps_of_resnet_101():
    float_graph = resnet([3, 4, 23, 3], 64, 64)
    half = float_graph.cast(data="float16", weights="float16")
    ratios = []
    for accumulation, iterations, is_8_bit, theirs, received, sent in LADDER:
        graph = with_8_bit_input(half) if is_8_bit else half
        placement = Placement.cut(graph, ["layer3.8"])
        settings = Settings(
            accumulation=accumulation, device_iterations=iterations, optimizer=HALF_ADAM
        )
        ratios.append(cycles(graph, placement, settings, MK2).total / theirs)
        assert host_traffic(graph, placement, settings)[0].received == received * 2**20
        ipus = execution_page(Run(graph, placement, settings, MK2)).ipus
        assert [ipu.sent / 1024 for ipu in ipus] == pytest.approx(sent, rel=0.002)
    _, _, cycles_row, received_row, sent_row = rows("agreement")
    count = str(len(LADDER))
    assert cycles_row[1:] == [count, spread(ratios, 3), "0", ""]
    assert received_row[1:] == ["0", "", count, "exact"]
    assert sent_row[1:] == [count, "within 0.2 %", "0", ""]


def test_grids_of_both_schedules():
    line = Placement((0, 1, 2), (0, 1, 2))
    assert least_accumulation(3, is_training=True) == 2 * 3 - 1
    shown = "\n".join(block("grids"))
    grouped = Settings(accumulation=5, recompute="none")
    for settings in (grouped, replace(grouped, strategy="interleaved")):
        assert grid(schedule(line, settings)) in shown


def test_figures_of_the_types_of_ipu():
    head = block("types")[0]
    assert [cell.strip() for cell in head.split("|")[2:-1]] == list(IPUS)
    for figure, *values in rows("types"):
        name = figure.split("`")[1]
        assert values == [f"{getattr(ipu, name):,.0f}" for ipu in IPUS.values()]
