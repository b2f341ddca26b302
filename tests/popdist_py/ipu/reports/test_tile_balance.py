"""Tile balance: the mean work of an IPU's tiles, divided by the busiest tile's work."""

from __future__ import annotations

import pytest

from popdist_py.ipu.graph import Graph, Operation, Placement, Tensor
from popdist_py.ipu.reports.tile_balance import tile_balance
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.stage_cycles import CYCLE_MODEL

INFERENCE = Settings(is_training=False)


def doubled(elements: int) -> Graph:
    """Return a graph of one operation, whose input and output have ``elements`` elements each."""
    data, made = Tensor("x", elements), Tensor("y", elements)
    operation = Operation("double", "elementwise", ("x",), made)
    return Graph((data,), (), (operation,), ("y",), batch=1)


@pytest.mark.parametrize(
    ("grains", "expected"),
    [(1472, 1.0), (2 * 1472, 1.0), (1473, 1473 / (2 * 1472)), (10, 10 / 1472)],
)
def test_a_tile_with_a_grain_more_has_more_work(grains, expected):
    graph = doubled(grains * 16 // 2 // 2)
    found = tile_balance(graph, Placement.cut(graph), INFERENCE, MK2, CYCLE_MODEL, 16)
    assert found == (pytest.approx(expected),)


def test_tiles_for_input_have_no_share_and_an_idle_ipu_is_balanced():
    graph = doubled(1408 * 16 // 2 // 2)
    settings = Settings(is_training=False, io_tiles=64)
    placement = Placement((0,), (1,))
    assert tile_balance(graph, placement, settings, MK2, CYCLE_MODEL, 16) == (1.0, 1.0)
