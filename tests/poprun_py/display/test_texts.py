"""Texts of figures: memory, numbers, durations, ranges; and tables that fit a terminal."""

import pytest

from poprun_py.display.formatting import (
    bytes_text,
    date_text,
    duration_text,
    iso_date_text,
    milliseconds_text,
    numbered,
    printable,
)
from poprun_py.display.tables import (
    Column,
    aligned_rows,
    fitted_table,
    long_table_lines,
    rich_lines,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 KiB"), (3 << 10, "3 KiB"), (345 << 20, "345 MiB"), (3 << 29, "1.5 GiB")],
)
def test_memory_has_the_unit_of_its_size(count, text):
    assert bytes_text(count) == text
    assert bytes_text(10 << 30, decimals=0) == "10 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2149, "3.21 s"), (250, "4 min 10 s"), (7500, "2 h 5 min")]
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration_text(seconds) == text


def test_times():
    assert milliseconds_text(0.01234) == "12.3 ms"
    assert date_text(1.25, milliseconds=True) == f"{date_text(1)}.250"
    assert iso_date_text("2026-01-31T12:00:00+01:00") == "2026-01-31 12:00:00 +0100"
    assert iso_date_text("yesterday") == ""


def test_nouns_with_numbers():
    assert numbered("CPU", [3]) == "CPU 3"
    assert numbered("IPU", range(3, 6)) == "IPUs 3-5"


def test_control_characters_are_not_printed():
    assert printable("a\x1b[2J\n") == "a?[2J?"
    assert printable("a\x1b\nb", keep="\n", replacement=" ") == "a \nb"


def test_rows_are_aligned():
    assert aligned_rows([("a", "bb"), ("ccc", "d")], " | ") == ["a   | bb", "ccc | d "]


def test_a_narrow_table_drops_columns_in_their_order():
    columns = [
        Column("run", ("a" * 8,), is_text=True),
        Column("x", ("1",), 2),
        Column("y", ("2",), 1),
    ]
    titles = {
        width: rich_lines(fitted_table(columns, width=width), width=width)[0].split()
        for width in (14, 13, 8)
    }
    assert titles == {14: ["run", "x", "y"], 13: ["run", "x"], 8: ["run"]}


def test_a_narrow_table_drops_columns_without_values_first():
    columns = [
        Column("name", ("a", "b")),
        Column("state", ("running", "lost"), drop_order=1),
        Column("loss", ("-", "-"), drop_order=2),
        Column("step", ("", ""), drop_order=3),
    ]

    def titles(width):
        return long_table_lines(columns, width=width, row_styles=[None, None])[0].split()

    assert titles(40) == ["name", "state", "loss", "step"]
    assert titles(19) == ["name", "state", "step"]
    assert titles(14) == ["name", "state"]
    assert titles(8) == ["name"]
