"""Spellings of earlier PopTorch releases are found under PopTorch's own name as well."""

from __future__ import annotations

import importlib

import pytest

from popdist_py.poptorch.old_spellings import TABLE, How

pytestmark = pytest.mark.usefixtures("names")
NAMES = [one for one in TABLE if one.where.startswith("poptorch") and not one.where.endswith("()")]


@pytest.mark.parametrize("spelling", NAMES, ids=lambda one: one.old_text)
def test_an_old_name(spelling):
    theirs = importlib.import_module(spelling.where)
    ours = importlib.import_module(f"popdist_py.{spelling.where}")
    if spelling.how is How.REFUSED:
        with pytest.raises(AttributeError, match="is gone: "):
            getattr(theirs, spelling.old)
        return
    found, expected = (getattr(module, spelling.old) for module in (theirs, ours))
    assert getattr(found, "func", found) is getattr(expected, "func", expected)
