"""The grammar of counts in messages."""

from __future__ import annotations

from popdist_py.errors import are, counted, plural


def test_a_count_has_the_number_of_its_noun_and_verb():
    assert [counted(count, "IPU") for count in (0, 1, 2)] == ["0 IPUs", "1 IPU", "2 IPUs"]
    assert [plural(noun, 2) for noun in ("process", "batch", "host")] == [
        "processes", "batches", "hosts",
    ]  # fmt: skip
    assert (counted(1.0, "CPU", "g"), counted(0.5, "CPU", "g")) == ("1 CPU", "0.5 CPUs")
    assert counted(12_345, "span", ",") == "12,345 spans"
    assert [are(count) for count in (1, 2)] == ["is", "are"]
