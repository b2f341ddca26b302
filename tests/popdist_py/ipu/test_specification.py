"""The figures of the types of IPU: published figures agree with one another."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from popdist_py.ipu.specification import BOW, IPU, IPUS, MK1, MK2, sources


def test_published_figures_follow():
    assert MK1.memory == 304 * 2**20
    assert MK2.memory == BOW.memory == 940_572_672
    assert MK1.peak("float16") == pytest.approx(124.5e12, rel=1e-3)
    assert MK1.peak("float32") == pytest.approx(31.1e12, rel=1e-3)
    assert MK2.peak("float16") == pytest.approx(250e12, rel=0.01)
    assert MK2.peak("float32") == pytest.approx(62.5e12, rel=0.01)
    assert BOW.peak("float16") == pytest.approx(350e12, rel=0.01)
    assert MK2.tiles * MK2.exchange_rate * MK2.clock == pytest.approx(8e12, rel=0.03)
    assert MK2.tiles * MK2.memory_rate * MK2.clock == pytest.approx(47.5e12, rel=0.02)


def test_wider_types_halve_the_rate():
    assert MK2.peak("float16", "float32") == MK2.peak("float16") / 2
    assert MK2.peak("float32") == MK2.peak("float16") / 4


def test_float32_partial_sums_do_not_slow_mk1_down():
    # Jia et al. give 124.5 Tflop/s for products of float16 that are summed in float32.
    assert MK1.peak("float16", "float32") == pytest.approx(124.5e12, rel=1e-3)


@pytest.mark.parametrize("ipu", IPUS.values(), ids=IPUS)
def test_wider_types_are_never_faster(ipu):
    types = [("float32", "float32"), ("float16", "float32"), ("float16", "float16")]
    rates = [ipu.product_rate(*each) for each in types]
    assert rates == sorted(rates)


@pytest.mark.parametrize("ipu", IPUS.values(), ids=IPUS)
def test_every_figure_has_a_source(ipu):
    given = sources(ipu)
    assert list(given) == [field.name for field in fields(IPU)]
    assert "given by the user" not in given.values()


def test_a_custom_type_of_ipu():
    small = replace(MK2, name="small", tiles=4)
    assert small.memory == 4 * MK2.tile_bytes
    assert sources(small)["tile_bytes"] == "given by the user"
