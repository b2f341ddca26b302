"""A fixture that counts function calls, because durations depend on the machine."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session")
def calls():
    """Return a function that counts all function calls within a call."""

    def counted(function) -> int:
        count = 0

        def count_calls(_, event, __):
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_calls)
        try:
            function()
        finally:
            sys.setprofile(before)
        return count

    return counted
