"""The HTML page about a model on IPUs: its sections, and figures equal to those of the reports."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from support.cpu_time import limited_cpu_time

from popdist_py.html_pages.page import Cell, Chart, ChartRow, Details, Sentence, Table, TableRow
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import ESTIMATES
from popdist_py.ipu.page import Planned, plan_page, write_plan_page
from popdist_py.ipu.page import what_if_section as what_ifs
from popdist_py.ipu.page.comparison_section import comparison_section
from popdist_py.ipu.page.execution_sections import execution_section, time_by_kind
from popdist_py.ipu.page.liveness_section import liveness_section
from popdist_py.ipu.page.memory_sections import memory_section, tile_bytes_of
from popdist_py.ipu.page.saved_reports import saved_reports
from popdist_py.ipu.page.search_section import search_section
from popdist_py.ipu.page.summary_sections import insights_section
from popdist_py.ipu.page.what_if_section import alternatives, what_if_section
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.reports.memory_over_time import live_categories
from popdist_py.ipu.searches import Run
from popdist_py.ipu.searches.search_answers import find_ipus, find_recomputation
from popdist_py.ipu.settings import ADAM, Location, Settings
from popdist_py.ipu.specification import MK1, MK2
from tools.device.ipu_graphs import mlp, resnet, transformer
from tools.running.browser import CHROMIUM, open_browser

SECTIONS = (
    *("Summary", "Insights", "Memory Report", "Liveness Report", "Operations"),
    *("Execution Trace", "What if"),
)
EVIL = "</script><img src=x onerror=alert(1)>"


def run(graph, cuts=(), *, ipu=MK2, **options):
    return Run(graph, Placement.cut(graph, cuts), Settings(**options), ipu)


BERT = transformer(4, 256, 128, 8, words=1000)
RUNS = {
    "mlp": run(mlp([784, 256, 256, 10], 32), accumulation=4, optimizer=ADAM),
    "inference": run(mlp([784, 256, 10], 32), is_training=False, device_iterations=4),
    "too large": run(resnet([3, 4, 6, 3], 64, 128), ["layer3.3"], accumulation=3, optimizer=ADAM),
    "transformer": run(
        BERT, ["layers.1", "layers.2", "layers.3"], accumulation=400, replicas=2, optimizer=ADAM,
        optimizer_location=Location(on_chip=False), ipu=MK1,
    ),
    "phased": run(BERT, ["layers.2"], strategy="serial phased", accumulation=2, optimizer=ADAM),
    "overlapped": run(
        mlp([784, 256, 10], 32), is_training=False, device_iterations=4, io_tiles=64,
        overlaps_io=True,
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", RUNS)


@functools.cache
def planned(name):
    own = RUNS[name]
    return Planned(
        name=f"models.py:{name}",
        run=own,
        memory=memory_page(own),
        execution=execution_page(own),
        options={"--batch": "32"},
    )


@functools.cache
def page_of(name):
    return plan_page(planned(name))


@functools.cache
def alternatives_of(name):
    return alternatives(RUNS[name])


class Outline(HTMLParser):
    """Collects the headings, captions and rows of a page as lines without numbers.

    The order of the rows of tables that the reader can sort depends on figures, so these rows are
    in the order of their texts.
    """

    LINES = ("h1", "h2", "figcaption", "tr", "p", "summary", "dt")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines = []
        self._open = self._sorted_from = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table" and ("class", "pp-sortable") in attrs:
            self._sorted_from = len(self.lines) + 1
        if tag in self.LINES:
            self._open = tag
            self.lines.append(f"{tag}:")
        elif tag in ("td", "th") and self._open:
            self.lines[-1] += " |"

    def handle_endtag(self, tag):
        if tag == "table" and self._sorted_from is not None:
            self.lines[self._sorted_from :] = sorted(self.lines[self._sorted_from :])
            self._sorted_from = None
        if tag == self._open:
            self._open = None

    def handle_data(self, data):
        if self._open and data.strip():
            self.lines[-1] += f" {re.sub(r'[<+-]?[0-9][0-9,.]*%?', '#', data.strip())}"


def test_outline_of_a_page(golden):
    """Numbers are left out, because the golden files of the reports contain them."""
    golden("outline_mlp.txt", "\n".join(Outline(page_of("mlp")).lines) + "\n")


@EACH
def test_a_page_has_the_sections_of_popvision(name):
    text = page_of(name)
    assert tuple(re.findall(r'<h2 id="h\d">([^<]*)</h2>', text)) == SECTIONS
    assert len(text) < 5_000_000
    assert text.isascii()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@EACH
def test_plotly_accepts_every_figure(name):
    import plotly.graph_objects as go

    (figures,) = re.findall(r'id="figures">(.*?)</script>', page_of(name))
    for figure in json.loads(figures):
        go.Figure(figure)


@EACH
def test_rectangles_of_the_treemap_hold_the_ones_inside(name):
    (nested,) = (
        part
        for part in memory_section(planned(name).memory, planned(name).execution, 16).parts
        if isinstance(part, Chart) and part.figure["data"][0]["type"] == "treemap"
    )
    (data,) = nested.figure["data"]
    sums = dict.fromkeys(data["ids"], 0)
    for parent, value in zip(data["parents"], data["values"], strict=True):
        if parent:
            sums[parent] += value
    assert len(sums) == len(data["ids"])
    for key, value in zip(data["ids"], data["values"], strict=True):
        assert sums[key] <= value
    assert data["values"][0] == sum(own.needed for own in planned(name).memory.ipus)


@EACH
def test_tiles_have_the_bytes_of_the_model(name):
    for own in planned(name).memory.ipus:
        tiles = tile_bytes_of(own, ESTIMATES.grain)
        assert len(tiles) == own.tiles
        assert max(tiles) == own.fullest_tile
        assert sum(tiles) >= own.needed


@EACH
def test_categories_over_time_add_up_to_the_curve(name):
    memory = planned(name).memory
    for own, curve in zip(memory.ipus, memory.curves, strict=True):
        sums = live_categories(RUNS[name], own.ipu, frozenset(range(len(curve))))
        assert [own.always_live + sum(one.values()) for one in sums] == [p.bytes for p in curve]


@EACH
def test_times_by_kind_are_a_call(name):
    execution = planned(name).execution
    for own, times in zip(execution.ipus, time_by_kind(execution), strict=True):
        assert sum(times.values()) == pytest.approx(execution.report.total, rel=1e-3)
        kinds = ["transfer", "forward", "recompute", "backward", "update"]
        if not execution.settings.is_phased:
            kinds.append("load")
        computing = sum(times[kind] for kind in kinds)
        assert computing / execution.report.total == pytest.approx(own.busy, abs=2e-3)


def test_a_long_window_is_drawn_with_its_first_micro_batches():
    parts = execution_section(RUNS["transformer"], planned("transformer").execution).parts
    summaries = [part.summary for part in parts if isinstance(part, Chart)]
    assert any("Drawn with 16 of 400 micro-batches" in summary for summary in summaries)


@EACH
def test_alternatives_contain_the_run_itself(name):
    found = alternatives_of(name)
    (own,) = (one for one in found if not one.num_changes)
    memory, execution = planned(name).memory, planned(name).execution
    assert (own.share, own.verdict) == (memory.share, memory.verdict)
    assert own.throughput == pytest.approx(execution.report.throughput)
    order = ["fits", "close", "does not fit"]
    keys = [(order.index(one.verdict), -round(one.throughput, 1)) for one in found]
    assert keys == sorted(keys)


def test_alternatives_change_batch_types_recomputation_and_ipus():
    found = alternatives_of("too large")
    assert {one.run.graph.batch for one in found} == {64, 128, 256}
    assert {one.precision for one in found} == {"32.32", "16.16"}
    assert {one.recompute for one in found} == {"none", "standard", "stage"}
    assert {one.run.placement.num_ipus for one in found} >= {1, 2, 4}
    for one in found:
        stages = one.run.placement.num_stages
        assert stages == 1 or one.run.settings.accumulation >= 2 * stages - 1


def test_a_large_model_has_the_alternatives_with_the_fewest_changes(monkeypatch):
    own = RUNS["too large"]
    every = alternatives_of("too large")
    monkeypatch.setattr(what_ifs, "_MOST_OPERATIONS", len(own.graph.operations))
    few = alternatives(own)
    assert len(few) < len(every)
    changes = sorted(one.num_changes for one in every)
    assert sorted(one.num_changes for one in few) == changes[: len(few)]


def test_every_chart_has_a_summary_and_tables_have_names():
    parts = [
        *memory_section(planned("mlp").memory, planned("mlp").execution, 16).parts,
        *liveness_section(RUNS["mlp"], planned("mlp").memory).parts,
        *what_if_section(RUNS["mlp"]).parts,
    ]
    for part in parts:
        if isinstance(part, Chart):
            assert part.summary.endswith(".")
        assert not isinstance(part, ChartRow | TableRow)
        if isinstance(part, Table):
            assert part.name


def test_names_of_the_user_are_escaped():
    own = RUNS["mlp"]
    operations = tuple(
        replace(o, name=f"{EVIL}{number}") for number, o in enumerate(own.graph.operations)
    )
    evil = replace(own, graph=replace(own.graph, operations=operations))
    made = Planned(
        name=EVIL, run=evil, memory=memory_page(evil), execution=execution_page(evil),
        options={EVIL: EVIL},
    )  # fmt: skip
    other = saved_reports({**made.to_json(), "device": EVIL}, EVIL)
    text = plan_page(made, other)
    assert "<img" not in text
    assert text.count("<script") == page_of("mlp").count("<script")


def test_an_absurd_share_is_a_multiple():
    own = run(mlp([784, 256, 10], 10**9), optimizer=ADAM)
    made = Planned(
        name="models.py:mlp", run=own, memory=memory_page(own), execution=execution_page(own)
    )
    text = plan_page(made)
    times = f"{own.fullest.share:,.0f} times"
    assert f"needs {times} the 638,976 bytes of a tile" in text
    assert not re.search(r"[0-9]{5}\.[0-9]%", text)


def test_two_reports_are_compared():
    mine, other = planned("too large"), planned("mlp")
    document = json.loads(json.dumps({**other.to_json(), "options": {"--batch": "8"}}))
    text = plan_page(mine, saved_reports(document, "other.json"))
    lines = Outline(text).lines
    assert "h2: Comparison" in lines
    assert any(
        line.startswith("p: This report is models.py:too large. The other report is models.py:mlp.")
        for line in lines
    )
    assert "tr: | verdict | does not fit | fits | differs" in lines
    assert "tr: | --batch | # | #" in lines
    assert any("Time of both reports by kind" in line for line in lines)
    assert "h2: Comparison" not in Outline(page_of("too large")).lines


def test_differences_have_a_sign_and_a_colour():
    fast = replace(RUNS["transformer"], ipu=MK2)
    # Without its faster clock, a Mk1 is never faster than a Mk2.
    slow = replace(fast, ipu=replace(MK1, clock=MK2.clock))
    documents = [
        Planned(name="m", run=one, memory=memory_page(one), execution=execution_page(one)).to_json()
        for one in (fast, slow)
    ]
    section = comparison_section(*(saved_reports(each, "m") for each in documents))
    rows = {
        row[0]: row for table in section.parts if isinstance(table, Table) for row in table.rows
    }
    assert section.parts[0].text.startswith("Both reports are of m.")
    difference = rows["samples/s"][3]
    assert (difference.text[0], difference.kind) == ("+", "good")
    assert (rows["forward"][3].text[0], rows["forward"][3].kind) == ("-", "good")
    assert rows["code"][3].kind == "warn"
    assert rows["samples of a call"][3].text == ""


def test_reports_without_times_are_compared_too():
    document = planned("mlp").to_json()
    del document["cycles_by_kind"]
    older = saved_reports(document, "m")
    titles = [
        part.title for part in comparison_section(older, older).parts if isinstance(part, Chart)
    ]
    assert titles == ["Memory of both reports by category"]


def test_insights_tell_the_time_of_changes_and_the_changes_that_go_together():
    lack = planned("too large").memory.problem
    together = tuple(replace(one, how="model.half()") for one in lack.advice[:2])
    memory = replace(planned("too large").memory, problem=replace(
        lack, together=together, more_ipus="8 IPUs: IPU 1 from layer1"
    ))  # fmt: skip
    section = insights_section(memory)
    tables = {part.name: part for part in section.parts if isinstance(part, Table)}
    assert tables["Tips"].columns == ("change", "MB less", "time", "then")
    assert [row[2].text for row in tables["Tips"].rows] == [one.time for one in lack.advice]
    (name,) = (name for name in tables if "together" in name)
    assert [row[0] for row in tables[name].rows] == [
        Cell(one.change, "words", note="model.half()") for one in together
    ]
    texts = [part.text for part in section.parts if isinstance(part, Sentence)]
    assert "The model also fits on 8 IPUs, without other changes." in texts
    assert Details("Where 8 IPUs begin", (Sentence("IPU 1 from layer1."),)) in section.parts


def test_the_grid_has_every_alternative_and_marks_the_best_of_each_number_of_ipus():
    own = RUNS["too large"]
    found = alternatives_of("too large")
    (grid,) = (
        part for part in what_if_section(own).parts if getattr(part, "name", "") == "What if"
    )
    cells = [cell for row in grid.rows for cell in row[2:]]
    assert sum(cell.text != "-" for cell in cells) == len(found)
    assert sum(cell.note.startswith("this run: does not fit") for cell in cells) == 1
    fitting = [one for one in found if one.verdict == "fits"]
    fastest = {}
    for one in fitting:
        fastest.setdefault(str(one.run.placement.num_ipus), f"{one.throughput:,.1f}/s")
    marked = {row[0]: cell.text for row in grid.rows for cell in row[2:] if cell.is_outlined}
    assert marked == fastest
    assert {cell.kind for cell in cells if cell.is_outlined} == {"good-cell"}


def test_a_search_is_the_first_section_of_a_page():
    answer = find_recomputation(run(BERT, optimizer=ADAM))
    text = plan_page(replace(planned("mlp"), answer=answer))
    assert re.findall(r'<h2 id="h1">([^<]*)</h2>', text) == ["Search"]
    section = search_section(answer)
    (chart,) = (part for part in section.parts if isinstance(part, Chart))
    assert sum(len(each["x"]) for each in chart.figure["data"]) == len(answer.curve)
    assert [each["name"] for each in chart.figure["data"]][-1] == "found"
    assert section.parts[0] == Sentence(f"{answer.sentence}.", "good")


def test_a_search_that_found_nothing_shows_what_it_compared():
    wide = run(resnet([1, 1, 1, 1], 64, 4096), optimizer=ADAM, accumulation=3)
    answer = find_recomputation(wide)
    section = search_section(answer)
    assert section.parts[0] == Sentence("No recomputation makes it fit.", "bad")
    (chart,) = (part for part in section.parts if isinstance(part, Chart))
    assert {each["name"] for each in chart.figure["data"]} == {"does not fit"}


def test_a_search_for_ipus_has_a_table_of_alternatives():
    answer = find_ipus(run(BERT, optimizer=ADAM), 4)
    tables = [part for part in search_section(answer).parts if isinstance(part, Table)]
    assert [table.name for table in tables] == ["With it", "Alternatives"]
    assert len(tables[1].rows) == len(answer.json_values["alternatives"])


def test_a_page_is_made_soon_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "page.html"
    with limited_cpu_time(15):
        write_plan_page(path, planned("too large"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == page_of("too large") + "\n"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make system-packages")
def test_a_browser_draws_the_page_without_requests(tmp_path):
    path = tmp_path / "page.html"
    write_plan_page(path, planned("transformer"))
    with open_browser(tmp_path / "profile") as browser:
        for is_dark, width in ((False, 1200), (True, 390)):
            browser.look(dark=is_dark, width=width)
            browser.open(path, "document.documentElement.dataset.drawn")
            assert browser.value("document.documentElement.scrollWidth") == width
            assert browser.value("document.querySelectorAll('.pp-undrawn').length") == 0
            drawn = "[...document.querySelectorAll('.pp-plot')].every(e => e.querySelector('path'))"
            assert browser.value(drawn)
            bars = "[...document.querySelectorAll('.legend .scrollbar')]"
            assert browser.value(f"{bars}.every(e => !Number(e.getAttribute('height')))")
        assert browser.problems == []
        requests = {url for url in browser.requests if not url.startswith(("file:", "blob:"))}
        assert requests == set()
