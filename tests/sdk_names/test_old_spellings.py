"""Spellings of earlier PopTorch releases are found under PopTorch's own name as well."""

from __future__ import annotations

import importlib

import pytest

from popdist_py.poptorch.old_spellings import TABLE, How

pytestmark = pytest.mark.usefixtures("names")
NAMES = [one for one in TABLE if one.where.startswith("poptorch") and not one.where.endswith("()")]


def test_old_names_are_found_and_removed_ones_are_refused_with_what_to_do():
    assert {spelling.how is How.REFUSED for spelling in NAMES} == {True, False}
    for spelling in NAMES:
        theirs = importlib.import_module(spelling.where)
        ours = importlib.import_module(f"popdist_py.{spelling.where}")
        if spelling.how is How.REFUSED:
            with pytest.raises(AttributeError, match="was removed from PopTorch: "):
                getattr(theirs, spelling.old)
        else:
            found, expected = (getattr(module, spelling.old) for module in (theirs, ours))
            assert getattr(found, "func", found) is getattr(expected, "func", expected), spelling
