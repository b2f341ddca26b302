"""Contrast of the chart colours, and their differences for people with colour blindness."""

from __future__ import annotations

import itertools

import pytest

from popdist_py.html_pages.chart_colours import DARK, NUM_COLOURS, dash, series_colour

# Models of colour blindness by Machado, Oliveira and Fernandes (2009), with severity 1.
SIGHTS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                 (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
SERIES = [series_colour(index) for index in range(NUM_COLOURS)]
GROUNDS = {"light": (SERIES, "#ffffff"), "dark": ([DARK[each] for each in SERIES], "#172033")}


def linear(colour: str) -> tuple[float, ...]:
    parts = (byte / 255 for byte in bytes.fromhex(colour[1:]))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    red, green, blue = (min(1.0, max(0.0, each)) for each in rgb)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    rows = SIGHTS[sight]
    return lab(tuple(sum(a * b for a, b in zip(row, rgb, strict=True)) for row in rows))


@pytest.mark.parametrize("ground", GROUNDS)
def test_colours_have_enough_contrast_with_the_page(ground):
    colours, page = GROUNDS[ground]
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("ground", GROUNDS)
def test_colours_can_be_distinguished(ground, sight):
    colours, _ = GROUNDS[ground]
    for one, other in itertools.combinations([seen(colour, sight) for colour in colours], 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 15


def test_series_with_one_colour_have_different_dashes():
    looks = {(series_colour(index), dash(index)) for index in range(4 * NUM_COLOURS)}
    assert len(looks) == 4 * NUM_COLOURS
