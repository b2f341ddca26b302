"""Saved reports: the figures that are read from a file, and files that are not reports."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.html_pages.page import Chart
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.page import Planned, read_saved_reports
from popdist_py.ipu.page.comparison_section import comparison_section
from popdist_py.ipu.page.saved_reports import saved_reports
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp

GRAPH = mlp([784, 256, 10], 32)
RUN = Run(GRAPH, Placement.cut(GRAPH), Settings(), MK2)
MADE = Planned(name="m", run=RUN, memory=memory_page(RUN), execution=execution_page(RUN))
DOCUMENT = json.loads(json.dumps(MADE.to_json()))


def test_a_file_has_the_figures_of_the_report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(DOCUMENT))
    found = read_saved_reports(path)
    assert found.share == pytest.approx(MADE.memory.share)
    assert (found.name, found.verdict, found.device) == ("m", "fits", "mk2")
    assert found.throughput == MADE.execution.report.throughput
    assert [own.needed for own in found.ipus] == [own.needed for own in MADE.memory.ipus]


def test_reports_of_earlier_versions_have_no_name_verdict_and_options():
    older = {key: DOCUMENT[key] for key in ("fits", "memory", "execution")}
    found = saved_reports(older, "older.json")
    assert (found.name, found.verdict, found.options) == ("older.json", "fits", {})


@pytest.mark.parametrize("text", [
    b"", b"{}", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"memory": {}}', b"<!DOCTYPE html>",
])  # fmt: skip
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="the file is not a report that python -m") as caught:
        read_saved_reports(path)
    assert "\n" not in str(caught.value)


def places(value, path=()):
    """Yield the path of every value inside a document."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


SMALL = copy.deepcopy(DOCUMENT)
for small in SMALL["memory"]["ipus"]:
    small["liveness"] = []
PLACES = [path for path in places(SMALL) if path]
VALUES = (
    st.none()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text()
    | st.just([])
    | st.just({})
)


@given(st.sampled_from(PLACES), VALUES)
def test_a_damaged_report_is_refused_or_compared(path, value):
    document = copy.deepcopy(SMALL)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with contextlib.suppress(ValueError):
        found = saved_reports(document, "damaged.json")
        section = comparison_section(found, saved_reports(DOCUMENT, "whole.json"))
        figures = [part.figure for part in section.parts if isinstance(part, Chart)]
        json.dumps(figures, allow_nan=False)
