"""Option types as parameter types of click."""

from __future__ import annotations

import click
import pytest

from poprun_py.options.click_types import ClickType
from poprun_py.options.option_types import TEXT, exact_choice, whole_number


def convert(option_type, text):
    param = click.Option(["--x"], type=ClickType(option_type))
    return param.type_cast_value(click.Context(click.Command("c")), text)


def completed(click_type, incomplete):
    param = click.Option(["--x"], type=click_type)
    items = click_type.shell_complete(click.Context(click.Command("c")), param, incomplete)
    return [item.value for item in items]


def test_text_is_read_and_checked():
    assert convert(whole_number(1), "3") == 3
    assert convert(exact_choice("Ab", "C"), "ab") == "Ab"
    for text in ("0", "x"):
        with pytest.raises(click.BadParameter, match=f"'{text}': expected a whole number of at"):
            convert(whole_number(1), text)


def test_choices_or_given_names_are_completed():
    assert completed(ClickType(exact_choice("one", "other", "two")), "o") == ["one", "other"]
    assert completed(ClickType(TEXT, lambda _: ["p0", "q1"]), "p") == ["p0"]
