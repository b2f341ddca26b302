"""Tests of the words that error messages share."""

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.errors import shortened


@given(st.text(max_size=200))
def test_a_value_in_a_message_is_at_most_80_characters_and_begins_as_given(value):
    shown = shortened(value)
    assert len(shown) <= 80
    assert shown == value or (len(value) > 80 and shown == value[:77] + "...")
